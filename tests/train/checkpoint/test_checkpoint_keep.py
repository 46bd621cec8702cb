"""Retention of checkpoints, and their config."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.monitor.metrics import StepValues

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]


@pytest.mark.parametrize(
    ("config", "saved", "expected"),
    [
        ({}, [1, 2, 3], [2, 3]),
        ({}, [7], [7]),
        ({"keep_last": 1}, [1, 2, 3], [3]),
        ({"keep_last": 5}, [1, 2, 3], [1, 2, 3]),
        ({"keep_last": 1}, [999_999_999, 1_000_000_000], [1_000_000_000]),
    ],
)
def test_the_newest_are_kept(
    folder: Path, make: Make, config: dict[str, Any], saved: list[int], expected: list[int]
) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, **config))
    small = make(1)
    for step in saved:
        checkpoints.save(step, small)
        assert checkpoints.steps()[-1] == step
    assert checkpoints.steps() == expected


def test_the_best_of_each_that_is_kept_is_kept(folder: Path, make: Make) -> None:
    """Of the steps up to a checkpoint: a rollback to one before a better step finds the best until then."""

    def best(steps: Sequence[StepValues]) -> int | None:
        return max((done for done in (2, 5) if done <= len(steps)), default=None)

    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=2), best)
    kept = {}
    for step in range(1, 9):
        checkpoints.save(step, make(step))
        kept[step] = checkpoints.steps()
    assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [2, 4, 5], 6: [5, 6], 7: [5, 6, 7], 8: [5, 7, 8]}


def test_a_step_saved_again_is_replaced(two_checkpoints: Checkpoints, make: Make, same: Same) -> None:
    two_checkpoints.save(4, make(4, version=1))
    assert same(two_checkpoints.latest(), make(4, version=1))
    assert two_checkpoints.steps() == [3, 4]
    assert sorted(path.name for path in two_checkpoints.folder.iterdir()) == [
        ".lock",
        "step-000000003",
        "step-000000004",
        "tmp",
    ]


def test_saving_an_earlier_step_keeps_it(two_checkpoints: Checkpoints, make: Make, same: Same) -> None:
    two_checkpoints.save(1, make(1))
    assert same(two_checkpoints.at(1), make(1))
    assert two_checkpoints.steps() == [1, 3, 4]


def test_rewind_removes_later_checkpoints(
    folder: Path, make: Make, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    """Later checkpoints are removed, also for a process that starts after a kill."""
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step in (2, 4, 6, 8):
        checkpoints.save(step, make(step))
    assert checkpoints.rewind(1) is None
    assert checkpoints.steps() == [2, 4, 6, 8], "nothing to start from, nothing removed"
    assert same(checkpoints.rewind(7), make(6))
    assert checkpoints.steps() == [2, 4, 6]
    (folder / "step-000000006" / "state.json").unlink()
    assert same(checkpoints.rewind(6), make(4))
    assert "step-000000006 is damaged" in caplog.text
    assert same(Checkpoints(folder).latest(), make(4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_last": 0}, "`keep_last`"),
        ({"every_seconds": 0}, "`every_seconds`"),
        ({"every_steps": -1}, "`every_steps`"),
        ({"keep_lats": 3}, "keep_last"),
    ],
)
def test_an_invalid_config_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CheckpointConfig.read(values, "posttrain.yaml")
