"""``kill -9`` at any moment, then the same command again: the result of a run that was never interrupted."""

import random
from typing import Any

import pytest
from loops import Loop

MOMENTS = [random.Random(f"kill {number}").uniform(0.02, 0.97) for number in (0, 1, 3)]


def outcome_after_kill(share: float, loop: Loop, reference: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a loop that was killed once and started again, with the seconds of the reference."""
    seconds = reference["seconds"]
    while not loop.kill_after(share * seconds):  # it finished before the kill
        loop.reset()
        seconds *= 0.8
    loop.finish()
    loop.check_store()
    return {**loop.outcome(), "seconds": reference["seconds"]}


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment:.3f}")
def test_kill_at_a_random_moment(small_loop: Loop, small_reference: dict[str, Any], moment: float) -> None:
    assert outcome_after_kill(moment, small_loop, small_reference) == small_reference


def test_kill_the_demo_in_its_second_round(demo: Loop) -> None:
    """The small loops above compare results; this one shows that the bundled task survives and reports."""
    assert demo.kill_when("round 2"), demo.log.read_text()
    demo.finish()
    demo.check_store()
    assert [entry["labels"] for entry in demo.outcome()["rounds"]] == [0, 48, 96, 144]
    assert (demo.folder / "report.html").stat().st_size > 0


@pytest.mark.each_change
def test_repeated_kills(small_loop: Loop, small_reference: dict[str, Any]) -> None:
    """The time before each kill grows, because a slow machine may need longer to start at all."""
    patience, kills = 0.4, 0
    while not small_loop.finishes_before_a_kill(patience):
        kills += 1
        patience *= 1.6
    assert kills >= 2
    assert {**small_loop.outcome(), "seconds": small_reference["seconds"]} == small_reference
    small_loop.check_store()
