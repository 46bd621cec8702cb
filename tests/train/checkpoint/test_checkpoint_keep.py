"""Retention of checkpoints, and their config."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.folder import SavedCheckpoint, rank_by_metric, steps_to_keep
from posttrain.train.checkpoint.format import Checkpoint

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]

# config, metric by step, steps that remain after saving all of them in order
TABLE: list[tuple[dict[str, Any], dict[int, float | None], list[int]]] = [
    ({}, {1: None, 2: None, 3: None}, [2, 3]),
    ({}, {7: None}, [7]),
    ({"keep_last": 1}, {1: None, 2: None, 3: None}, [3]),
    ({"keep_last": 5}, {1: None, 2: None, 3: None}, [1, 2, 3]),
    ({"keep_last": 1, "keep_best": True}, {1: 0.5, 2: 0.1, 3: 0.3, 4: 0.4}, [2, 4]),
    ({"keep_last": 1, "keep_best": True, "mode": "max"}, {1: 0.5, 2: 0.9, 3: 0.3, 4: 0.4}, [2, 4]),
    ({"keep_last": 1, "keep_best": True}, {1: 0.1, 2: 0.1, 3: 0.1}, [1, 3]),
    ({"keep_last": 1, "keep_best": True}, {1: None, 2: 0.9, 3: None}, [2, 3]),
    ({"keep_last": 1, "keep_best": True}, {1: 0.5, 2: math.nan, 3: -math.inf, 4: None}, [1, 4]),
    ({"keep_last": 1, "keep_best": True, "mode": "max"}, {1: 0.5, 2: math.nan, 3: math.inf, 4: 0.1}, [1, 4]),
    ({"keep_last": 1, "keep_best": True}, {1: None, 2: None}, [2]),
    ({"keep_last": 1}, {1: 0.1, 2: 0.2}, [2]),
    ({"keep_last": 1, "keep_every": 3}, dict.fromkeys(range(10)), [0, 3, 6, 9]),
    ({"keep_last": 2, "keep_every": 4}, dict.fromkeys(range(1, 11)), [4, 8, 9, 10]),
    ({"keep_last": 1, "keep_every": 5, "keep_best": True}, {3: 0.1, 5: 0.2, 8: 0.3, 9: 0.4}, [3, 5, 9]),
    ({"keep_last": 1}, {999_999_999: None, 1_000_000_000: None}, [1_000_000_000]),
]


@pytest.mark.parametrize(("config", "metrics", "expected"), TABLE)
def test_retention_by_config(
    folder: Path, make: Make, config: dict[str, Any], metrics: dict[int, float | None], expected: list[int]
) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, **config))
    small = make(1)
    for step, metric in metrics.items():
        checkpoints.save(step, small, metric=metric)
        assert checkpoints.steps()[-1] == step
    assert checkpoints.steps() == expected


def test_best_is_the_lowest_or_highest_metric(folder: Path, make: Make, same: Same) -> None:
    for mode, best in (("min", 2), ("max", 1)):
        config = CheckpointConfig(background=False, keep_last=1, keep_best=True, mode=mode)
        checkpoints = Checkpoints(folder / mode, config)
        for step, metric in ((1, 0.9), (2, 0.1), (3, 0.5), (4, None)):
            checkpoints.save(step, make(step), metric=metric)
        assert same(checkpoints.best(), make(best))
        assert same(checkpoints.latest(), make(4))
        assert same(checkpoints.at(best), make(best))
        assert checkpoints.at(3) is None


def test_without_a_metric_there_is_no_best(two_checkpoints: Checkpoints) -> None:
    assert two_checkpoints.best() is None


METRICS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-10, 10))
CONFIGS = st.builds(
    CheckpointConfig,
    keep_last=st.integers(1, 5),
    keep_best=st.booleans(),
    mode=st.sampled_from(["min", "max"]),
    keep_every=st.none() | st.integers(1, 6),
)
RUNS = st.dictionaries(st.integers(0, 60), METRICS, min_size=1, max_size=30)


@given(config=CONFIGS, run=RUNS)
def test_pruning_after_every_save_equals_pruning_once(config: CheckpointConfig, run: dict[int, float | None]) -> None:
    """Pruning after every save equals applying the rules once to everything that was ever saved."""
    saved: list[SavedCheckpoint] = []
    for step in sorted(run):
        saved.append(SavedCheckpoint(step, run[step]))
        saved = [item for item in saved if item.step in steps_to_keep(saved, config)]
        assert saved[-1].step == step, "the newest is never removed"
    steps = [item.step for item in saved]
    newest = sorted(run)[-config.keep_last :]
    periodic = [step for step in run if config.keep_every and step % config.keep_every == 0]
    metrics = {step: metric for step, metric in run.items() if metric is not None}
    best = []
    if config.keep_best and metrics:
        limit = (min if config.mode == "min" else max)(metrics.values())
        best = [min(step for step, metric in metrics.items() if metric == limit)]
        assert rank_by_metric(saved, config)[0] == best[0]
    assert set(steps) == {*newest, *periodic, *best}


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
        ({"keep_every": 0}, "`keep_every`"),
        ({"every_seconds": 0}, "`every_seconds`"),
        ({"every_steps": -1}, "`every_steps`"),
        ({"mode": "lowest"}, "`mode`"),
        ({"when_busy": "queue"}, "`when_busy`"),
        ({"keep_lats": 3}, "keep_last"),
    ],
)
def test_an_invalid_config_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CheckpointConfig.read(values, "posttrain.yaml")
