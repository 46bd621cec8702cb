import json
import math
from collections.abc import Callable

from posttrain.train.watch.values import StepValues

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
    found = make_values(7).to_json()
    assert found.keys() >= PROMISED
    assert found["step"] == 7
    assert found["group_norms"] == {"layers.0": 0.5, "layers.1": 0.6}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_numbers_that_are_none_become_null(make_values: MakeValues) -> None:
    groups = {"a": math.inf, "b": 1.0}
    found = make_values(0, loss=math.nan, grad_norm=math.inf, group_norms=groups, mfu=None).to_json()
    assert (found["loss"], found["grad_norm"], found["mfu"]) == (None, None, None)
    assert found["group_norms"] == {"a": None, "b": 1.0}
    json.dumps(found, allow_nan=False)


def test_numbers_for_plots(make_values: MakeValues) -> None:
    found = make_values(3, loss=math.nan, loss_scale=None).numbers()
    assert found["grad_norm/layers.1"] == 0.6
    assert found["lr"] == 1e-4
    assert found.keys().isdisjoint({"loss", "loss_scale", "step", "group_norms"})
    assert all(isinstance(number, float) for number in found.values())


def test_what_the_objective_measures_and_the_phases_are_plotted_under_names_of_their_own(
    make_values: MakeValues,
) -> None:
    values = make_values(3, metrics={"rewards/margins": 0.25, "kl": math.inf}, phases={"forward": 1.5})
    found = values.numbers()
    assert (found["objective/rewards/margins"], found["seconds/forward"]) == (0.25, 1.5)
    assert found.keys().isdisjoint({"objective/kl", "metrics", "phases", "rewards/margins"})
    assert values.to_json()["metrics"] == {"rewards/margins": 0.25, "kl": None}


def test_a_step_comes_back_from_its_line(make_values: MakeValues) -> None:
    values = make_values(3, metrics={"a": 1.0}, phases={"head": 0.1})
    line = json.loads(json.dumps(values.to_json()))
    assert StepValues.from_json(line) == values
    # Lines of before there were metrics and phases.
    del line["metrics"], line["phases"]
    assert StepValues.from_json(line).metrics == {}
    lost = StepValues.from_json(make_values(3, metrics={"a": math.nan}, group_norms={"b": math.inf}).to_json())
    assert math.isnan(lost.metrics["a"])
    assert math.isnan(lost.group_norms["b"])
