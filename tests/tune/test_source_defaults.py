"""Earlier trials count with the defaults of settings that their study lacked."""

from typing import Any

import numpy as np
import pytest

from posttrain.tune import Float, Space
from posttrain.tune.api import optimize
from posttrain.tune.gaussian_process import encode
from posttrain.tune.goal import Goal
from posttrain.tune.runs import open_trials
from posttrain.tune.transfer import warm_start
from posttrain.tune.transfer.past import PastStudy
from posttrain.tune.transfer.warm_start import Transfer
from posttrain.tune.trial import Trial, TrialState

LINE, SQUARE = Space({"x": Float(0, 1)}), Space({"x": Float(0, 1), "new": Float(0, 10)})

TRIALS = tuple(Trial(n, {"x": n / 19}, {"x": n / 19}, TrialState.FINISHED, value=abs(n - 6)) for n in range(20))

SOURCE = PastStudy("source", Goal(LINE), {}, TRIALS)


def test_a_study_hands_its_defaults_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forest is fitted to the value that the source was run with."""
    seen: list[np.ndarray] = []

    def record(space: Space, drawn: Any) -> np.ndarray:
        seen.append(encode(space, drawn))
        return seen[-1]

    monkeypatch.setattr(warm_start, "encode", record)
    optimize(
        lambda: open_trials("inline", lambda trial: float(trial["x"])),
        Goal(SQUARE),
        budget=10,
        sampler="random",
        transfer=Transfer([SOURCE], defaults={"new": 2.0}),
        seed=1,
    )
    assert sum(bool(np.allclose(point[1], 0.2)) for point in seen) >= 20
