"""Neither several processes nor kills change the values."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.attribution import (
    RidgeUtility,
    Values,
    banzhaf,
    beta_shapley,
    leave_one_out,
    shapley,
    tmc_shapley,
)


class LoggingUtility:
    """A utility that writes a byte for each evaluation and dies at one of them."""

    players = 9
    key = "logged"

    def __init__(self, log: Path, die_at: int | None = None) -> None:
        self.log, self.die_at = log, die_at

    def __call__(self, rows: np.ndarray) -> float:
        with self.log.open("ab") as file:
            file.write(b".")
        if self.die_at is not None and self.log.stat().st_size >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(np.sqrt(rows.sum() + len(rows)))


METHODS: dict[str, Callable[..., Values]] = {
    "tmc": lambda utility, **options: tmc_shapley(utility, permutations=20, block_size=3, tolerance=0.5, **options),
    "beta": lambda utility, **options: beta_shapley(utility, permutations=20, block_size=3, **options),
    "banzhaf": lambda utility, **options: banzhaf(utility, samples=130, block_size=20, **options),
    "one out": lambda utility, **options: leave_one_out(utility, block_size=2, **options),
    "exact": lambda utility, **options: shapley(utility, block_size=100, **options),
}


def same(first: Values, second: Values) -> bool:
    """Compare two results to the last bit."""
    return (
        first.values.tobytes() == second.values.tobytes()
        and first.standard_errors.tobytes() == second.standard_errors.tobytes()
        and first.evaluations == second.evaluations
    )


PROGRAM = """
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("resumed", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["resumed"] = module
spec.loader.exec_module(module)
for name, die_at in zip(sys.argv[3::2], sys.argv[4::2]):
    folder = pathlib.Path(sys.argv[2], name)
    child = os.fork()
    if child == 0:
        module.METHODS[name](module.LoggingUtility(folder / "killed", int(die_at)), folder=folder / "folder")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each method, whose process was killed after two thirds of its evaluations; read-only."""
    root = tmp_path_factory.mktemp("killed")
    arguments = []
    for name, method in METHODS.items():
        (root / name).mkdir()
        method(LoggingUtility(root / name / "whole"))
        arguments += [name, str((root / name / "whole").stat().st_size * 2 // 3)]
    command = [sys.executable, "-c", PROGRAM, __file__, str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(METHODS)
    return root


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_a_killed_run_resumes_without_evaluating_a_finished_block_again(
    name: str, killed_runs: Path, tmp_path: Path
) -> None:
    method, killed = METHODS[name], killed_runs / name
    whole = method(LoggingUtility(tmp_path / "whole"))
    evaluations = (tmp_path / "whole").stat().st_size
    assert whole.evaluations == evaluations
    die_at = evaluations * 2 // 3
    assert (killed / "killed").stat().st_size == die_at
    shutil.copytree(killed / "folder", tmp_path / "folder")
    resumed = method(LoggingUtility(tmp_path / "resumed"), folder=tmp_path / "folder")
    assert same(whole, resumed)
    again = (tmp_path / "resumed").stat().st_size
    largest = {"tmc": 27, "beta": 27, "banzhaf": 20, "one out": 2, "exact": 100}[name]
    assert evaluations - die_at < again <= evaluations - die_at + largest
    assert same(whole, method(LoggingUtility(tmp_path / "third"), folder=tmp_path / "folder"))
    assert not (tmp_path / "third").exists()


def test_more_permutations_resume_from_fewer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"block_size": 4, "tolerance": 0, "folder": tmp_path / "folder"}
    tmc_shapley(LoggingUtility(tmp_path / "fewer"), permutations=8, **settings)
    more = tmc_shapley(LoggingUtility(tmp_path / "more"), permutations=10, **settings)
    assert (tmp_path / "more").stat().st_size == 2 * 9
    assert same(more, tmc_shapley(LoggingUtility(tmp_path / "whole"), permutations=10, block_size=4, tolerance=0))


def test_other_settings_use_no_cached_block(tmp_path: Path) -> None:
    def evaluations(**settings: Any) -> int:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        tmc_shapley(LoggingUtility(log), permutations=2, folder=tmp_path / "folder", **settings)
        return log.stat().st_size if log.exists() else 0

    assert evaluations(tolerance=0) == 2 + 18
    assert evaluations(tolerance=0) == 0
    assert evaluations(tolerance=0, seed=1) == 18  # the scores of no record and of all records are cached
    assert evaluations(tolerance=1e-9) == 18
    assert evaluations(tolerance=1e-9, patience=2) == 18


def test_a_damaged_block_is_named_and_evaluated_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method = METHODS["banzhaf"]
    whole = method(LoggingUtility(tmp_path / "whole"), folder=tmp_path / "folder")
    blocks = sorted((tmp_path / "folder").glob("*/*.block"))
    assert len(blocks) == 7
    content = bytearray(blocks[3].read_bytes())
    content[len(content) // 2] ^= 0xFF
    blocks[3].write_bytes(content)
    blocks[5].write_bytes(blocks[5].read_bytes()[:-30])
    blocks[6].write_bytes(b"")
    assert same(whole, method(LoggingUtility(tmp_path / "again"), folder=tmp_path / "folder"))
    assert (tmp_path / "again").stat().st_size == 20 + 20 + 10
    for block in (blocks[3], blocks[5], blocks[6]):
        assert f"{block} is damaged" in caplog.text


def ridge() -> RidgeUtility:
    generator = np.random.default_rng(0)
    labels, true = np.arange(90) % 3, np.arange(60) % 3
    features, records = generator.normal(size=(90, 6)), generator.normal(size=(60, 6))
    return RidgeUtility(features + labels[:, None], labels, records + true[:, None], true)


@pytest.mark.slow
def test_two_processes_give_the_same_values_to_the_last_bit(tmp_path: Path) -> None:
    def shapley_to_a_bound(**options: Any) -> Values:
        return tmc_shapley(ridge(), permutations=400, block_size=4, standard_error=0.02, **options)

    values = shapley_to_a_bound()
    assert same(values, shapley_to_a_bound(workers=2, folder=tmp_path))
    assert len(list(tmp_path.glob("*/*.block"))) > 4
    assert same(values, shapley_to_a_bound(folder=tmp_path))
    assert values.evaluations < 200 * 90
