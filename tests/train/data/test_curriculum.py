"""The pace at which curricula open the harder records."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import theilslopes

from posttrain.store.errors import UserError
from posttrain.train.data.config import CurriculumConfig
from posttrain.train.data.curriculum import (
    AdaptiveCurriculum,
    StagnationCurriculum,
    competence,
    edge_weights,
    fully_open_step,
    theil_sen_fall,
)


@pytest.mark.parametrize(("pacing", "power"), [("linear", 2.0), ("root", 2.0), ("root", 5.0)])
def test_competence_follows_the_paper(pacing: str, power: float) -> None:
    """c(t) = min(1, (t (1 - c0^p) / T + c0^p)^(1/p)), Platanios et al. 2019; T is 40 of 100 steps."""
    settings = {"name": "fixed", "start": 0.01, "duration": 0.4, "pacing": pacing, "power": power}
    config = CurriculumConfig.read(settings, "here")
    p = power if pacing == "root" else 1
    for step in range(100):
        expected = min(1.0, (step * (1 - 0.01**p) / 40 + 0.01**p) ** (1 / p))
        assert competence(config, step, 100) == pytest.approx(expected)
    assert competence(config, 39, 100) < 1 == competence(config, 40, 100)


def test_step_pacing_has_equal_stairs() -> None:
    config = CurriculumConfig(name="fixed", start=0.2, duration=0.8, pacing="step", stairs=4)
    result = [competence(config, step, 10) for step in range(10)]
    assert result == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1, 1])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_training_opens_all_records_after_one_step(steps: int) -> None:
    config = CurriculumConfig(name="fixed", duration=0.1)
    assert fully_open_step(config, steps) == 1
    assert competence(config, 1, steps) == 1


def curriculum_after(losses: list[float], **settings: float) -> AdaptiveCurriculum:
    curriculum = AdaptiveCurriculum(
        CurriculumConfig.read({"name": "adaptive", "every": 2, "start": 0.2, **settings}, ""), 100
    )
    for step, loss in enumerate(losses):
        curriculum.observe(step, loss)
    return curriculum


def test_an_adaptive_share_follows_the_loss() -> None:
    """The loss goes from 4 to the target of 2: halfway, half of the closed records are open."""
    assert curriculum_after([4, 4, 3, 3, 2, 2, 3.9, 4.1]).shares == pytest.approx([0.2, 0.2, 0.6, 1.0, 1.0])
    assert curriculum_after([4, 4, 5, 5, 3.5, 3.5], target=0.0).shares == pytest.approx([0.2, 0.2, 0.2, 0.3])


def test_nan_and_infinite_losses_are_ignored() -> None:
    assert curriculum_after([4, math.nan, math.inf, 3, math.nan, math.nan]).shares == pytest.approx(
        [0.2, 0.2, 0.6, 0.6]
    )
    assert curriculum_after([math.nan, math.nan, 4, 4, 2, 2]).shares == pytest.approx([0.2, 0.2, 0.2, 1.0])


@pytest.mark.parametrize("observed_steps", range(8))
def test_a_curriculum_resumes_from_its_state(observed_steps: int) -> None:
    losses = [4, 3.9, 3, 3.2, 3.5, 2.5, 2.4, 1.9]
    uninterrupted, interrupted = curriculum_after(losses), curriculum_after(losses[:observed_steps])
    resumed = AdaptiveCurriculum(uninterrupted.config, 100)
    resumed.load_state(interrupted.state())
    for step in range(observed_steps, 8):
        resumed.observe(step, losses[step])
    assert resumed.state() == uninterrupted.state()


def test_steps_must_be_observed_in_order() -> None:
    curriculum = curriculum_after([4, 4, 4])
    for step in (2, 4):
        with pytest.raises(ValueError, match=f"step {step} does not follow 3 observed steps"):
            curriculum.observe(step, 1.0)


STAGNATION = {"name": "stagnation", "every": 2, "window": 4, "start": 0.5, "stairs": 2, "tolerance": 0.05}


def stagnation_after(losses: list[float], **settings: Any) -> StagnationCurriculum:
    curriculum = StagnationCurriculum(CurriculumConfig.read(STAGNATION | settings, ""), 100)
    for step, loss in enumerate(losses):
        curriculum.observe(step, loss)
    return curriculum


def test_difficulty_rises_when_the_loss_has_stopped_falling(caplog: pytest.LogCaptureFixture) -> None:
    """One of two stairs at a time, and each after a whole window of its own."""
    caplog.set_level("INFO", "posttrain")
    assert stagnation_after([9, 8, 7, 6, 5, 4, 3, 2]).shares == [0.5] * 5
    assert stagnation_after([4, 4, 4]).shares == [0.5, 0.5], "the window is not full"
    assert stagnation_after([4] * 4).shares == [0.5, 0.5, 0.75]
    assert stagnation_after([4] * 6).shares == [0.5, 0.5, 0.75, 0.75], "the losses before the rise count no more"
    assert stagnation_after([4] * 12).shares == [0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0]
    opened = "the loss has stopped falling: {}% of the records are open"
    assert [line.strip() for line in caplog.messages[-2:]] == [opened.format(75), opened.format(100)]
    # Of a fall over the window by 4% and by 6% only the first one is within the tolerance of 5%.
    assert stagnation_after([3.06, 3.02, 2.98, 2.94]).shares[-1] == 0.75
    assert stagnation_after([3.09, 3.03, 2.97, 2.91]).shares[-1] == 0.5
    assert stagnation_after([1, 2, 3, 4]).shares[-1] == 0.75, "a rising loss has stopped falling"


def test_a_loss_on_its_way_to_zero_stops_falling() -> None:
    """Halved at every step, it falls by ever less of what it was at first, and by as much as ever of itself."""
    curriculum = stagnation_after([4 * 0.5**step for step in range(12)])
    # The first window has the median 1.5, 5% of which is 0.075; the windows to steps 4, 6, 8 and 10 fall by 13/16 of
    # their first loss.
    assert [0.8125 * 4 * 0.5**step for step in (0, 2, 4, 6)] == [3.25, 0.8125, 0.203125, 0.05078125]
    assert curriculum.shares == [0.5] * 5 + [0.75] * 2


def test_a_single_spike_neither_delays_nor_hastens_a_rise() -> None:
    flat, falling = [4.0] * 8, [9.0 - step for step in range(8)]
    for step in range(8):
        for spike in (0.0, 1000.0):
            assert theil_sen_fall([(s, spike if s == step else loss) for s, loss in enumerate(flat)], 8) == 0
            fall = theil_sen_fall([(s, spike if s == step else loss) for s, loss in enumerate(falling)], 8)
            assert fall == pytest.approx(7)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_the_slope_is_that_of_theil_and_sen(losses: list[float]) -> None:
    fall = -theilslopes(losses).slope * 19
    assert theil_sen_fall(list(enumerate(losses)), 20) == pytest.approx(fall, rel=1e-9, abs=1e-9)


def test_windows_of_nan_decide_nothing() -> None:
    nan = math.nan
    assert stagnation_after([nan] * 8).shares == [0.5] * 5
    assert stagnation_after([4, nan, nan, 4]).shares == [0.5] * 3
    assert stagnation_after([4, nan, 4, 4]).shares == [0.5, 0.5, 0.75]
    assert stagnation_after([nan, math.inf, 4, nan, 4, 4]).shares == [0.5, 0.5, 0.5, 0.75]


@pytest.mark.parametrize("observed_steps", range(15))
def test_stagnation_resumes_from_its_state(observed_steps: int) -> None:
    losses = [4, 4, math.nan, 4, 5, 4.5, 4, 3.5, 3.4, 3.4, 3.4, 3.5, 3, 2, 1]
    uninterrupted, interrupted = stagnation_after(losses), stagnation_after(losses[:observed_steps])
    assert uninterrupted.shares[-1] == 1.0
    resumed = StagnationCurriculum(uninterrupted.config, 100)
    resumed.load_state(json.loads(json.dumps(interrupted.state())))
    for step in range(observed_steps, len(losses)):
        resumed.observe(step, losses[step])
    assert resumed.state() == uninterrupted.state()
    assert resumed.shares == uninterrupted.shares


@given(st.integers(1, 200), st.floats(0.01, 1), st.floats(0, 5), st.floats(0.01, 1))
def test_the_edge_of_what_is_open_is_drawn_most_often(count: int, share: float, emphasis: float, width: float) -> None:
    opened = math.ceil(share * count)
    weights = edge_weights(count, opened, CurriculumConfig(emphasis=emphasis, width=width))
    assert weights[-1] == 1 + emphasis
    assert (np.diff(weights) >= 0).all()
    assert weights.min() >= 1
    # A record one width below the threshold has exp(-1/2) of the emphasis.
    below = round(width * count)
    if below < opened:
        assert weights[opened - 1 - below] == pytest.approx(
            1 + emphasis * math.exp(-((below / count / width) ** 2) / 2)
        )


@pytest.mark.parametrize("settings", [{"window": 1}, {"tolerance": -0.1}, {"emphasis": -1}, {"width": 0}])
def test_impossible_settings_of_stagnation_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        CurriculumConfig.read(STAGNATION | settings, "here")
