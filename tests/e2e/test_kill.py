"""``kill -9`` at any moment, then the same command again: the result of a run that was never interrupted."""

import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest

MOMENTS = [random.Random(f"kill {number}").uniform(0.02, 0.97) for number in range(20)]


def same(found: dict[str, Any], reference: dict[str, Any]) -> None:
    for name, value in found.items():
        assert value == reference[name], name


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment:.3f}")
def test_kill_at_a_random_moment(demo: Callable[..., Any], reference: dict[str, Any], moment: float) -> None:
    killed, seconds = demo(), reference["seconds"]
    while not killed.kill_after(moment * seconds):  # faster than the reference was: that was no kill
        shutil.rmtree(killed.folder)
        seconds *= 0.8
    killed.finish()
    same(killed.outcome(), reference)
    killed.check_the_store()


def test_kill_again_and_again(demo: Callable[..., Any], reference: dict[str, Any]) -> None:
    """Every two seconds of work; a little more each time, as a machine may need longer to get going at all."""
    killed = demo()
    patience, kills = 2.0, 0
    while not killed.done_before_a_kill(patience):
        kills += 1
        patience *= 1.3
    assert kills >= 2
    same(killed.outcome(), reference)
    killed.check_the_store()
