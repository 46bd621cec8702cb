import json
import math
from collections.abc import Callable

import pytest

from posttrain.train.monitor.metrics import StepValues, mean_loss

MakeValues = Callable[..., StepValues]

DOCUMENTED = {
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


def test_a_line_has_the_documented_keys(make_values: MakeValues) -> None:
    result = make_values(7).to_json()
    assert result.keys() >= DOCUMENTED
    assert result["step"] == 7
    assert result["group_norms"] == {"layers.0": 0.5, "layers.1": 0.6}
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_nan_and_infinity_become_null(make_values: MakeValues) -> None:
    groups = {"a": math.inf, "b": 1.0}
    result = make_values(0, loss=math.nan, grad_norm=math.inf, group_norms=groups, mfu=None).to_json()
    assert (result["loss"], result["grad_norm"], result["mfu"]) == (None, None, None)
    assert result["group_norms"] == {"a": None, "b": 1.0}
    json.dumps(result, allow_nan=False)


def test_numbers_are_flat_and_finite(make_values: MakeValues) -> None:
    result = make_values(3, loss=math.nan, loss_scale=None).numbers()
    assert result["grad_norm/layers.1"] == 0.6
    assert result["lr"] == 1e-4
    assert result.keys().isdisjoint({"loss", "loss_scale", "step", "group_norms"})
    assert all(isinstance(number, float) for number in result.values())


def test_objective_metrics_and_phases_have_prefixed_names(
    make_values: MakeValues,
) -> None:
    values = make_values(3, metrics={"rewards/margins": 0.25, "kl": math.inf}, phases={"forward": 1.5})
    result = values.numbers()
    assert (result["objective/rewards/margins"], result["seconds/forward"]) == (0.25, 1.5)
    assert result.keys().isdisjoint({"objective/kl", "metrics", "phases", "rewards/margins"})
    assert values.to_json()["metrics"] == {"rewards/margins": 0.25, "kl": None}


def test_a_step_loads_from_its_line(make_values: MakeValues) -> None:
    values = make_values(3, metrics={"a": 1.0}, phases={"head": 0.1})
    line = json.loads(json.dumps(values.to_json()))
    assert StepValues.from_json(line) == values
    values_with_nan = StepValues.from_json(
        make_values(3, metrics={"a": math.nan}, group_norms={"b": math.inf}).to_json()
    )
    assert math.isnan(values_with_nan.metrics["a"])
    assert math.isnan(values_with_nan.group_norms["b"])


def test_the_mean_loss_divides_sums_by_counts(make_values: MakeValues) -> None:
    def steps(*losses_and_counts: tuple[float, float]) -> list[StepValues]:
        return [make_values(step, loss=loss, loss_count=count) for step, (loss, count) in enumerate(losses_and_counts)]

    assert mean_loss(steps((1.0, 4), (4.0, 2), (math.nan, 100), (math.inf, 3))) == pytest.approx((1 * 4 + 4 * 2) / 6)
    assert mean_loss(steps((0.0, 0), (2.0, 3))) == 2.0
    assert mean_loss(steps((0.0, 0), (math.nan, 1))) is None
    assert mean_loss([]) is None
