"""How fast curricula open the harder records."""

import math

import pytest

from posttrain.train.data.config import CurriculumConfig
from posttrain.train.data.curriculum import AdaptiveCurriculum, competence, fully_open_step


@pytest.mark.parametrize(("pacing", "power"), [("linear", 2.0), ("root", 2.0), ("root", 5.0)])
def test_the_competence_of_the_paper(pacing: str, power: float) -> None:
    """c(t) = min(1, (t (1 - c0^p) / T + c0^p)^(1/p)), Platanios et al. 2019; T is 40 of 100 steps."""
    settings = {"name": "fixed", "start": 0.01, "duration": 0.4, "pacing": pacing, "power": power}
    config = CurriculumConfig.read(settings, "here")
    p = power if pacing == "root" else 1
    for step in range(100):
        expected = min(1.0, (step * (1 - 0.01**p) / 40 + 0.01**p) ** (1 / p))
        assert competence(config, step, 100) == pytest.approx(expected)
    assert competence(config, 39, 100) < 1 == competence(config, 40, 100)


def test_steps_are_equal() -> None:
    config = CurriculumConfig(name="fixed", start=0.2, duration=0.8, pacing="step", stairs=4)
    result = [competence(config, step, 10) for step in range(10)]
    assert result == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1, 1])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_trainings_open_all(steps: int) -> None:
    config = CurriculumConfig(name="fixed", duration=0.1)
    assert fully_open_step(config, steps) == 1
    assert competence(config, 1, steps) == 1


def observed(losses: list[float], **settings: float) -> AdaptiveCurriculum:
    curriculum = AdaptiveCurriculum(
        CurriculumConfig.read({"name": "adaptive", "every": 2, "start": 0.2, **settings}, ""), 100
    )
    for step, loss in enumerate(losses):
        curriculum.observe(step, loss)
    return curriculum


def test_it_opens_what_the_loss_has_earned() -> None:
    """From a first loss of 4 to the target of 2: half way there, half of what was closed is open."""
    assert observed([4, 4, 3, 3, 2, 2, 3.9, 4.1]).shares == pytest.approx([0.2, 0.2, 0.6, 1.0, 1.0])
    assert observed([4, 4, 5, 5, 3.5, 3.5], target=0.0).shares == pytest.approx([0.2, 0.2, 0.2, 0.3])


def test_a_loss_that_is_no_number_counts_for_nothing() -> None:
    assert observed([4, math.nan, math.inf, 3, math.nan, math.nan]).shares == pytest.approx([0.2, 0.2, 0.6, 0.6])
    assert observed([math.nan, math.nan, 4, 4, 2, 2]).shares == pytest.approx([0.2, 0.2, 0.2, 1.0])


@pytest.mark.parametrize("kept", range(8))
def test_it_goes_on_from_its_state(kept: int) -> None:
    losses = [4, 3.9, 3, 3.2, 3.5, 2.5, 2.4, 1.9]
    whole, part = observed(losses), observed(losses[:kept])
    again = AdaptiveCurriculum(whole.config, 100)
    again.load_state(part.state())
    for step in range(kept, 8):
        again.observe(step, losses[step])
    assert again.state() == whole.state()


def test_steps_are_told_of_in_order() -> None:
    curriculum = observed([4, 4, 4])
    for step in (2, 4):
        with pytest.raises(ValueError, match=f"step {step} does not follow 3 observed steps"):
            curriculum.observe(step, 1.0)
