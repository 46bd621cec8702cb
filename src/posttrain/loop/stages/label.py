"""Label: requests the labels of the batch from people, a model or an oracle."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.reading.conversion import require_known_labels
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.label.annotator import AnnotationRequest, Annotator, label_summary, labelled_by_model
from posttrain.label.config import build_annotator
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.record import LoopRecord
from posttrain.loop.score_files import BATCH, LABELS, SCORES, UNLABELLED, chosen_records
from posttrain.loop.stage import Stage
from posttrain.loop.stages.answer import Answer, read_answers
from posttrain.loop.stages.suggest import suggestions_of, with_suggestions, with_usable_suggestions
from posttrain.loop.state import RoundState, save_state
from posttrain.report.charts.bars import bars, count_rows
from posttrain.report.section import Section
from posttrain.select.pool_sample import PoolShare, estimate_pool_share
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.store.logs import EVENT
from posttrain.store.message import Message
from posttrain.store.paths import locate_path
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def check_answers(config: Config, root: Path) -> None:
    """Checks that the file of the oracle or of gold items exists, and that its answers are in the label set.

    Raises:
        UserError: if not, with file and line.
    """
    if config.label.annotator == "oracle":
        _check_file(config, _answers(config, root), str(config.label.file), _columns(config))
    elif (gold := config.label.queue.gold_file) is not None:
        where = "label.queue.gold_file"
        path = locate_path(root, gold)
        if not path.is_file():
            raise UserError(f"no such file: {gold}", where=where)
        if not _check_file(config, path, gold, _columns(config)):
            raise UserError(f"no record of {gold} has an answer", where=where, fix="fill them in")


def _check_file(config: Config, path: Path, name: str, columns: dict[str, str] | None) -> int:
    """Checks the answers of a file; returns their number."""
    table = concat(list(read(path, columns, name=name, read_answer=config.task.read_answer)))
    if config.task.label_set:
        require_known_labels(table, config.task.label_set)
    return int(table.num_rows - table["completion"].null_count)


@dataclass(frozen=True)
class Label(Stage):
    """Requests the labels of a batch from the annotator.

    Args:
        selection: Id of the batch.
        pool: Id of the pool that it is from.
    """

    selection: str
    pool: str
    name = "label"
    title = Message("label")
    kind = "labels"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Labels the batch, if there is one.

        Raises:
            Waiting: people have not labelled it yet.
        """
        state = context.state
        if state.selection is None or state.queried_pool is None:
            return state
        # Raises Waiting before the row changes: the round stays on this stage until the labels are in.
        labels = context.run(cls(state.selection, state.queried_pool))
        save_state(context.workspace.metadata, context.number, state, status="open")
        log.info("  labelled %d records, %d classes", labels.meta["labels"], len(labels.meta["classes"]), extra=EVENT)
        if agreement := pool_agreement(context.workspace, state.selection, labels.id):
            log.info(
                "  of %d drawn at random, the champion had %.0f%% right (of the pool: %.0f%% to %.0f%%)",
                *(agreement.drawn, 100 * agreement.value, 100 * agreement.low, 100 * agreement.high),
            )
        return context.update(labelled=labels.id)

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the counts of labels by class, without those that are set aside."""
        counts: Counter[str] = Counter()
        for record in loop.done:
            labels = record.artifact(record.state.labelled)
            counts += Counter(labels.meta["classes"] if labels and not record.state.discards_labels else {})
        yield labels_section(counts)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the batch, its pool, and the content of an oracle's file."""
        inputs = {"selection": self.selection, "pool": self.pool}
        if context.config.label.annotator == "oracle":
            inputs["answers"] = file_digest(_answers(context.config, context.workspace.root))
        if context.config.task.kind == "preference":
            inputs["pairs"] = context.state.outputs[Answer.name]
        if (suggestions := suggestions_of(context.workspace, context.state)) is not None:
            inputs["suggestions"] = suggestions
        return inputs

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the annotator, the labels and the columns of its file."""
        config = context.config.label
        return {
            "annotator": config.annotator,
            "error_rate": config.error_rate.get(context.number, 0.0),
            "labels": context.config.task.label_names,
            "columns": _columns(context.config),
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the answers, a RECORD table, and why other records have none."""
        batch, request = label_request(context, self.selection, self.pool)
        annotator = round_annotator(context.workspace, context.config)
        answers = annotator.annotate(batch, request)
        parquet.write_table(answers, out / LABELS)
        # People may have skipped records, and `--partial` leaves some to later rounds.
        reasons = annotator.unlabelled(batch, request) if answers.num_rows < batch.num_rows else {}
        if reasons:
            (out / UNLABELLED).write_text(json.dumps(reasons, ensure_ascii=False, sort_keys=True), encoding="utf-8")
        kept = compute.index_in(answers["id"].combine_chunks(), value_set=batch["id"].combine_chunks()).to_pylist()
        # A suggestion that stands is not an agreement.
        by_people = [not by_model for by_model in labelled_by_model(answers)]
        shown = request.take(kept).suggestions
        seen = None if shown is None else [text if own else None for text, own in zip(shown, by_people, strict=True)]
        return label_summary(answers, seen, unlabelled=list(reasons.values()), form=request.form)


def labels_section(counts: Mapping[str, int]) -> Section:
    """Draws the labels of each class."""
    # By name where counts are equal: the same workspace gives the same page.
    rows = count_rows(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    chart = bars(rows, Message("labels per class"), columns=(Message("class"), Message("labels")))
    caption = Message(
        "The number of labelled records of each class, the most frequent first. Classes near the bottom have few "
        "examples yet."
    )
    return Section.of(Message("Labels"), caption, chart, empty=Message("Nothing has been labelled yet."))


def label_request(context: RoundContext, selection: str, pool: str) -> tuple[pa.Table, AnnotationRequest]:
    """Returns the records to answer, and the request that goes with them."""
    batch, suggestions = chosen_records(context, context.artifact(selection), context.artifact(pool))
    why = parquet.read_table(context.path(selection) / BATCH)
    request = AnnotationRequest(
        round=context.number,
        seed=context.seed("label"),
        folder=context.workspace.root,
        labels=context.config.task.label_names or None,
        form=context.config.task.form,
        suggestions=suggestions,
        suggested_by=context.state.champion,
        reasons=why["why"].to_pylist(),
        selection=selection,
        partial=context.partial,
    )
    pairs = read_answers(context)
    if pairs is None:
        return batch, with_usable_suggestions(batch, with_suggestions(context, batch, request))
    rows = [row for row, id in enumerate(batch["id"].to_pylist()) if id in pairs]
    batch = batch.take(pa.array(rows, pa.int64()))
    # Two answers are compared without a suggestion of which is better.
    request = replace(request.take(rows), suggestions=None, candidates=[pairs[id] for id in batch["id"].to_pylist()])
    return batch, request


def round_annotator(workspace: Workspace, config: Config) -> Annotator:
    """Builds the annotator that the config names."""

    def read_records(path: Path, columns: Mapping[str, str] | None) -> Iterator[pa.Table]:
        return read(path, columns, read_answer=config.task.read_answer)

    return build_annotator(config.label, workspace.root, read_records, _columns(config), workspace.metadata)


def _columns(config: Config) -> dict[str, str] | None:
    """Returns the data's columns without the group, which a file of answers need not have."""
    return {name: column for name, column in (config.data.columns or {}).items() if name != "group"} or None


def _answers(config: Config, root: Path) -> Path:
    """Returns the oracle's file."""
    name = config.label.file
    if not name:
        raise UserError("the oracle needs a file of answers", where="label.file", fix="name it")
    path = locate_path(root, name)
    if not path.is_file():
        raise UserError(f"no such file: {name}", where="label.file")
    return path


def pool_agreement(workspace: Workspace, selection: str, labels: str) -> PoolShare | None:
    """Estimates the share of the pool that the champion labels as people do, from records drawn at random.

    Args:
        workspace: The workspace.
        selection: Id of the batch.
        labels: Id of its labels.

    Returns:
        None if no record was drawn, the champion had not been trained yet, or there is no closed label set.
    """
    batch = parquet.read_table(workspace.artifacts.path(selection) / BATCH)
    scores = workspace.metadata.producers(selection)[-1].inputs["scores"]
    # Free text has none: a written answer may be right in other words, and only people could say so.
    if "probabilities" not in parquet.read_schema(workspace.artifacts.path(scores) / SCORES).names:
        return None
    # All other records were chosen because they are hard, and say little of the rest of the pool.
    sample = batch.filter(compute.and_(compute.is_valid(batch["inclusion"]), compute.is_valid(batch["predicted"])))
    answers = parquet.read_table(workspace.artifacts.path(labels) / LABELS, columns=["id", "completion", "meta"])
    by_model = answers.filter(pa.array(labelled_by_model(answers), pa.bool_()))
    # Whether a model agrees with a model says nothing about what people would say.
    if set(by_model["id"].to_pylist()) & set(sample["id"].to_pylist()):
        return None
    answer_of = dict(zip(answers["id"].to_pylist(), answers["completion"].to_pylist(), strict=True))
    rows = [row for row in sample.to_pylist() if answer_of.get(row["id"]) is not None]
    agrees = np.array([answer_of[row["id"]] == row["predicted"] for row in rows], bool)
    return estimate_pool_share(agrees, np.array([row["inclusion"] for row in rows], np.float64))
