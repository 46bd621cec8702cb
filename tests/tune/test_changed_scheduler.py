"""Studies whose scheduler changes and changes back: no trial that has ended runs again, and none is counted twice."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.tune import Float, Space
from posttrain.tune.api import optimize
from posttrain.tune.goal import Goal
from posttrain.tune.runs import CurvePoint, replay

SCHEDULERS: dict[str, Any] = {
    "asha 9": {"name": "asha", "max_resource": 9},
    "asha 4": {"name": "asha", "max_resource": 4},
    "asha eta 2": {"name": "asha", "max_resource": 9, "eta": 2},
    "hyperband 9": {"name": "hyperband", "max_resource": 9},
    "halving 4": {"name": "successive_halving", "max_resource": 4, "eta": 2},
    "none": "none",
}


def curve(settings: Any) -> list[CurvePoint]:
    return [CurvePoint(abs(settings["x"] - 0.3) + 1 / step) for step in range(1, 10)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *[("asha 9", "asha eta 2"), ("asha eta 2", "hyperband 9"), ("asha 4", "asha 9")],
        *[("hyperband 9", "halving 4"), ("asha 9", "none"), ("halving 4", "asha 9"), ("none", "hyperband 9")],
    ],
)
def test_there_and_back(first: str, second: str, tmp_path: Path) -> None:
    ended: dict[int, Any] = {}
    for turn, name in enumerate((first, second, first, second)):
        result = optimize(
            lambda: replay(curve),
            Goal(Space({"x": Float(0, 1)})),
            budget=6 * (turn + 1),
            sampler="random",
            scheduler=SCHEDULERS[name],
            seed=turn,
            out=tmp_path,
        )
        assert len(result.trials) == 6 * (turn + 1)
        for number, trial in ended.items():
            assert result.trials[number] == trial
        ended |= {trial.number: trial for trial in result.trials if trial.ended}
