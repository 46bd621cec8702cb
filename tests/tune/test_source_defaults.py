"""Earlier trials count with the defaults of settings that their study lacked, for `rgpe` and for the first points."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from posttrain.tune import Float, Space
from posttrain.tune.api import optimize
from posttrain.tune.backends.inline import InlineBackend
from posttrain.tune.gaussian_process import encode_all
from posttrain.tune.samplers.base import SearchContext
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.transfer import rgpe, warm_start
from posttrain.tune.transfer.past import PastStudy, Task
from posttrain.tune.transfer.rgpe import RgpeSampler
from posttrain.tune.trial import Trial, TrialState
from posttrain.tune.versions import Goal

LINE, SQUARE = Space({"x": Float(0, 1)}), Space({"x": Float(0, 1), "new": Float(0, 10)})

TRIALS = tuple(Trial(n, {"x": n / 19}, {"x": n / 19}, TrialState.FINISHED, value=abs(n - 6)) for n in range(20))

SOURCE = PastStudy("source", Goal("value", False, LINE), Task(), TRIALS)


@pytest.mark.parametrize(("defaults", "expected"), [({"new": 2.0}, 0.2), ({}, 0.5)])
def test_sources_of_rgpe_have_the_default(defaults: dict[str, Any], expected: float) -> None:
    sampler = make_sampler("rgpe", SQUARE)
    assert isinstance(sampler, RgpeSampler)
    sampler.begin(SearchContext(sources=(SOURCE,), defaults=defaults))
    (source,) = sampler._sources
    np.testing.assert_allclose(source.process.points[:, 1], expected)


@pytest.mark.parametrize("sampler", ["rgpe", "random"])
def test_a_study_hands_its_defaults_on(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forest and the ensemble are both fitted to the value that the source was run with."""
    seen: list[np.ndarray] = []

    def record(space: Space, points: Sequence[Any]) -> np.ndarray:
        encoded = encode_all(space, points)
        seen.append(encoded)
        return encoded

    monkeypatch.setattr(rgpe, "encode_all", record)
    monkeypatch.setattr(warm_start, "encode", lambda space, drawn: record(space, [drawn])[0])
    optimize(
        lambda: InlineBackend(lambda trial: float(trial["x"])),
        SQUARE,
        budget=10,
        sampler=sampler,
        past=[SOURCE],
        defaults={"new": 2.0},
        seed=1,
    )
    assert seen
    from_source = [points for points in seen if len(points) == (20 if sampler == "rgpe" else 1)]
    assert sum(bool(np.allclose(points[:, 1], 0.2)) for points in from_source) >= (1 if sampler == "rgpe" else 20)
