"""The batch that waits for labels: exported, read and answered outside of its round."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.label.annotator import AnnotationRequest
from posttrain.label.file_annotator import FILE, Skip, export_labels, fill_labels, import_answers, import_labels
from posttrain.label.formats.items import shown_text
from posttrain.label.model_annotators import ModelAnnotator
from posttrain.label.people import PeopleAnnotator, describe_progress, labels_in_file
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.stages.label import label_request, round_annotator
from posttrain.loop.stages.suggest import rest_for_people
from posttrain.loop.state import RoundState
from posttrain.models.task import labelled_text
from posttrain.store.errors import UserError, shorten, suggest
from posttrain.store.files import check_new_file, disk_errors, write_atomically
from posttrain.store.text_files import read_text
from posttrain.store.workspace import Workspace


def export_batch(workspace: Workspace, config: Config, file: Path) -> int:
    """Writes the open round's batch to a new CSV file; returns the number of records.

    Raises:
        UserError: if no round waits for labels, or the file exists.
    """
    _, batch, request = _open_batch(workspace, config)
    check_new_file(file)
    annotator, name, _ = _labels_file(workspace, config, batch, request)
    text = export_labels(batch, request.suggestions, request.candidates, named=annotator.overlap(name) > 1)
    write_atomically(file, text.encode())
    return int(batch.num_rows)


def import_batch(workspace: Workspace, config: Config, file: Path, annotator: str | None = None) -> tuple[int, int]:
    """Checks a filled batch and stores it where the next run reads it; its labels are in the queue at once.

    Args:
        workspace: The workspace.
        config: Its config.
        file: The filled file. Where several people answer each item, its name says who has filled it in.
        annotator: Who has filled it in; None: as its name says.

    Returns:
        The number of rows that have a label or are skipped, and of records in the batch.

    Raises:
        UserError: if no round waits for labels, or the file does not fit its batch.
    """
    _, batch, request = _open_batch(workspace, config)
    if not file.is_file():
        raise UserError("there is no such file", where=str(file))
    people, name, target = _labels_file(workspace, config, batch, request)
    who = annotator or (_person(file, target) if min(people.overlap(name), config.label.queue.overlap) > 1 else FILE)
    if who != FILE:
        target = workspace.root / people.copy_name(name, who)
    import_answers(file, batch, labels_in_file(request), request.form, name=str(file), annotator=who)
    return _store_answers(workspace, config, batch, request, target, who, file.read_bytes())


def missing_answers(workspace: Workspace, config: Config) -> str | None:
    """Describes what the open round's batch waits for; None once all of it is decided.

    Raises:
        UserError: if no round waits for labels.
    """
    _, batch, request = _open_batch(workspace, config)
    people, name, _ = _labels_file(workspace, config, batch, request)
    progress = people.queue.progress(name)
    return (
        describe_progress(progress, people.file_name(name)) + people.describe_missing(name)
        if progress.undecided
        else None
    )


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
    answers: list[str | Skip | None] = [None] * batch.num_rows
    if file.exists():
        answers = import_labels(file, batch, labels_in_file(request), request.form)
    rows = []
    for row, (record, answer) in enumerate(zip(batch.to_pylist(), answers, strict=True)):
        pair = {} if request.candidates is None else dict(zip("ab", request.candidates[row], strict=True))
        rows.append(
            {
                "id": record["id"],
                "input": shown_text(record),
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


def answer_batch(workspace: Workspace, config: Config, answers: Mapping[str, Any]) -> tuple[int, int]:
    """Fills in labels of the open round's batch, as `import_batch` does from a file; other labels stay.

    Args:
        workspace: The workspace.
        config: Its config.
        answers: The label of each record, by the record's id: a text, or what its JSON would hold.

    Returns:
        The number of labels that are filled in, and of records in the batch.

    Raises:
        UserError: if no round waits for labels, an id is not in the batch, or a label is not in the label set.
    """
    _, batch, request = _open_batch(workspace, config)
    columns, labels = (batch[name].to_pylist() for name in ("id", "prompt", "text")), labels_in_file(request)
    texts = {id: labelled_text(prompt, text) for id, prompt, text in zip(*columns, strict=True)}
    written = {id: label if isinstance(label, str) else json.dumps(label) for id, label in answers.items()}
    for id, label in written.items():
        if id not in texts:
            raise UserError(f"no record of the batch has the id `{id}`", where="labels")
        if request.form is not None:
            written[id] = request.form.read(label, texts[id])
        if labels is not None and label not in labels:
            what = f"label `{shorten(label)}` of record {id} is not in the label set"
            raise UserError(what, where="labels", fix=suggest(label, labels))
    file = _labels_file(workspace, config, batch, request)[2]
    if file.exists():
        # A mistake that is in the file already is reported as such.
        import_labels(file, batch, labels, request.form)
        text = read_text(file, str(file))
    else:
        text = export_labels(batch, request.suggestions, request.candidates)
    content = fill_labels(text, str(file), written).encode()
    return _store_answers(workspace, config, batch, request, file, FILE, content)


def _labels_file(
    workspace: Workspace, config: Config, batch: pa.Table, request: AnnotationRequest
) -> tuple[PeopleAnnotator, str, Path]:
    """Returns the annotator that waits, its name of the batch, and the batch's CSV file."""
    annotator = round_annotator(workspace, config)
    if isinstance(annotator, ModelAnnotator):
        annotator = annotator.people
    assert isinstance(annotator, PeopleAnnotator), "an oracle does not wait"
    name = annotator.enqueue(batch, request)
    return annotator, name, workspace.root / annotator.file_name(name)


def _person(file: Path, batch_file: Path) -> str:
    """Returns who has filled in a file by its name: `ana` for ``ana.csv`` and ``round-1.ana.csv``."""
    name = file.stem.removeprefix(batch_file.stem).strip(" .-_")
    # A browser calls a second download `round-1 (1).csv`.
    return name if name[:1].isalpha() else FILE


def _store_answers(
    workspace: Workspace,
    config: Config,
    batch: pa.Table,
    request: AnnotationRequest,
    target: Path,
    who: str,
    content: bytes,
) -> tuple[int, int]:
    """Writes a filled batch where the next run reads it, and into the queue; returns its answers and its records."""
    annotator, name, _ = _labels_file(workspace, config, batch, request)
    if not target.exists() or target.read_bytes() != content:
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
        write_atomically(target, content)
    answers = import_answers(target, batch, labels_in_file(request), request.form, annotator=who)
    annotator.take_files(name, batch, request)
    return sum(map(bool, answers)), len(answers)


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
    return context, *rest_for_people(*label_request(context, state.batch["selection"], state.batch["pool"]))
