"""Builds the pool, the test set and the first labelled records from the files and versions that the config names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.config import DataConfig
from posttrain.data.reading.conversion import AnswerReader, hide_answer, read_answers, require_known_labels
from posttrain.data.reading.data_files import content_digest, locate_file
from posttrain.data.reading.reader import read
from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.records.provenance import without_held_out_variants
from posttrain.data.records.record import CHANGED, RECORD, concat, locations, without_answers
from posttrain.data.sets.record_set import RecordSet, Transform
from posttrain.data.split import hash_split
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep, RowStep
from posttrain.data.steps.validity import Answers
from posttrain.data.versions.named_versions import Versions, evaluation_split, ids_processed_by, training_split
from posttrain.data.versions.recipe import Recipe, Suite, applicable_steps
from posttrain.data.versions.suites import require_unseen_suites, shared_inputs_error, suite_tables
from posttrain.store.errors import UserError

_NO_VERSIONS: Versions = {}


@dataclass(frozen=True)
class LoopData:
    """Holds RECORD tables; ``rejected`` a REJECTED table for each set, ``funnel`` the counts of every step.

    A funnel entry is ``{set, step, reason, count}``. Each set's begin with ``read, in`` and end with
    ``kept, kept``; the entries between add up to the difference.
    """

    pool: pa.Table
    test: pa.Table
    labelled: pa.Table
    rejected: dict[str, pa.Table]
    funnel: list[dict[str, Any]]


def build_pool_and_test(
    config: DataConfig,
    root: Path,
    labels: Sequence[str] | None = None,
    versions: Versions = _NO_VERSIONS,
    suites: Sequence[Suite] = (),
    read_answer: AnswerReader | None = None,
) -> LoopData:
    """Reads, checks and cleans the files and versions that ``config`` names.

    A version's training split gives pool and labelled records, and its test split test records. Its records run through
    the steps like those of files; records that have been through them do not change.

    Args:
        root: The folder that relative files start from.
        labels: The closed label set; answers outside it are the user's mistake, and equal inputs with
            different answers are rejected. None for open-ended answers.
        versions: The names in ``config`` that are versions, as `resolve_versions` finds them.
        suites: Evaluation records besides the test records.
        read_answer: Reads answers that are not one text; None: they are texts as they are.

    Raises:
        UserError: on the first bad record, with file and line; no files; no answers where they are needed; records to
            learn from stand in a suite and no step takes them out, or all of a suite do.
    """
    steps = [step.located(root) for step in applicable_steps(config.steps, labels or ())]
    for step in steps:
        step.check()
    sources = _NamedSources(config, root, versions, read_answer)
    labelled = RecordSet("labelled", sources.answered_records(config.labelled, labels))
    pool = RecordSet(
        "pool", without_answers(concat([sources.training_records(name, answers=False) for name in config.pool]))
    )
    if not config.pool and not config.labelled:
        raise UserError("no file of records is named", where="data.pool", fix="name a file of inputs")
    # Records without an answer go first, so that no later step counts them as duplicates of answered ones.
    labelled.apply_steps(Answers())
    labelled.apply_steps(*[step for step in steps if not step.training_only])
    if isinstance(config.test, float):
        # Drawn after cleaning, so that duplicates cannot fall into both sets.
        rest, held_out = hash_split(labelled.records, config.test, config.split_seed)
        labelled.replace(rest, "split", "held out for the test")
        test = RecordSet("test", held_out)
    else:
        test = RecordSet("test", sources.answered_records(config.test or [], labels, test=True))
        test.apply_steps(Answers())
        test.apply_steps(*[step for step in steps if step.evaluation])
    suites_by_file = load_suites(suites, config, root)
    evaluation = concat([test.records, *suites_by_file.values()])
    changed = concat([labelled.changed, test.changed], CHANGED)
    for record_set in (labelled, pool):
        record_set.transform("split", partial(without_held_out_variants, held_out=evaluation, changed=changed))
    pool.apply_steps(*[step for step in steps if not step.training_only and not step.needs_answers])
    pool.transform("exact", _drop_repeated_ids)
    rejected = [record_set.rejected.select(RECORD.names) for record_set in (labelled, pool)]
    # Test records drawn from the labelled files are in these files, too.
    test_records = [test.records] if isinstance(config.test, float) else []
    require_unseen_suites(
        concat([labelled.records, pool.records]), suites_by_file, steps, others=concat([*rejected, *test_records])
    )
    for step in [step for step in steps if step.training_only]:
        work = _skip_processed(sources.processed_ids(step), partial(apply_step, step, evaluation=evaluation))
        labelled.transform(step.name, work)
    pool.apply_steps(*[step for step in steps if step.removes_leaks], evaluation=evaluation)
    # The pool must not hold what is labelled already, or it would be chosen again.
    pool.transform("labelled", drop_labelled(labelled.records))
    record_sets = (pool, labelled, test)
    for record_set in (labelled, pool):
        _require_no_test_inputs(record_set.records, evaluation)
    return LoopData(
        pool.records.combine_chunks(),
        test.records.combine_chunks(),
        labelled.records.combine_chunks(),
        {record_set.name: record_set.rejected for record_set in record_sets},
        [entry for record_set in record_sets for entry in record_set.full_funnel()],
    )


def _drop_repeated_ids(pool: pa.Table) -> Outcome:
    """Rejects records with the id of an earlier one: scores and labels of the pool are kept by id."""
    # Steps may keep programs that differ in indentation, which ids ignore.
    first: dict[str, int] = {}
    repeats = {row: first.setdefault(id, row) for row, id in enumerate(pool["id"].to_pylist())}
    where = locations(pool)
    return reject_rows(
        pool,
        "exact",
        {
            row: Rejection("same id", f"the same as {where[other]} but for whitespace")
            for row, other in repeats.items()
            if row != other
        },
    )


def load_suites(suites: Sequence[Suite], config: DataConfig, root: Path) -> dict[str, pa.Table]:
    """Reads the suites' files, and rewrites their records with the config's steps."""
    return suite_tables(suites, Recipe(columns=config.columns, steps=config.steps).located(root), root, _NO_VERSIONS)


def _require_no_test_inputs(records: pa.Table, test: pa.Table) -> None:
    """Raises a UserError if training records share an input with test records: without `decontaminate` nothing else
    does.

    This is checked before any work; the check before training compares more than equal inputs.
    """
    shared = test.filter(compute.is_in(test["input_id"], value_set=records["input_id"].combine_chunks()))
    if shared.num_rows:
        raise shared_inputs_error(records, shared, "data.steps")


def input_digests(config: DataConfig, root: Path, versions: Versions = _NO_VERSIONS) -> dict[str, str]:
    """Digests of the names in ``config``: of a file the SHA-256 of its content, of a version its id.

    Raises:
        UserError: when a file is missing or cannot be read.
    """
    return {
        name: versions[name].id if name in versions else content_digest(locate_file(root, name), name)
        for name in config.files
    }


@dataclass(frozen=True)
class _NamedSources:
    """Reads what the config names as RECORD tables."""

    config: DataConfig
    root: Path
    versions: Versions
    read_answer: AnswerReader | None = None

    def training_records(self, name: str, *, answers: bool) -> pa.Table:
        if name in self.versions:
            return self._read_answers(training_split(self.versions[name], name))
        # The pool's answers are hidden, whatever they are.
        read_answer = self.read_answer if answers or self.read_answer is None else hide_answer
        path = locate_file(self.root, name)
        return concat(list(read(path, self.config.columns, name=name, answers=answers, read_answer=read_answer)))

    def test_records(self, name: str) -> pa.Table:
        if name not in self.versions:
            return self.training_records(name, answers=True)
        training_ids = {self.versions[source].id for source in self._training_sources if source in self.versions}
        return self._read_answers(evaluation_split(self.versions[name], name, training_ids))

    def _read_answers(self, table: pa.Table) -> pa.Table:
        """Reads the answers of a version, which was built without knowing the task."""
        return table if self.read_answer is None else read_answers(table, self.read_answer)

    def answered_records(self, names: Sequence[str], labels: Sequence[str] | None, *, test: bool = False) -> pa.Table:
        tables = [self.test_records(name) if test else self.training_records(name, answers=True) for name in names]
        for name, table in zip(names, tables, strict=True):
            answerless = table["completion"].null_count == table.num_rows
            if answerless and (labels is not None or table["text"].null_count == table.num_rows):
                fix = "name the column of the completion in `data.columns`" if name not in self.versions else None
                raise UserError("no record has an answer", where=name, fix=fix)
            # What reads answers has checked them.
            if labels is not None and self.read_answer is None:
                require_known_labels(table, labels)
        return concat(tables)

    def processed_ids(self, step: DataStep) -> set[str]:
        """Returns the ids of records that a step must not add to again, as their version was built with it."""
        versions = [self.versions[name] for name in self.config.labelled if name in self.versions]
        return ids_processed_by(versions, step) if isinstance(step, RowStep) else set()

    @property
    def _training_sources(self) -> list[str]:
        return [*self.config.pool, *self.config.labelled]


def _skip_processed(processed_ids: set[str], work: Transform) -> Transform:
    """Runs ``work`` only on records whose ids are not in ``processed_ids``; the others come first."""

    def apart(records: pa.Table) -> Outcome:
        is_processed = compute.is_in(records["id"], value_set=pa.array(sorted(processed_ids), pa.string()))
        outcome = work(records.filter(compute.invert(is_processed)))
        # The untouched records come first, as they did when their version was built.
        return outcome._replace(kept=concat([records.filter(is_processed), outcome.kept]))

    return apart if processed_ids else work


def drop_labelled(labelled: pa.Table) -> Transform:
    """Returns a function that rejects inputs that ``labelled`` holds."""
    location_of_input = dict(zip(labelled["input_id"].to_pylist(), locations(labelled), strict=True))

    def step(table: pa.Table) -> Outcome:
        rejections = {
            row: Rejection("already labelled", f"the same input as {location_of_input[identity]}")
            for row, identity in enumerate(table["input_id"].to_pylist())
            if identity in location_of_input
        }
        return reject_rows(table, "labelled", rejections)

    return step
