"""Reads, checks and hashes the evaluation suites."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.reading.conversion import AnswerReader
from posttrain.data.reading.data_files import content_digest
from posttrain.data.reading.reader import read
from posttrain.data.sets.pool_and_test import load_suites
from posttrain.data.versions.recipe import Suite
from posttrain.evaluate.config import SuiteConfig
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.store.errors import UserError
from posttrain.store.extensions import load_function
from posttrain.store.hashing import file_digest
from posttrain.store.paths import locate_path


def other_suites(config: Config) -> list[Suite]:
    """Returns the config's suites that are files of their own, not the test set."""
    suites = [suite for suite in config.evaluate.suites.values() if suite.data != "test"]
    return [Suite(file=suite.data, columns=suite.columns) for suite in suites]


def suite_digests(config: Config, root: Path) -> dict[str, str]:
    """Hashes the content of `other_suites`; returns the digests by file.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    files = [suite.file for suite in other_suites(config)]
    return {file: content_digest(locate_path(root, file), file) for file in files}


def suite_inputs(config: Config, root: Path) -> dict[str, str]:
    """Returns `suite_digests` as inputs of a stage that keeps the suites' records out of its result."""
    return {f"suite {file}": digest for file, digest in suite_digests(config, root).items()}


def function_digests(config: Config) -> dict[str, str]:
    """Hashes the modules of the functions that score; returns the digests by suite."""
    digests = {}
    for name, suite in config.evaluate.suites.items():
        if suite.function:
            # The file behind the function, since a scorer that was edited must score again.
            load_function(suite.function, f"evaluate.suites.{name}.function")
            source = getattr(sys.modules[suite.function.partition(":")[0]], "__file__", None)
            digests[f"{name}.function"] = file_digest(Path(source)) if source else ""
    return digests


def suite_settings(config: Config, root: Path) -> dict[str, Any]:
    """Returns the settings by which `other_suites` are read and rewritten, for a stage's key; empty without suites."""
    suites = [suite.model_dump(mode="json") for suite in other_suites(config)]
    steps = [step.located(root).key() for step in config.data.steps if step.evaluation]
    return {"suites": suites, "columns": config.data.columns, "rewritten by": steps} if suites else {}


def measured_on(config: Config, test: pa.Table, root: Path) -> dict[str, pa.Table]:
    """Reads everything that models are measured on: RECORD tables, the test records as ``test``, others by their file.

    Args:
        config: The workspace's config.
        test: RECORD table of the test set.
        root: The folder that relative files start from.

    Raises:
        UserError: a suite's file is missing or a record is bad.
    """
    return {"test": test, **load_suites(other_suites(config), config.data, root)}


def suite_records(context: RoundContext, suite: SuiteConfig, test: str) -> pa.Table:
    """Reads the records that a suite measures on: RECORD table.

    Args:
        context: The round.
        suite: The suite.
        test: Id of the test set.
    """
    if suite.data == "test":
        return context.dataset(test).records
    path = locate_path(context.workspace.root, suite.data)
    columns = suite.columns or context.config.data.columns
    return pa.concat_tables(read(path, columns, name=suite.data, read_answer=_answer_reader(context.config, suite)))


def check_suite_files(config: Config, root: Path) -> None:
    """Checks that every suite's records can be read and its function be imported.

    Args:
        config: The workspace's config.
        root: The workspace's folder.

    Raises:
        UserError: if not, with the suite's key, or the file and line.
    """
    for name, suite in config.evaluate.suites.items():
        where = f"evaluate.suites.{name}"
        if suite.function:
            load_function(suite.function, f"{where}.function")
        if suite.data == "test":
            continue
        path = locate_path(root, suite.data)
        if not path.exists():
            raise UserError(f"no such file: {suite.data}", where=f"{where}.data", fix="check the path")
        columns = suite.columns or config.data.columns
        for _ in read(path, columns, name=suite.data, read_answer=_answer_reader(config, suite)):
            pass  # Reading raises for a bad record: now, and not after hours of training.


def _answer_reader(config: Config, suite: SuiteConfig) -> AnswerReader | None:
    """Returns what reads the answers of a suite's file: those of a suite with another scorer are texts as they are."""
    return config.task.read_answer if suite.scorer == config.task.kind else None
