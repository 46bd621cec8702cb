"""Neither several processes nor kills change the values."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import in_process
from posttrain.attribution.data_oob import data_oob
from posttrain.attribution.ridge import RidgeUtility
from posttrain.attribution.tmc_shapley import tmc_shapley


class LoggingUtility:
    """A utility that writes a byte for each score and dies at one of them."""

    players = 9

    def __init__(self, log: Path, die_at: int | None = None) -> None:
        self.log, self.die_at = log, die_at

    def start(self) -> "LoggingModel":
        return LoggingModel(self)


class LoggingModel:
    def __init__(self, utility: LoggingUtility) -> None:
        self.utility, self.rows = utility, 0.0

    def add(self, row: int) -> None:
        self.rows += row + 1

    def score(self) -> float:
        with self.utility.log.open("ab") as file:
            file.write(b".")
        if self.utility.die_at is not None and self.utility.log.stat().st_size >= self.utility.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(np.sqrt(self.rows))


def values(log: Path, die_at: int | None = None, **options: Any) -> np.ndarray:
    return tmc_shapley(LoggingUtility(log, die_at), permutations=33, tolerance=0.5, **options)


def test_a_killed_run_resumes_without_computing_a_finished_block_again(tmp_path: Path) -> None:
    whole = values(tmp_path / "whole")
    scores = (tmp_path / "whole").stat().st_size
    die_at = scores * 2 // 3
    killed = in_process(lambda: values(tmp_path / "killed", die_at, folder=tmp_path / "folder").tolist())
    assert killed.killed
    assert (tmp_path / "killed").stat().st_size == die_at
    resumed = values(tmp_path / "resumed", folder=tmp_path / "folder")
    assert whole.tobytes() == resumed.tobytes()
    again = (tmp_path / "resumed").stat().st_size
    assert scores - die_at < again <= scores - die_at + 2 + 10 * 9
    assert whole.tobytes() == values(tmp_path / "third", folder=tmp_path / "folder").tobytes()
    assert (tmp_path / "third").stat().st_size == 2, "the scores of no record and of all records"


def test_more_permutations_resume_from_fewer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tolerance": 0, "folder": tmp_path / "folder"}
    tmc_shapley(LoggingUtility(tmp_path / "fewer"), permutations=20, **settings)
    more = tmc_shapley(LoggingUtility(tmp_path / "more"), permutations=23, **settings)
    assert (tmp_path / "more").stat().st_size == 2 + 3 * 9
    whole = tmc_shapley(LoggingUtility(tmp_path / "whole"), permutations=23, tolerance=0)
    assert more.tobytes() == whole.tobytes()


def test_a_damaged_block_is_named_and_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = values(tmp_path / "whole", folder=tmp_path / "folder")
    blocks = sorted((tmp_path / "folder").glob("*.block"))
    assert len(blocks) == 4
    content = bytearray(blocks[0].read_bytes())
    content[len(content) // 2] ^= 0xFF
    blocks[0].write_bytes(content)
    blocks[2].write_bytes(blocks[2].read_bytes()[:-30])
    blocks[3].write_bytes(b"")
    before = blocks[1].stat().st_mtime_ns
    assert whole.tobytes() == values(tmp_path / "again", folder=tmp_path / "folder").tobytes()
    for block in (blocks[0], blocks[2], blocks[3]):
        assert f"{block} is damaged" in caplog.text
    assert blocks[1].stat().st_mtime_ns == before


@pytest.mark.slow
def test_two_processes_give_the_same_values_to_the_last_bit(tmp_path: Path) -> None:
    from sklearn.tree import DecisionTreeClassifier

    generator = np.random.default_rng(0)
    labels, true = np.arange(90) % 3, np.arange(60) % 3
    features, records = generator.normal(size=(90, 6)), generator.normal(size=(60, 6))
    ridge = RidgeUtility(features + labels[:, None], labels, records + true[:, None], true)
    methods: dict[str, Callable[..., Any]] = {
        "tmc": lambda **options: tmc_shapley(ridge, permutations=40, **options),
        "oob": lambda **options: np.stack(data_oob(features, labels, DecisionTreeClassifier(), bags=40, **options)),
    }
    for name, method in methods.items():
        alone, folder = method(), tmp_path / name
        assert alone.tobytes() == method(workers=2, folder=folder).tobytes()
        assert len(list(folder.glob("*.block"))) == 4
        shutil.rmtree(folder)
