"""People as annotators: puts a round's batch into the queue and a CSV file, and waits until all of it is decided."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.label.annotator import LEFT, AnnotationRequest, Annotator, RecordReader, with_answers
from posttrain.label.answer_kinds import KINDS, Preference, Question
from posttrain.label.audit import record_change
from posttrain.label.file_annotator import FILE, Skip, export_labels, import_answers, read_labels
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import Batch, Item, NewItem, Progress, hash_fraction
from posttrain.store.errors import UserError, Waiting, shorten
from posttrain.store.files import disk_errors, write_atomically
from posttrain.store.message import counted

log = logging.getLogger("posttrain")

FROM_FILE = "from a file"
"""The note of answers that stand in the CSV file with a name, and follow the file as those without one do."""

_LONGEST_NAME = 80

_PAGES = " or answer on the pages (posttrain label serve)"
_WANTED = "; items want the answers of"
_PARTIAL = "; or continue without the rest: posttrain run --partial"


class PeopleAnnotator(Annotator):
    """Has people answer, on the pages or in ``labels/round-N.csv``; both are the same queue.

    The file is written once and never over. Its filled rows are answers of the annotator ``file``, or of the person
    that its column ``annotator`` names, and follow the file until the batch is closed. Where several people answer,
    each fills in a copy, ``labels/round-N.NAME.csv``.

    Args:
        queue: The workspace's queue.
        read: Reads the gold file.
        gold_file: File of records with right answers; None for none.
        columns: Its column mapping.
    """

    name = FILE

    def __init__(
        self,
        queue: Queue,
        read: RecordReader,
        gold_file: Path | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.queue, self.read, self.gold_file, self.columns = queue, read, gold_file, columns

    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        # No file for an empty batch: nobody could fill it in, and the round would wait for ever.
        if not batch.num_rows:
            return batch
        batch_name = self.enqueue(batch, request)
        # Closed already where a run was killed before it stored the labels: the same labels again.
        if self._status(batch_name) == "open":
            self._close(batch_name, batch, request)
        return _labelled(batch, self.queue.items(batch_name), request)

    def unlabelled(self, batch: pa.Table, request: AnnotationRequest) -> dict[str, str]:
        if not batch.num_rows:
            return {}
        items = self.queue.items(self.enqueue(batch, request))
        return {item.record: reason for item in items if (reason := _reason_unlabelled(item)) is not None}

    def _close(self, batch_name: str, batch: pa.Table, request: AnnotationRequest) -> None:
        """Closes a batch that is decided, or enough of it.

        Raises:
            Waiting: answers are missing.
            UserError: there is no answer to continue with, or the file has a fault.
        """
        name = self.file_name(batch_name)
        path = request.folder / name
        start = f"labels for round {request.round}: "
        is_new = not path.exists()
        # Never written over: people may have filled in half of it.
        if is_new:
            with disk_errors(path):
                path.parent.mkdir(exist_ok=True)
            late = self._late_labels(batch, request, name)
            named = self.overlap(batch_name) > 1
            text = export_labels(batch, request.suggestions, request.candidates, late, named=named)
            write_atomically(path, text.encode())
            message = f"fill the label column of {name} ({counted(batch.num_rows, 'record')}){_PAGES}, then run again"
        filled = self.take_files(batch_name, batch, request)
        if not is_new or filled:
            message = f"{filled} of {batch.num_rows} are filled in {name}; fill the rest, then run again"
        progress = self.queue.progress(batch_name)
        if progress.undecided:
            # A batch that nobody could see yet is not a partial one.
            if is_new or not request.partial:
                if progress.review or progress.answers + progress.dropped > filled or filled == batch.num_rows:
                    message = describe_progress(progress, name)
                message += _PARTIAL if progress.done else ""
                raise Waiting(start + message + self.describe_missing(batch_name))
            if not progress.done:
                message = f"no record of round {request.round}'s batch is decided yet, and --partial needs one"
                raise UserError(message, where=name, fix="label a row, or answer on the pages (posttrain serve)")
            log.info(
                "  going on with a part of the batch: %d asked, %d decided, %d skipped, %d given back to the pool",
                *(progress.items, progress.done, progress.dropped, progress.undecided),
            )
        with self.queue.metadata.transaction():
            self.queue.finish_batch(batch_name, partial=bool(progress.undecided))
            if progress.undecided:
                after = {"undecided": progress.undecided}
                record_change(self.queue.metadata, "terminal", "close batch", batch_name, after=after)

    def file_name(self, batch_name: str) -> str:
        """Returns the CSV file of a batch, relative to the workspace: ``labels/round-N.csv``.

        A second batch of a round, after one that was skipped as a whole, has a file of its own.
        """
        batches = self.queue.batches()
        own = next(batch for batch in batches if batch.name == batch_name)
        earlier = batches[: batches.index(own)]
        closed = sum(batch.round == own.round and batch.status == "done" for batch in earlier)
        return f"labels/round-{own.round}{f'-{closed + 1}' if closed else ''}.csv"

    def _status(self, batch_name: str) -> str:
        return self._batch(batch_name).status

    def _batch(self, batch_name: str) -> Batch:
        batch = self.queue.batch(batch_name)
        assert batch is not None, "it was added before"
        return batch

    def _late_labels(self, batch: pa.Table, request: AnnotationRequest, name: str) -> dict[str, str]:
        """Returns the labels of this batch's records that were filled in after an earlier round went on without."""
        labels, records = labels_in_file(request), set(batch["id"].to_pylist())
        late: dict[str, str] = {}
        for before in self.queue.batches("done"):
            if before.round is None or not self.queue.progress(before.name).undecided:
                continue
            undecided = {item.record for item in self.queue.items(before.name) if item.status in ("open", "review")}
            file = self.file_name(before.name)
            try:
                filled = read_labels(request.folder / file, undecided, labels)
            except UserError as error:
                log.warning("%s; labels that came late are not read from this file", error)
                continue
            if own := {id: label for id, label in filled.items() if id in records}:
                log.info("  %s that came late in %s: filled in %s", counted(len(own), "label"), file, name)
                late |= own
            if others := len(filled) - len(own):
                late_labels = counted(others, "label")
                log.info("  %s came late in %s: to count once selected again", late_labels, file)
        return late

    def take_files(self, batch_name: str, batch: pa.Table, request: AnnotationRequest) -> int:
        """Brings the answers from files in line with the CSV file and its copies; returns the number of filled records.

        A skipped row is dropped, as the file speaks for the person who runs the loop. Rows without a label or a mark
        do not count.

        Raises:
            UserError: as `import_answers`, or two files hold answers of one person to a record.
        """
        if self.queue.lower_overlap(batch_name):
            log.info("  label.queue of the config counts for %s too: overlap %d", batch_name, self.overlap(batch_name))
        name = self.file_name(batch_name)
        given_to: dict[str, dict[str, str | Skip]] = {id: {} for id in batch["id"].to_pylist()}
        for file, who in self._files(request.folder, name):
            path, labels = request.folder / file, labels_in_file(request)
            answers = import_answers(path, batch, labels, request.form, name=file, annotator=who)
            if file != name:
                log.info("  answers in %s: %d", file, sum(map(len, answers)))
            for (id, before), new in zip(given_to.items(), answers, strict=True):
                if twice := before.keys() & new.keys():
                    what = f"`{min(twice)}` has answered the record `{id}` in another file already"
                    raise UserError(what, where=file, fix=f"name each person once: {_copy_name(name, 'NAME')}")
                before |= new
        elsewhere = 0
        # One transaction and in the order of ids, as a lock on each item is held until its end.
        with self.queue.metadata.transaction():
            for item in sorted(self.queue.items(batch_name), key=lambda item: item.id):
                elsewhere += not self._take_rows(item, given_to.get(item.record, {}))
        if elsewhere:
            log.info("  %d rows of %s do not count: these items were answered by others first", elsewhere, name)
        return sum(map(bool, given_to.values()))

    def _take_rows(self, item: Item, given: Mapping[str, str | Skip]) -> bool:
        """Brings the files' answers to one item in line with its rows; returns False if one of them does not count."""
        how = (item.resolution or {}).get("how")
        labels = {who: answer for who, answer in given.items() if not isinstance(answer, Skip)}
        # Who has answered in a file before, and not on the pages.
        before = {each.annotator for each in item.answers if each.annotator == FILE or each.note == FROM_FILE}
        if given and not labels:
            reason = next((skip.reason for skip in given.values() if isinstance(skip, Skip) and skip.reason), None)
            if item.status == "dropped" and (how != "skip" or (item.resolution or {}).get("note") == reason):
                return True
            others = [each for each in item.answers if each.annotator not in before and each.status != "skipped"]
            if others or how in ("review", "posterior", "model"):
                return False
            for who in before:
                self.queue.set_answer(item.id, who, None)
            self.queue.drop(item.id, min(given), reason, how="skip")
            return True
        if item.status == "dropped" and how == "skip":
            self.queue.undrop(item.id)
        counts = [self.queue.set_answer(item.id, who, None) for who in sorted(before - set(labels))]
        for who, label in labels.items():
            answer = KINDS[item.kind].parse(label, item)
            on_pages = [each.answer for each in item.answers if each.annotator == who and who not in before]
            note = None if who == FILE else FROM_FILE
            # A person's answer on the pages stands, and is not a second one.
            counts.append(answer in on_pages if on_pages else self.queue.set_answer(item.id, who, answer, note))
        return all(counts)

    def overlap(self, batch_name: str) -> int:
        """Returns the number of people who answer each item of a batch."""
        return int(self._batch(batch_name).settings["overlap"])

    def copy_name(self, batch_name: str, annotator: str) -> str:
        """Returns the file with one person's answers to a batch, relative to the workspace.

        Raises:
            UserError: the name cannot be a part of a file's name.
        """
        if not 0 < len(annotator) <= _LONGEST_NAME or set(annotator) & set("/\\\0"):
            raise UserError(f"`{shorten(annotator)}` cannot be part of a file's name", where="--annotator")
        return _copy_name(self.file_name(batch_name), annotator)

    @staticmethod
    def _files(folder: Path, name: str) -> Iterator[tuple[str, str]]:
        """Yields the CSV file and its copies, each with the person who answers in it."""
        if (folder / name).exists():
            yield name, FILE
        stem = Path(name).stem
        for path in sorted((folder / name).parent.glob(f"{stem}.*.csv")):
            yield path.relative_to(folder).as_posix(), path.stem.removeprefix(f"{stem}.")

    def enqueue(self, batch: pa.Table, request: AnnotationRequest) -> str:
        """Adds the batch to the queue unless it is there; returns its name."""
        records = set(batch["id"].to_pylist())
        name = f"round-{request.round}"
        for before in self.queue.batches():
            if before.round == request.round:
                if {item.record for item in self.queue.items(before.name)} == records:
                    return before.name
                # The round's batch has changed, as after a roll-back of its rows.
                name = f"round-{request.round}-{1 + sum(b.round == request.round for b in self.queue.batches())}"
        self.queue.add_batch(
            name,
            request.kind,
            list(_new_items(batch, request)),
            labels=request.labels,
            gold=self._gold_items(batch, request),
            round=request.round,
            selection=request.selection,
            seed=request.seed,
        )
        return name

    def describe_waiting(self, batch: Batch, before: str) -> str:
        """Describes what a round waits for by what the queue holds now.

        Args:
            batch: The round's open batch.
            before: What was missing when the loop looked last.
        """
        progress, start = self.queue.progress(batch.name), f"labels for round {batch.round}: "
        if not before.startswith(start):
            return before
        if not progress.undecided:
            return f"{start}{progress.items} of {progress.items} are decided, run again"
        message, wanted, _ = before.partition(_WANTED)
        if progress.answers + progress.dropped + progress.review:
            message = start + describe_progress(progress, self.file_name(batch.name))
            message += _PARTIAL if progress.done else ""
        # Not for each batch: it reads all open items, and a page asks each second.
        needs_several = wanted or batch.settings["overlap"] > 1 or batch.settings["check"]
        return message + (self.describe_missing(batch.name) if needs_several else "")

    def describe_missing(self, batch_name: str) -> str:
        """Describes whose answers are missing where items want those of several people; "" where one is enough."""
        settings, open_items = self._batch(batch_name).settings, self.queue.items(batch_name, "open")
        most = max((item.wanted for item in open_items), default=0)
        wanted = max(most, settings["overlap"], 2 if settings["check"] else 1)
        file = self.file_name(batch_name)
        answered = {each.annotator for item in open_items for each in item.answers if each.status == "answered"}
        so_far = f", so far those of {', '.join(sorted(answered))}" if answered else ""
        files = (
            f"{_WANTED} {most} people{so_far}: each fills a copy, {_copy_name(file, 'NAME')}, "
            "or rows with their name in a column `annotator`; or lower label.queue.overlap"
        )
        files = files if most > 1 else ""
        people = self.queue.count_people() + len(answered)
        if wanted <= max(people, 1):
            return files
        few = f"{people} can answer: posttrain accounts add"
        return f"{files}; on the pages {few}" if files else f"{_WANTED} {wanted} people, and {few}"

    def _gold_items(self, batch: pa.Table, request: AnnotationRequest) -> list[NewItem]:
        if self.gold_file is None or request.kind == "preference":
            return []
        if not self.gold_file.is_file():
            raise UserError(f"no such file: {self.gold_file}", where="label.queue.gold_file")
        inputs = set(batch["input_id"].to_pylist())
        metas = [_meta(meta) for meta in batch["meta"].to_pylist()]
        items = []
        for table in self.read(self.gold_file, self.columns):
            for row in table.to_pylist():
                # An item of the batch whose answer is known already would tell its annotator which of the two is gold.
                if row["completion"] is None or row["input_id"] in inputs:
                    continue
                content = _content(row)
                # So would columns that only one of the two files has: those of another item, with its values for these.
                like = metas[int(hash_fraction(request.seed, "meta", row["id"]) * len(metas))]
                content["meta"] = {name: content["meta"].get(name, value) for name, value in like.items()}
                expected = KINDS[request.kind].parse(row["completion"], Question(content, request.labels))
                items.append(NewItem(row["id"], content, expected=expected))
        return items


def _copy_name(file: str, annotator: str) -> str:
    """Returns ``labels/round-N.NAME.csv``."""
    return f"{file.removesuffix('.csv')}.{annotator}.csv"


def labels_in_file(request: AnnotationRequest) -> Sequence[str] | None:
    """Returns the answers that the CSV file may hold; None for any text."""
    return list(Preference.texts) if request.kind == "preference" else request.label_set


def _new_items(batch: pa.Table, request: AnnotationRequest) -> Iterator[NewItem]:
    for row, record in enumerate(batch.to_pylist()):
        content = _content(record)
        if request.candidates is not None:
            content["candidates"] = list(request.candidates[row])
        suggestion = None
        suggested = None if request.suggestions is None else request.suggestions[row]
        if suggested is not None:
            suggestion = {
                "answer": KINDS[request.kind].parse(suggested, Question(content, request.labels)),
                "confidence": None if request.confidences is None else request.confidences[row],
                "annotator": request.suggested_by,
            }
        reason = None if request.reasons is None else request.reasons[row]
        yield NewItem(record["id"], content, suggestion=suggestion, reason=reason)


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    content = {name: record[name] for name in ("prompt", "text") if record[name] is not None}
    return content | {"meta": _meta(record["meta"]), "source": f"{record['source']}:{record['line']}"}


def _meta(text: str | None) -> dict[str, Any]:
    # PostgreSQL's JSON holds no NaN, which Python reads and writes.
    return dict(json.loads(text or "{}", parse_constant=lambda _: None))


def describe_progress(progress: Progress, name: str) -> str:
    """Describes what is missing where more than the file's empty rows are."""
    wanted = [
        f"{count} {text}"
        for count, text in (
            (progress.left, "answer is wanted" if progress.left == 1 else "answers are wanted"),
            (progress.review, "item is in review" if progress.review == 1 else "items are in review"),
        )
        if count
    ]
    return (
        f"{progress.resolved} of {progress.items} are decided, {' and '.join(wanted)}; "
        f"answer on the pages (posttrain serve) or in {name}, then run again"
    )


def _reason_unlabelled(item: Item) -> str | None:
    """Returns why an item of a closed batch gave no label; None if it gave one."""
    if item.status in ("open", "review"):
        return LEFT
    resolution = item.resolution or {}
    if item.status == "done":
        answer = resolution.get("answer")
        return None if KINDS[item.kind].records(answer, item) else f"answer without a label: {answer}"
    notes = [given.note for given in item.answers if given.status == "skipped"]
    return next((note for note in (resolution.get("note"), *notes) if note), "no reason given")


def _labelled(batch: pa.Table, items: Sequence[Item], request: AnnotationRequest) -> pa.Table:
    """Returns the records that people answered, in their order; those that they dropped are left out."""
    item_of = {item.record: item for item in items if item.status == "done"}
    groups: dict[str, list[tuple[int, dict[str, Any], float | None]]] = {}
    for row, id in enumerate(batch["id"].to_pylist()):
        item = item_of.get(id)
        if item is None or item.resolution is None:
            continue
        # Nothing for an answer that no model can learn from, such as a tie.
        for record in KINDS[item.kind].records(item.resolution["answer"], item)[:1]:
            who = ", ".join(sorted(item.resolution["by"]))
            groups.setdefault(who, []).append((row, record, item.seconds))
    if not groups:
        return batch.slice(0, 0)
    tables = []
    for who, answered in groups.items():
        rows, records, seconds = zip(*answered, strict=True)
        table = batch.take(pa.array(rows, pa.int64()))
        rejected = [record.get("rejected") for record in records]
        if any(answer is not None for answer in rejected):
            column = table.schema.get_field_index("rejected")
            table = table.set_column(column, "rejected", pa.array(rejected, pa.string()))
        tables.append(with_answers(table, [record["completion"] for record in records], who, request.round, seconds))
    kept = [row for answered in groups.values() for row, _, _ in answered]
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return pa.concat_tables(tables).take(pa.array(order, pa.int64()))
