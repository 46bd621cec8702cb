"""The pace at which curricula open the harder records."""

import math

import pytest

from posttrain.train.data.config import CurriculumConfig
from posttrain.train.data.curriculum import AdaptiveCurriculum, competence, fully_open_step


def test_competence_follows_the_paper() -> None:
    """c(t) = min(1, sqrt(t (1 - c0^2) / T + c0^2)), Platanios et al. 2019; T is 40 of 100 steps."""
    config = CurriculumConfig(name="fixed", start=0.01, duration=0.4)
    for step in range(100):
        expected = min(1.0, math.sqrt(step * (1 - 0.01**2) / 40 + 0.01**2))
        assert competence(config, step, 100) == pytest.approx(expected)
    assert competence(config, 39, 100) < 1 == competence(config, 40, 100)


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
