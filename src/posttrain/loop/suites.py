"""Checks the evaluation suites that are files of their own, and reads them to keep their records out of training."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.reading.data_files import content_digest
from posttrain.data.reading.reader import read
from posttrain.data.sets.pool_and_test import load_suites
from posttrain.data.versions.recipe import Suite
from posttrain.loop.config import Config
from posttrain.store.errors import UserError
from posttrain.store.extensions import load_function


def suites_beside_test(config: Config) -> list[Suite]:
    """The config's suites without those that are the test set."""
    suites = [suite for suite in config.evaluate.suites.values() if suite.data != "test"]
    return [Suite(file=suite.data, columns=suite.columns) for suite in suites]


def suite_digests(config: Config, root: Path) -> dict[str, str]:
    """Digests of those suites' content, as inputs of a stage.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    files = [suite.file for suite in suites_beside_test(config)]
    return {f"suite {file}": content_digest(root / Path(file).expanduser(), file) for file in files}


def suite_settings(config: Config, root: Path) -> dict[str, Any]:
    """The settings by which those suites are read and rewritten, for a stage's key; empty without suites."""
    suites = [suite.model_dump(mode="json") for suite in suites_beside_test(config)]
    steps = [step.located(root).key() for step in config.data.steps if step.evaluation]
    return {"suites": suites, "columns": config.data.columns, "rewritten by": steps} if suites else {}


def measured_on(config: Config, test: pa.Table, root: Path) -> dict[str, pa.Table]:
    """Read everything that models are measured on: RECORD tables, the test records as ``test``, others by their file.

    Args:
        test: RECORD table.
        root: the folder that relative files start from.

    Raises:
        UserError: a suite's file is missing or a record is bad.
    """
    return {"test": test, **load_suites(suites_beside_test(config), config.data, root)}


def check_suites(config: Config, root: Path) -> None:
    """Check that every suite's records can be read and its function be imported.

    Args:
        config: the workspace's config.
        root: the workspace's folder.

    Raises:
        UserError: if not, with the suite's key, or the file and line.
    """
    for name, suite in config.evaluate.suites.items():
        where = f"evaluate.suites.{name}"
        if suite.function:
            load_function(suite.function, f"{where}.function")
        if suite.data == "test":
            continue
        path = root / Path(suite.data).expanduser()
        if not path.exists():
            raise UserError(f"no such file: {suite.data}", where=f"{where}.data", fix="check the path")
        for _ in read(path, suite.columns or config.data.columns, name=suite.data):
            pass  # Reading raises for a bad record: now, and not after hours of training.
