"""``kill -9`` at any moment, then the same command again: the result of a run that was never interrupted."""

import random
from typing import Any

import pytest
from loops import Loop

MOMENTS = [random.Random(f"kill {number}").uniform(0.02, 0.97) for number in range(10)]


def killed_after(share: float, loop: Loop, reference: dict[str, Any]) -> dict[str, Any]:
    """What a loop ends in that was killed once and called again, but for the seconds, which are the reference's."""
    seconds = reference["seconds"]
    while not loop.kill_after(share * seconds):  # faster than the reference was: that was no kill
        loop.afresh()
        seconds *= 0.8
    loop.finish()
    loop.check_the_store()
    return {**loop.outcome(), "seconds": reference["seconds"]}


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment:.3f}")
def test_kill_at_a_random_moment(small_loop: Loop, small_reference: dict[str, Any], moment: float) -> None:
    assert killed_after(moment, small_loop, small_reference) == small_reference


@pytest.mark.parametrize("moment", [0.7])
def test_kill_the_demo(demo: Loop, demo_reference: dict[str, Any], moment: float) -> None:
    assert killed_after(moment, demo, demo_reference) == demo_reference
    assert (demo.folder / "report.html").stat().st_size > 0


def test_kill_again_and_again(small_loop: Loop, small_reference: dict[str, Any]) -> None:
    """Every few seconds of work; more each time, as a machine may need longer to get going at all."""
    patience, kills = 1.5, 0
    while not small_loop.done_before_a_kill(patience):
        kills += 1
        patience *= 1.5
    assert kills >= 2
    assert {**small_loop.outcome(), "seconds": small_reference["seconds"]} == small_reference
    small_loop.check_the_store()
