"""Turns an inbox's sealed segments into files of records, each segment once, and exports these to the workspace."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from posttrain.data.feedback.entries import KINDS, Kind, Ratings, feedback_row, read_entry
from posttrain.data.feedback.inbox import seal_inbox
from posttrain.data.feedback.segment import sealed_segments
from posttrain.data.reading.conversion import AnswerReader, RecordConverter
from posttrain.data.reading.reader import read
from posttrain.data.reading.rows import Problem, Row, unknown_label_problem
from posttrain.store.errors import UserError, shorten
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.hashing import read_lines

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class FeedbackBatch:
    """Holds one sealed segment as files that `posttrain.data.reading.reader.read` accepts.

    Attributes:
        number: of the segment.
        files: by kind: ``labelled`` (prompt, completion), ``preferences`` (prompt, chosen, rejected), ``pool``
            (prompt). The same segment always gives the same names and bytes, so adding it again changes nothing.
        counts: records by kind, ``damaged`` for lines that do not match their checksum, and ``invalid``, if there are
            any, for lines that match it but are not feedback.
    """

    number: int
    files: Mapping[Kind, Path]
    counts: Mapping[str, int]
    mark: Path

    def rejected(self, kind: Kind | Literal["invalid"]) -> Path:
        """File for unusable entries, each with its reason."""
        return self.mark.parent.parent / "rejected" / f"feedback-{self.mark.stem}-{kind}.jsonl"

    def done(self) -> None:
        """Marks the records as stored elsewhere: no later `ingest` returns this segment."""
        # The mark comes last: killed before it, the same files are written and read again.
        write_atomically(self.mark, b"")

    def tables(self, kind: Kind) -> Iterator[pa.Table]:
        """Yields RECORD tables of one kind; none if there is none."""
        if kind in self.files:
            yield from read(self.files[kind], name=f"inbox/{self.files[kind].name}")


def ingest(folder: Path, ratings: Ratings = Ratings()) -> list[FeedbackBatch]:  # noqa: B008 - it is immutable
    """Returns the batches of an inbox that have not been stored elsewhere, oldest first.

    After a kill before `FeedbackBatch.done` the same batch is returned again.

    Args:
        folder: the inbox's, such as ``.posttrain/inbox``.
        ratings: which numbers approve and which refuse.

    Raises:
        UserError: the disk refused, or the process that has the inbox open does not answer.
    """
    # Only sealed segments never change, so only they give the same batch again after a kill.
    seal_inbox(folder)
    batches = []
    for segment in sealed_segments(folder):
        mark = segment.with_suffix(".taken")
        if not mark.exists():
            batches.append(_read_batch(folder / "records", segment, mark, ratings))
    return batches


def has_feedback(folder: Path) -> bool:
    """Returns True if an inbox holds entries that `ingest` would return."""
    segments = folder / "segments"
    if any(path.stat().st_size for path in segments.glob("[0-9]*.open")):
        return True
    return any(not path.with_suffix(".taken").exists() for path in sealed_segments(folder))


def _read_batch(records: Path, segment: Path, mark: Path, ratings: Ratings) -> FeedbackBatch:
    raw = segment.read_bytes()
    lines = read_lines(raw)
    rows: dict[Kind, list[dict[str, Any]]] = {}
    invalid: dict[int, str] = {}
    unclear = 0
    for line, value in zip(lines.numbers, lines.values, strict=True):
        try:
            read_entry(value)
        except UserError as error:
            invalid[line] = str(error)
            continue
        kind, row = feedback_row(value["feedback"], value["received"], ratings)
        rows.setdefault(kind, []).append(row)
        rating = value["feedback"].get("rating")
        unclear += rating is not None and ratings.of(rating) is None
    for number in lines.damaged:
        log.warning("%s:%d: does not match its checksum; skipping the line", segment, number)
    if unclear:
        rule = f"up from {ratings.up_from:g}, down to {ratings.down_to:g}"
        log.warning("%s: %d ratings are neither up nor down (%s); treating answers as unknown", segment, unclear, rule)
    make_folder(records)
    files = {}
    for kind in KINDS:
        if kind in rows:
            files[kind] = records / f"feedback-{segment.stem}-{kind}.jsonl"
            # Sorted keys: the same segment must give the same bytes, or the version would grow again.
            text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows[kind])
            write_atomically(files[kind], text.encode())
    counts: dict[str, int] = {kind: len(kind_rows) for kind, kind_rows in rows.items()}
    counts["damaged"] = len(lines.damaged)
    batch = FeedbackBatch(int(segment.stem), files, counts, mark)
    if invalid:
        counts["invalid"] = len(invalid)
        rejected = batch.rejected("invalid")
        make_folder(rejected.parent)
        # As text: what made the entry invalid might make the file unreadable.
        texts = [line.decode(errors="replace") for line in raw.split(b"\n")]
        entries = [{"line": line, "reason": reason, "entry": texts[line - 1]} for line, reason in invalid.items()]
        _write_jsonl(rejected, entries)
        details = (segment, len(invalid), rejected, *next(iter(invalid.items())))
        log.warning("%s: %d lines are not feedback and are set aside in %s; the first, line %d: %s", *details)
    return batch


def export_batch(
    batch: FeedbackBatch,
    folders: Mapping[Kind, Path],
    columns: Mapping[str, str] | None,
    labels: Collection[str] = (),
    read_answer: AnswerReader | None = None,
) -> list[Path]:
    """Writes a batch's records into folders by kind; the same batch always gives the same files.

    A record that reading would refuse, or whose answer is outside the label set, goes to `FeedbackBatch.rejected` with
    its ``reason``, and is reported: one bad answer must not stop all others.

    Args:
        columns: which column of the workspace's files holds what; the records get the same columns.
        labels: the closed label set; empty for open-ended answers.
        read_answer: refuses answers that the task cannot have; None: all texts are answers.

    Raises:
        UserError: the disk refused.
    """
    written = []
    for kind, file in batch.files.items():
        accepted, refused = [], []
        for line in file.read_bytes().splitlines():
            entry = json.loads(line)
            row = rename_columns(entry, columns or {})
            if problem := _find_problem(row, file.name, columns, labels, read_answer):
                reason = f"{problem.message}; {problem.fix}" if problem.fix else problem.message
                refused.append({**entry, "reason": reason})
            else:
                accepted.append(row)
        target = folders[kind] / file.name
        if accepted:
            make_folder(folders[kind])
            _write_jsonl(target, accepted)
            written.append(target)
        else:
            # An earlier export with other labels may have left records that are refused now.
            target.unlink(missing_ok=True)
        if refused:
            rejected_file = batch.rejected(kind)
            make_folder(rejected_file.parent)
            _write_jsonl(rejected_file, refused)
            first = shorten(refused[0]["meta"]["feedback"]["id"])
            details = (rejected_file, len(refused), len(accepted) + len(refused), kind, first, refused[0]["reason"])
            log.warning("%s: %d of %d entries (%s) are set aside; the first, `%s`: %s", *details)
    return written


def add_feedback(
    root: Path,
    batches: Sequence[FeedbackBatch],
    columns: Mapping[str, str] | None,
    labels: Collection[str] = (),
    read_answer: AnswerReader | None = None,
) -> list[Path]:
    """Adds rated and corrected answers to a workspace's labelled records, and other prompts to its pool.

    Args:
        root: the workspace's folder.
        batches: from `ingest`.
        columns: as in `export_batch`, as are ``labels`` and ``read_answer``.

    Returns:
        The files that were written, which the next round reads.
    """
    written = []
    for batch in batches:
        folders = {kind: root / "data" / ("pool" if kind == "pool" else "labelled") for kind in KINDS}
        written += export_batch(batch, folders, columns, labels, read_answer)
        # After the files are written: a kill before leaves the feedback in the inbox, and the files are written again.
        batch.done()
    return written


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    write_atomically(path, text.encode())


def _find_problem(
    row: dict[str, Any],
    name: str,
    columns: Mapping[str, str] | None,
    labels: Collection[str],
    read_answer: AnswerReader | None,
) -> Problem | None:
    """Returns the reason why reading would refuse the row; None if it would not."""
    for converted in RecordConverter(name, columns, answers=False, read_answer=read_answer)([Row(1, row)]):
        if isinstance(converted, Problem):
            return converted
        if labels and converted["completion"] is not None and converted["completion"] not in labels:
            return unknown_label_problem(converted["completion"], labels, name, 1)
    return None


def rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Names the row's values by ``columns``; a pair without columns of its own keeps the better answer."""
    if columns and "chosen" in row and "chosen" not in columns:
        rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
        row = {**rest, "completion": row["chosen"]}
    return {**dict.fromkeys(columns.values()), **{columns.get(name, name): value for name, value in row.items()}}
