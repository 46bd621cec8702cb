"""From the files and versions named in the config to a clean pool, test set and first set of labelled records."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.alone import apply
from posttrain.data.contamination.suite_check import refuse_equal_inputs, shared_inputs
from posttrain.data.reading.inputs import content_digest
from posttrain.data.reading.problem import unknown_label
from posttrain.data.reading.tables import read
from posttrain.data.records.made import apart_from
from posttrain.data.records.normalise import without_answers
from posttrain.data.records.schema import CHANGED, RECORD, concat
from posttrain.data.sets.config import DataConfig
from posttrain.data.sets.flow import Flow, Work
from posttrain.data.sets.labelled_before import already_labelled
from posttrain.data.split import split
from posttrain.data.steps.answers import Answers
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.step import Outcome, RowStep, Step
from posttrain.data.versions.named_versions import Versions, been_through, records_to_learn_from, records_to_test_on
from posttrain.data.versions.recipe import Recipe, Suite, meant_for
from posttrain.data.versions.suite_records import suite_tables
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Built:
    """RECORD tables; ``rejected`` holds a REJECTED table for each set, ``funnel`` the counts of every step.

    A funnel entry is ``{set, step, reason, count}``. Each set's begin with ``read, in`` and end with
    ``kept, kept``; what stands between adds up to the difference.
    """

    pool: pa.Table
    test: pa.Table
    labelled: pa.Table
    rejected: dict[str, pa.Table]
    funnel: list[dict[str, Any]]


_NO_VERSIONS: Versions = {}


def build_pool_and_test(
    config: DataConfig,
    root: Path,
    labels: Sequence[str] | None = None,
    versions: Versions = _NO_VERSIONS,
    suites: Sequence[Suite] = (),
) -> Built:
    """Read, check and clean what ``config`` names.

    Of a version the pool and the labelled records are the training side, and the test records the test side. Its
    records go through the steps like those of files; that changes nothing about what has been through them.

    Args:
        root: the folder that relative files start from.
        labels: the closed label set; answers outside it are the user's mistake, and equal inputs with
            different answers are rejected. None for open-ended answers.
        versions: the names in ``config`` that are versions, as `versions_named` finds them.
        suites: what models are measured on besides the test records.

    Raises:
        UserError: on the first bad record, with file and line; no files; no answers where they are needed; records to
            learn from stand in a suite and no step takes them out, or all of a suite do.
    """
    steps = [step.located(root) for step in meant_for(config.steps, labels or ())]
    for step in steps:
        step.check()
    named = _Named(config, root, versions)
    labelled = Flow("labelled", named.answered(config.labelled, labels))
    pool = Flow("pool", without_answers(concat([named.to_learn_from(name, answers=False) for name in config.pool])))
    if not config.pool and not config.labelled:
        raise UserError("no file of records is named", where="data.pool", fix="name a file of inputs")
    labelled.through(Answers())
    labelled.through(*[step for step in steps if not step.training_only])
    if isinstance(config.test, float):
        rest, held_out = split(labelled.records, config.test, config.split_seed)
        labelled.move(rest, "split", "held out for the test")
        test = Flow("test", held_out)
    else:
        test = Flow("test", named.answered(config.test or [], labels, test=True))
        test.through(Answers())
        test.through(*[step for step in steps if step.evaluation])
    beside = tables_of_suites(suites, config, root)
    measured = concat([test.records, *beside.values()])
    changed = concat([labelled.changed, test.changed], CHANGED)
    for flow in (labelled, pool):
        flow.through_work(lambda records: apart_from(records, measured, changed))
    pool.through(*[step for step in steps if not step.training_only and not step.needs_answers])
    left = [flow.rejected.select(RECORD.names) for flow in (labelled, pool)]
    drawn = [test.records] if isinstance(config.test, float) else []
    refuse_equal_inputs(concat([labelled.records, pool.records]), beside, steps, beside=concat([*left, *drawn]))
    for step in [step for step in steps if step.training_only]:
        labelled.through_work(_unless(named.been_through(step), partial(apply, step, evaluation=measured)))
    pool.through(*[step for step in steps if isinstance(step, Decontaminate)], evaluation=measured)
    pool.through_work(already_labelled(labelled.records))
    flows = (pool, labelled, test)
    for flow in (labelled, pool):
        _refuse_test_inputs(flow.records, measured)
    return Built(
        pool.records.combine_chunks(),
        test.records.combine_chunks(),
        labelled.records.combine_chunks(),
        {flow.name: flow.rejected for flow in flows},
        [entry for flow in flows for entry in flow.close()],
    )


def tables_of_suites(suites: Sequence[Suite], config: DataConfig, root: Path) -> dict[str, pa.Table]:
    """`suite_tables` of files, rewritten as the records are that go through the config's steps."""
    return suite_tables(suites, Recipe(columns=config.columns, steps=config.steps).located(root), root, _NO_VERSIONS)


def _refuse_test_inputs(records: pa.Table, test: pa.Table) -> None:
    """Refuse what is to be learned from while its input is measured on: steps without `decontaminate` let it be.

    Before any work; a training's own check looks for more than equal inputs.
    """
    shared = test.filter(compute.is_in(test["input_id"], value_set=records["input_id"].combine_chunks()))
    if shared.num_rows:
        raise shared_inputs(records, shared, "data.steps")


def input_digests(config: DataConfig, root: Path, versions: Versions = _NO_VERSIONS) -> dict[str, str]:
    """By the names in ``config``: of a file the SHA-256 of its content, of a version its id.

    Raises:
        UserError: when a file is missing or cannot be read.
    """
    return {
        name: versions[name].id if name in versions else content_digest(_place(root, name), name)
        for name in config.files
    }


def _place(root: Path, name: str) -> Path:
    return root / Path(name).expanduser()


@dataclass(frozen=True)
class _Named:
    """What the config names, as RECORD tables."""

    config: DataConfig
    root: Path
    versions: Versions

    def to_learn_from(self, name: str, *, answers: bool) -> pa.Table:
        if name in self.versions:
            return records_to_learn_from(self.versions[name], name)
        return concat(list(read(_place(self.root, name), self.config.columns, name=name, answers=answers)))

    def to_test_on(self, name: str) -> pa.Table:
        if name not in self.versions:
            return self.to_learn_from(name, answers=True)
        learned_from = {self.versions[one].id for one in self._learned_from if one in self.versions}
        return records_to_test_on(self.versions[name], name, learned_from)

    def answered(self, names: Sequence[str], labels: Sequence[str] | None, *, test: bool = False) -> pa.Table:
        tables = [self.to_test_on(name) if test else self.to_learn_from(name, answers=True) for name in names]
        for name, table in zip(names, tables, strict=True):
            answerless = table["completion"].null_count == table.num_rows
            if answerless and (labels is not None or table["text"].null_count == table.num_rows):
                fix = "say in `data.columns` which column is the completion" if name not in self.versions else None
                raise UserError("no record has an answer", where=name, fix=fix)
            if labels is not None:
                _refuse_unknown_labels(table, labels)
        return concat(tables)

    def been_through(self, step: Step) -> set[str]:
        """Ids of records that need not meet a step that adds records again, as their version was made with it."""
        versions = [self.versions[name] for name in self.config.labelled if name in self.versions]
        return been_through(versions, step) if isinstance(step, RowStep) else set()

    @property
    def _learned_from(self) -> list[str]:
        return [*self.config.pool, *self.config.labelled]


def _unless(done: set[str], work: Work) -> Work:
    """Work for the records whose ids are not among those; the others go first."""

    def apart(records: pa.Table) -> Outcome:
        ready = compute.is_in(records["id"], value_set=pa.array(sorted(done), pa.string()))
        outcome = work(records.filter(compute.invert(ready)))
        return outcome._replace(kept=concat([records.filter(ready), outcome.kept]))

    return apart if done else work


def _refuse_unknown_labels(table: pa.Table, labels: Sequence[str]) -> None:
    known = set(labels)
    columns = (table[name].to_pylist() for name in ("completion", "source", "line"))
    for answer, source, line in zip(*columns, strict=True):
        if answer is not None and answer not in known:
            raise unknown_label(answer, labels, source, line).error()
