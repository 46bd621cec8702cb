"""Label: requests the labels of the batch from people or an oracle; exports a waiting batch and imports its labels."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.reading.conversion import require_known_labels
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.label.annotator import AnnotationRequest, label_summary, labelled_by_model
from posttrain.label.config import build_annotator
from posttrain.label.file_annotator import Skip, export_labels, fill_labels, import_labels, input_text
from posttrain.label.model_annotators import ModelAnnotator
from posttrain.label.people import PeopleAnnotator, labels_in_file
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.score_files import BATCH, LABELS, SCORES, UNLABELLED, chosen_records
from posttrain.loop.stage import Stage
from posttrain.loop.stages.answer import Answer, read_answers
from posttrain.loop.stages.suggest import check_report, rest_for_people, suggestions_of, with_suggestions
from posttrain.loop.state import RoundState, save_state
from posttrain.select.pool_sample import PoolShare, estimate_pool_share
from posttrain.store.errors import DamagedArtifactError, UserError, shorten, suggest
from posttrain.store.files import check_new_file, disk_errors, write_atomically
from posttrain.store.hashing import file_digest
from posttrain.store.paths import locate_path
from posttrain.store.rows import Run
from posttrain.store.text_files import read_text
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def check_answers(config: Config, root: Path) -> None:
    """Checks that the file of the oracle or of gold items exists, and that its answers are in the label set.

    Raises:
        UserError: if not, with file and line.
    """
    if config.label.annotator == "oracle":
        columns = config.label.columns if config.label.columns is not None else _columns(config)
        _check_file(config, _answers(config, root), str(config.label.file), columns)
    elif (gold := config.label.queue.gold_file) is not None:
        where = "label.queue.gold_file"
        path = locate_path(root, gold)
        if not path.is_file():
            raise UserError(f"no such file: {gold}", where=where)
        if not _check_file(config, path, gold, _columns(config)):
            raise UserError(f"no record of {gold} has an answer", where=where, fix="fill them in")


def _check_file(config: Config, path: Path, name: str, columns: dict[str, str] | None) -> int:
    """Checks the answers of a file; returns their number."""
    table = concat(list(read(path, columns, name=name)))
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
        log.info("  labelled %d records, %d classes", labels.meta["labels"], len(labels.meta["classes"]))
        if agreement := pool_agreement(context.workspace, state.selection, labels.id):
            log.info(
                "  of %d drawn at random, the champion had %.0f%% right (of the pool: %.0f%% to %.0f%%)",
                *(agreement.drawn, 100 * agreement.value, 100 * agreement.low, 100 * agreement.high),
            )
        return context.update(labelled=labels.id)

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
            # The name in keys that are older than the queue; its settings change no label that is there.
            "annotator": "file" if config.annotator == "people" else config.annotator,
            "error_rate": config.error_rate.get(context.number, 0.0),
            "labels": context.config.task.label_set,
            "columns": config.columns if config.columns is not None else _columns(context.config),
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the answers, a RECORD table, and why other records have none."""
        config, root = context.config, context.workspace.root
        batch, request = _request(context, self.selection, self.pool)
        annotator = build_annotator(config.label, root, _read, _columns(config), context.workspace.metadata)
        answers = annotator.annotate(batch, request)
        parquet.write_table(answers, out / LABELS)
        # People may have skipped records, and `--partial` leaves some to later rounds.
        reasons = annotator.unlabelled(batch, request) if answers.num_rows < batch.num_rows else {}
        if reasons:
            (out / UNLABELLED).write_text(json.dumps(reasons, ensure_ascii=False, sort_keys=True), encoding="utf-8")
        kept = compute.index_in(answers["id"].combine_chunks(), value_set=batch["id"].combine_chunks()).to_pylist()
        # A suggestion that stands is no agreement.
        by_people = [not by_model for by_model in labelled_by_model(answers)]
        shown = request.take(kept).suggestions
        seen = None if shown is None else [text if own else None for text, own in zip(shown, by_people, strict=True)]
        return label_summary(answers, seen, unlabelled=list(reasons.values()))


def _request(context: RoundContext, selection: str, pool: str) -> tuple[pa.Table, AnnotationRequest]:
    """Returns the records to answer, and the request that goes with them."""
    batch, suggestions = chosen_records(context, context.artifact(selection), context.artifact(pool))
    why = parquet.read_table(context.path(selection) / BATCH)
    # Selections of earlier versions have no sentences.
    reasons = why["why"].to_pylist() if "why" in why.column_names else why["reason"].to_pylist()
    request = AnnotationRequest(
        round=context.number,
        seed=context.seed("label"),
        folder=context.workspace.root,
        labels=context.config.task.label_set or None,
        suggestions=suggestions,
        suggested_by=context.state.champion,
        reasons=reasons,
        selection=selection,
        partial=context.partial,
    )
    pairs = read_answers(context)
    if pairs is None:
        return batch, with_suggestions(context, batch, request)
    rows = [row for row, id in enumerate(batch["id"].to_pylist()) if id in pairs]
    batch = batch.take(pa.array(rows, pa.int64()))
    # Two answers are compared without a suggestion of which is better.
    request = replace(request.take(rows), suggestions=None, candidates=[pairs[id] for id in batch["id"].to_pylist()])
    return batch, request


def _read(path: Path, columns: Any, *, name: str | None = None) -> Iterator[pa.Table]:
    return read(path, columns, name=name)


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
    # Selections of earlier versions have no probabilities of inclusion.
    if "inclusion" not in batch.column_names:
        return None
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


def batch_shift(workspace: Workspace, selection: str) -> dict[str, Any] | None:
    """Compares the labels that the champion predicts in the batch with those that it predicts in the pool.

    Returns:
        ``psi``, the population stability index, its ``p_value``, and the ``label`` whose share differs most, with its
        shares of ``batch`` and ``pool``; None before the champion's first training, and without a closed label set.
    """
    # Only here: it imports scipy's statistics.
    from posttrain.label.quality.findings import compare_counts

    scores = workspace.artifacts.path(workspace.metadata.producers(selection)[-1].inputs["scores"]) / SCORES
    if "probabilities" not in parquet.read_schema(scores).names:
        return None
    chosen = parquet.read_table(workspace.artifacts.path(selection) / BATCH, columns=["predicted"])
    pool, batch = (
        Counter(table["predicted"].drop_null().to_pylist())
        for table in (parquet.read_table(scores, columns=["predicted"]), chosen)
    )
    names = sorted({*pool, *batch})
    shift = compare_counts([pool[name] for name in names], [batch[name] for name in names], names)
    if shift.largest is None:
        return None
    label, before, after = shift.largest
    return {"psi": shift.psi, "p_value": shift.p_value, "label": label, "batch": after, "pool": before}


def export_batch(workspace: Workspace, config: Config, file: Path) -> int:
    """Writes the open round's batch to a new CSV file; returns the number of records.

    Raises:
        UserError: if no round waits for labels, or the file exists.
    """
    _, batch, request = _open_batch(workspace, config)
    check_new_file(file)
    write_atomically(file, export_labels(batch, request.suggestions, request.candidates).encode())
    return int(batch.num_rows)


def import_batch(workspace: Workspace, config: Config, file: Path) -> tuple[int, int]:
    """Checks a filled batch and stores it where the next run reads it; its labels are in the queue at once.

    Returns:
        The number of rows that have a label or are skipped, and of records in the batch.

    Raises:
        UserError: if no round waits for labels, or the file does not fit its batch.
    """
    _, batch, request = _open_batch(workspace, config)
    if not file.is_file():
        raise UserError("there is no such file", where=str(file))
    import_labels(file, batch, labels_in_file(request))
    return _store_answers(workspace, config, batch, request, file.read_bytes())


def read_batch(workspace: Workspace, config: Config) -> list[dict[str, Any]]:
    """Reads the open round's batch with the labels that its file has so far.

    Returns:
        A dictionary a record: ``id``; ``input``, as people read it; ``prompt``, its turns, or None; ``suggestion`` of
        the champion, or None; ``reason`` of its choice; ``a`` and ``b``, two answers to compare, in a loop on
        preferences; ``meta``, its other columns; ``label``, or None; ``skipped``, True if the file leaves it out.

    Raises:
        UserError: if no round waits for labels.
    """
    _, batch, request = _open_batch(workspace, config)
    file = _labels_file(workspace, config, batch, request)[2]
    answers = import_labels(file, batch, labels_in_file(request)) if file.exists() else [None] * batch.num_rows
    rows = []
    for row, (record, answer) in enumerate(zip(batch.to_pylist(), answers, strict=True)):
        pair = {} if request.candidates is None else dict(zip("ab", request.candidates[row], strict=True))
        rows.append(
            {
                "id": record["id"],
                "input": input_text(record["prompt"], record["text"]),
                "prompt": record["prompt"],
                "suggestion": None if request.suggestions is None else request.suggestions[row],
                "reason": None if request.reasons is None else request.reasons[row],
                **pair,
                "meta": json.loads(record["meta"] or "{}"),
                "label": None if isinstance(answer, Skip) else answer,
                "skipped": isinstance(answer, Skip),
            }
        )
    return rows


def answer_batch(workspace: Workspace, config: Config, answers: Mapping[str, str]) -> tuple[int, int]:
    """Fills in labels of the open round's batch, as `import_batch` does from a file; other labels stay.

    Args:
        workspace: The workspace.
        config: Its config.
        answers: The label of each record, by the record's id.

    Returns:
        The number of labels that are filled in, and of records in the batch.

    Raises:
        UserError: if no round waits for labels, an id is not in the batch, or a label is not in the label set.
    """
    _, batch, request = _open_batch(workspace, config)
    ids, labels = set(batch["id"].to_pylist()), labels_in_file(request)
    for id, label in answers.items():
        if id not in ids:
            raise UserError(f"no record of the batch has the id `{id}`", where="labels")
        if labels is not None and label not in labels:
            what = f"label `{shorten(label)}` of record {id} is not in the label set"
            raise UserError(what, where="labels", fix=suggest(label, labels))
    file = _labels_file(workspace, config, batch, request)[2]
    if file.exists():
        # A mistake that is in the file already is reported as such.
        import_labels(file, batch, labels)
        text = read_text(file, str(file))
    else:
        text = export_labels(batch, request.suggestions, request.candidates)
    return _store_answers(workspace, config, batch, request, fill_labels(text, str(file), answers).encode())


def _labels_file(
    workspace: Workspace, config: Config, batch: pa.Table, request: AnnotationRequest
) -> tuple[PeopleAnnotator, str, Path]:
    """Returns the annotator that waits, its name of the batch, and the batch's CSV file."""
    annotator = build_annotator(config.label, workspace.root, _read, _columns(config), workspace.metadata)
    if isinstance(annotator, ModelAnnotator):
        annotator = annotator.people
    assert isinstance(annotator, PeopleAnnotator), "an oracle does not wait"
    name = annotator.enqueue(batch, request)
    return annotator, name, workspace.root / annotator.file_name(name)


def _store_answers(
    workspace: Workspace, config: Config, batch: pa.Table, request: AnnotationRequest, content: bytes
) -> tuple[int, int]:
    """Writes a filled batch where the next run reads it, and into the queue; returns its answers and its records."""
    annotator, name, target = _labels_file(workspace, config, batch, request)
    if not target.exists() or target.read_bytes() != content:
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
        write_atomically(target, content)
    answers = import_labels(target, batch, labels_in_file(request))
    annotator.take_file(name, target, batch, request)
    return sum(answer is not None for answer in answers), len(answers)


def label_reports(workspace: Workspace) -> list[dict[str, Any]]:
    """Reports on each round's labels: counts by class and annotator, agreement with the champion.

    ``pool_agreement`` is the share of the whole pool that the champion labelled right, estimated from the records that
    were drawn at random: value, low, high, drawn; None where there are none, or they cannot be read any more.
    ``shift`` is how the batch differs from the pool, see `batch_shift`; the selection intends that it does.
    ``models`` is what a model suggested and what was accepted without people, see
    `posttrain.loop.stages.suggest.check_report`.
    """
    reports = []
    for run in workspace.metadata.runs(stage="label", status="done"):
        row = workspace.metadata.artifact(run.output or "")
        if row is not None:
            report = {"round": run.round, **row.meta, "pool_agreement": _pool_agreement(workspace, run)}
            reports.append({**report, "shift": _shift(workspace, run), "models": _models_part(workspace, run)})
    return sorted(reports, key=lambda report: report["round"])


def _models_part(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    """Returns the counts of a model's labels in a round and of their checks by people; None where there are none."""
    if "suggestions" not in run.inputs:
        return None
    try:
        return check_report(workspace, run.inputs["suggestions"], str(run.output))
    except DamagedArtifactError as error:
        log.warning("%s; what models labelled is unknown", error)
        return None


def _pool_agreement(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    try:
        share = pool_agreement(workspace, run.inputs["selection"], str(run.output))
    except DamagedArtifactError as error:
        log.warning("%s; how often the champion was right on the pool is unknown", error)
        return None
    return asdict(share) if share else None


def _shift(workspace: Workspace, run: Run) -> dict[str, Any] | None:
    try:
        return batch_shift(workspace, run.inputs["selection"])
    except DamagedArtifactError as error:
        log.warning("%s; how the batch differs from the pool is unknown", error)
        return None


def waiting_round(workspace: Workspace) -> int | None:
    """Returns the number of the round that waits for labels, or None."""
    waiting = [entry for entry in workspace.metadata.rounds() if entry.status == "waiting"]
    return waiting[-1].number if waiting and RoundState.from_row(waiting[-1]).batch is not None else None


def _open_batch(workspace: Workspace, config: Config) -> tuple[RoundContext, pa.Table, AnnotationRequest]:
    waiting = [entry for entry in workspace.metadata.rounds() if entry.status == "waiting"]
    state = RoundState.from_row(waiting[-1]) if waiting else RoundState()
    if state.batch is None:
        raise UserError("no round waits for labels", fix="posttrain status")
    context = RoundContext(workspace, config, waiting[-1].number, state=state)
    return context, *rest_for_people(*_request(context, state.batch["selection"], state.batch["pool"]))
