import json
import math
from collections.abc import Callable

import pytest

from posttrain.train.monitor.metrics import StepValues, mean_loss

MakeValues = Callable[..., StepValues]

PROMISED = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "supervised_tokens",
    "seconds",
    "tokens_per_second",
    "memory_bytes",
}


def test_what_the_metrics_file_promises_is_there(make_values: MakeValues) -> None:
    result = make_values(7).to_json()
    assert result.keys() >= PROMISED
    assert result["step"] == 7
    assert result["group_norms"] == {"layers.0": 0.5, "layers.1": 0.6}
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_numbers_that_are_none_become_null(make_values: MakeValues) -> None:
    groups = {"a": math.inf, "b": 1.0}
    result = make_values(0, loss=math.nan, grad_norm=math.inf, group_norms=groups, mfu=None).to_json()
    assert (result["loss"], result["grad_norm"], result["mfu"]) == (None, None, None)
    assert result["group_norms"] == {"a": None, "b": 1.0}
    json.dumps(result, allow_nan=False)


def test_numbers_for_plots(make_values: MakeValues) -> None:
    result = make_values(3, loss=math.nan, loss_scale=None).numbers()
    assert result["grad_norm/layers.1"] == 0.6
    assert result["lr"] == 1e-4
    assert result.keys().isdisjoint({"loss", "loss_scale", "step", "group_norms"})
    assert all(isinstance(number, float) for number in result.values())


def test_what_the_objective_measures_and_the_phases_are_plotted_under_names_of_their_own(
    make_values: MakeValues,
) -> None:
    values = make_values(3, metrics={"rewards/margins": 0.25, "kl": math.inf}, phases={"forward": 1.5})
    result = values.numbers()
    assert (result["objective/rewards/margins"], result["seconds/forward"]) == (0.25, 1.5)
    assert result.keys().isdisjoint({"objective/kl", "metrics", "phases", "rewards/margins"})
    assert values.to_json()["metrics"] == {"rewards/margins": 0.25, "kl": None}


def test_a_step_comes_back_from_its_line(make_values: MakeValues) -> None:
    values = make_values(3, metrics={"a": 1.0}, phases={"head": 0.1})
    line = json.loads(json.dumps(values.to_json()))
    assert StepValues.from_json(line) == values
    # Lines of before there were metrics and phases.
    del line["metrics"], line["phases"]
    assert StepValues.from_json(line).metrics == {}
    # And of before there was loss_count.
    del line["loss_count"]
    assert StepValues.from_json(line).loss_count == values.supervised_tokens
    lost = StepValues.from_json(make_values(3, metrics={"a": math.nan}, group_norms={"b": math.inf}).to_json())
    assert math.isnan(lost.metrics["a"])
    assert math.isnan(lost.group_norms["b"])


def test_the_mean_loss_is_one_of_sums_and_counts(make_values: MakeValues) -> None:
    def steps(*measured: tuple[float, float]) -> list[StepValues]:
        return [make_values(step, loss=loss, loss_count=count) for step, (loss, count) in enumerate(measured)]

    assert mean_loss(steps((1.0, 4), (4.0, 2), (math.nan, 100), (math.inf, 3))) == pytest.approx((1 * 4 + 4 * 2) / 6)
    assert mean_loss(steps((0.0, 0), (2.0, 3))) == 2.0
    assert mean_loss(steps((0.0, 0), (math.nan, 1))) is None
    assert mean_loss([]) is None
