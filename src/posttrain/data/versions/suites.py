"""Reads evaluation suites, and checks that training records do not repeat their inputs."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.reading.data_files import locate_file
from posttrain.data.reading.reader import read
from posttrain.data.records.record import RECORD, concat, locations
from posttrain.data.steps.step import DataStep, RowStep
from posttrain.data.versions.named_versions import Versions, evaluation_split
from posttrain.data.versions.recipe import Recipe, Suite
from posttrain.store.errors import UserError


def suite_tables(suites: Iterable[Suite], recipe: Recipe, root: Path, versions: Versions) -> dict[str, pa.Table]:
    """Reads the suites of each file as a RECORD table; several suites may read one file, each by its own columns."""
    tables: dict[str, list[pa.Table]] = {}
    # Two suites of one file with the same columns would count its records twice.
    for suite in {suite.model_dump_json(): suite for suite in suites}.values():
        tables.setdefault(suite.file, []).append(suite_records(suite, recipe, root, versions))
    return {file: concat(parts) for file, parts in tables.items()}


def suite_records(suite: Suite, recipe: Recipe, root: Path, versions: Versions) -> pa.Table:
    """Reads a suite's records, and rewrites them with the recipe's steps, as training records are."""
    if suite.file in versions:
        table = evaluation_split(versions[suite.file], suite.file, ())
    else:
        path = locate_file(root, suite.file)
        # Answers may be lists: only the inputs count here.
        columns = suite.columns or recipe.columns
        table = concat(list(read(path, columns, name=suite.file, read_answer=lambda answer, text: answer)))
    for step in recipe.steps:
        if step.evaluation and isinstance(step, RowStep):
            outcome = step.apply(table)
            # Models are measured on those too that the step would not let into training.
            table = concat([outcome.kept, outcome.rejected.select(RECORD.names)])
    return table


def require_unseen_suites(
    training: pa.Table,
    suites: Mapping[str, pa.Table],
    steps: Iterable[DataStep],
    held_out: Collection[str] = (),
    *,
    others: pa.Table,
) -> None:
    """Raises a UserError unless every suite holds records that no model trains on.

    Args:
        training: ``input_id``, ``source`` and ``line`` of the training records, before `decontaminate`.
        suites: RECORD table of each suite by its name.
        steps: `decontaminate`, if it is among them, removes what only a part of a suite shares.
        held_out: Names of suites that are a version's held-out split: the files it was built from may well be read
            again, and the step removes all that the suite shares.
        others: ``input_id`` of records of the same files that are held out or rejected.

    Raises:
        UserError: all inputs of a suite are in the files, or some are among the training records and no step takes
            them out.
    """
    removes_leaks = any(step.removes_leaks for step in steps)
    for name, suite in suites.items():
        inside = compute.is_in(suite["input_id"], value_set=training["input_id"].combine_chunks())
        shared = suite.filter(inside)
        # The step removes them, which is expected where a version's own files are read again.
        if removes_leaks and name in held_out:
            continue
        # Held-out and rejected records count too: a suite that consists of the files' own records measures nothing new.
        elsewhere = compute.is_in(suite["input_id"], value_set=others["input_id"].combine_chunks())
        if shared.num_rows and compute.sum(compute.or_(inside, elsewhere)).as_py() == suite.num_rows:
            raise wholly_shared_error(name, suite.num_rows)
        if shared.num_rows and not removes_leaks:
            raise shared_inputs_error(training, shared, name)


def shared_inputs_error(training: pa.Table, evaluation: pa.Table, name: str) -> UserError:
    """Builds the error for training records that share at least one input with ``evaluation``.

    Args:
        training: ``input_id``, ``source`` and ``line``.
        evaluation: Such a table of the records that models are measured on.
        name: Their name in the error.
    """
    leaking = training.filter(compute.is_in(training["input_id"], value_set=evaluation["input_id"].combine_chunks()))
    first = leaking.slice(0, 1)
    other = evaluation.filter(compute.equal(evaluation["input_id"], first["input_id"][0])).slice(0, 1)
    count = leaking.num_rows
    records = "1 training record has an input" if count == 1 else f"{count:,} training records have inputs"
    message = f"{records} that models are measured on, the first: {locations(first)[0]} and {locations(other)[0]}"
    return UserError(message, where=name, fix="list the step `decontaminate`, which removes them from training")


def wholly_shared_error(name: str, count: int) -> UserError:
    """Builds the error for a suite that stands completely in the training files."""
    fix = "measure on records that no model has learned from, or leave those files out"
    return UserError(f"all {count:,} records of the suite stand in the training files", where=name, fix=fix)
