"""Converts items of the queue to records of another tool and back, without loss.

A format states how a record is read and written in the tool's own terms. What the tool has no place for is kept by the
functions here: of our items in an extension of the record, and of foreign records in the item's ``meta``.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from posttrain.label.answer_kinds import KINDS
from posttrain.store.errors import UserError
from posttrain.store.hashing import canonical_json

EXTENSION = "posttrain"
"""Key of the extension in a record."""

TEXT_KEYS = ("text", "prompt", "question", "content", "message", "instruction", "body")
"""Names under which tools and people keep the text to label, best first."""

ANSWER_COLUMNS = ("note", "seconds", "suggestion", "position", "confidence", "guideline")
"""Columns of `label_answers` in the details of an answer, beside ``created_at``."""

_MISSING = object()
_LONGEST_LABEL = 80


@dataclass(frozen=True)
class PortableAnswer:
    """An annotator's answer, skip or flag.

    Attributes:
        annotator: Name; "" as a codec reads it where the tool's own parts do not say who answered.
        details: Columns of `label_answers` that the others leave out, but for NULL; times in UTC and ISO format.
    """

    annotator: str
    answer: Any = None
    status: str = "answered"
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PortableItem:
    """An item of the queue with its answers, as files hold it.

    Attributes:
        record: Id of its record; None where the file has none.
        content: As in `posttrain.label.answer_kinds.Question`.
        suggestion: ``answer``, ``confidence`` and ``annotator`` of a model's answer; None for none.
        expected: The right answer of a gold item; None for the others.
        details: Columns of `label_items` that the others leave out, but for NULL.
    """

    record: str | None
    content: Mapping[str, Any]
    suggestion: Mapping[str, Any] | None = None
    expected: Any = None
    answers: tuple[PortableAnswer, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """The kind and the labels of the answers in a file.

    Attributes:
        kind: One of `posttrain.label.answer_kinds.KINDS`.
        labels: The closed label set; None for open-ended answers.
        question: The tool's name for the question that is answered; None: no name of the tool's.
        annotator: Who answered, in a file that does not say so.
        field: The tool's name for the text to label; None: one of `TEXT_KEYS`.
    """

    kind: str
    labels: tuple[str, ...] | None = None
    question: str | None = None
    annotator: str = "import"
    field: str | None = None


class Codec(ABC):
    """A file format.

    Attributes:
        name: As in ``--format``.
        key: Key of foreign parts in an item's ``meta``.
        kinds: Kinds of answers that the tool can hold.
        names_annotators: False if the tool's own parts do not say who answered.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = tuple(KINDS)
    names_annotators: ClassVar[bool] = True

    @abstractmethod
    def survey(self, record: Mapping[str, Any], survey: "Survey") -> None:
        """Notes the questions and labels of a record."""

    @abstractmethod
    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        """Reads a record by the tool's own parts, without the extension.

        Args:
            where: The record's place in errors.
            foreign: Counts parts that have no meaning here, by name.

        Raises:
            UserError: the record is none of this format.
        """

    @abstractmethod
    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        """Writes an item in the tool's own parts, without the extension."""

    @abstractmethod
    def extension(self, record: Mapping[str, Any]) -> Any:
        """Returns the extension of a record, or None."""

    @abstractmethod
    def extend(self, record: dict[str, Any], extension: dict[str, Any]) -> None:
        """Puts the extension into a record."""


class Survey:
    """Collects what a file asks, to decide on the kind of its answers before they are read."""

    def __init__(self) -> None:
        self._kinds: dict[str, Counter[str]] = {}
        self._labels: dict[str, dict[str, None]] = {}
        self._texts: Counter[str] = Counter()
        self.batch: Mapping[str, Any] | None = None

    def add(self, question: str, kind: str, labels: tuple[str, ...] = ()) -> None:
        """Notes an answer to a question; ``label or text`` is a kind that `shape` decides on."""
        self._kinds.setdefault(question, Counter())[kind] += 1
        seen = self._labels.setdefault(question, {})
        for label in labels:
            seen.setdefault(label)
        self._texts[question] += kind == "label or text" and (len(labels[0]) > _LONGEST_LABEL or "\n" in labels[0])

    def shape(self, kind: str | None, question: str | None, labels: tuple[str, ...] | None, annotator: str) -> Shape:
        """Decides on the kind, the label set and the question.

        Args:
            kind: The user's; None: the file's.
            question: The user's; None: the file's, or that with the most answers.
            labels: The config's label set; used for one label a record, unless the file names its own.

        Raises:
            UserError: the file does not ask the question, or says nothing that a kind can be seen from.
        """
        batch = self.batch or {}
        if question is not None and question not in self._kinds:
            known = ", ".join(self._kinds) or "none"
            raise UserError(f"the file has no answers to `{question}`", where="--question", fix=f"there are: {known}")
        chosen = batch.get("question") if question is None else question
        if question is None and not batch and self._kinds:
            chosen = max(self._kinds, key=lambda name: self._kinds[name].total())
        kind = kind or batch.get("kind") or self._guess(chosen) or ("choice" if labels else None)
        if kind is None:
            raise UserError("the file has no answers to see their kind from", fix=f"--kind: {', '.join(KINDS)}")
        if kind not in KINDS:
            raise UserError(f"`{kind}` is no kind of answers", where="--kind", fix=f"one of {', '.join(KINDS)}")
        return Shape(kind, self._label_set(kind, chosen, labels), chosen, annotator)

    def _guess(self, question: str | None) -> str | None:
        kinds = self._kinds.get(question or "", Counter())
        if "choices" in kinds and set(kinds) <= {"choice", "choices", "label or text"}:
            return "choices"
        if kinds and (top := kinds.most_common(1)[0][0]) != "label or text":
            return top
        if not kinds:
            return None
        # Labels are short and come again; answers in words are neither.
        distinct = len(self._labels[question or ""])
        few = distinct <= max(2, kinds.total() // 2)
        return "choice" if few and not self._texts[question or ""] else "text"

    def _label_set(self, kind: str, question: str | None, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if kind not in ("choice", "choices", "spans"):
            return None
        if self.batch is not None and "labels" in self.batch:
            own = self.batch["labels"]
            return None if own is None else tuple(own)
        own_labels = tuple(self._labels.get(question or "", ()))
        # The config's set is not that of another question, such as one about moods in a workspace of topics.
        if labels and kind == "choice" and (not own_labels or set(own_labels) & set(labels)):
            return labels
        return own_labels or None


def export_record(codec: Codec, item: PortableItem, shape: Shape, *, first: bool) -> dict[str, Any]:
    """Returns an item as a record, with all that the tool has no place for in its extension.

    Args:
        first: True for a file's first record, which also tells the batch's kind and labels.
    """
    record = codec.write(item, shape)
    read = codec.read(record, shape, codec.name, Counter())
    extension = _difference(item, read, whole=not codec.names_annotators)
    if first:
        labels = None if shape.labels is None else list(shape.labels)
        extension["batch"] = {"kind": shape.kind, "labels": labels, "question": shape.question}
    if extension:
        codec.extend(record, extension)
    return record


def import_record(
    codec: Codec, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]
) -> PortableItem:
    """Returns the item of a record; where somebody answered in the tool since the export, those answers count.

    Raises:
        UserError: the record is none of this format, or an answer does not fit.
    """
    read = codec.read(record, shape, where, foreign)
    extension = codec.extension(record)
    try:
        item = read if extension is None else _overlay(read, extension)
    except (TypeError, AttributeError, KeyError, ValueError, IndexError):
        raise UserError(f"the part `{EXTENSION}` is damaged", where=where, fix="remove it") from None
    named = (replace(each, annotator=each.annotator or shape.annotator) for each in item.answers)
    return replace(item, answers=tuple(named))


def with_foreign(content: Mapping[str, Any], key: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item's content with the foreign parts of its record in ``meta``."""
    parts = {name: value for name, value in parts.items() if value not in ({}, [], None)}
    return {**content, "meta": {**content.get("meta", {}), key: parts}} if parts else dict(content)


def foreign_parts(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the foreign parts that `with_foreign` kept."""
    parts = _meta(content).get(key)
    return dict(parts) if isinstance(parts, Mapping) else {}


def own_meta(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns an item's ``meta`` without the foreign parts."""
    return {name: value for name, value in _meta(content).items() if name != key}


def shown_text(content: Mapping[str, Any], *, last_turn: bool = False) -> str:
    """Returns the input as people read it: the text, a single user turn, or one paragraph a turn.

    Args:
        last_turn: True for spans, which are parts of the last turn.
    """
    prompt = content.get("prompt")
    if not prompt:
        return str(content.get("text") or "")
    if last_turn or is_simple(prompt):
        return str(prompt[-1]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def is_simple(prompt: Any) -> bool:
    """Returns True for a prompt of one user turn, which its text alone stands for."""
    return isinstance(prompt, list | tuple) and len(prompt) == 1 and prompt[0] == {**prompt[0], "role": "user"}


def user_prompt(text: str) -> list[dict[str, str]]:
    """Returns the prompt of one user turn."""
    return [{"role": "user", "content": text}]


def text_key(names: Sequence[str], shape: Shape, part: str, where: str) -> str:
    """Returns which of the texts of a foreign record is the one to label.

    Args:
        names: Names of its texts.
        part: The part of the record that they are in, for errors.

    Raises:
        UserError: that cannot be seen.
    """
    keys = TEXT_KEYS if shape.field is None else (shape.field,)
    known = next((name for name in keys if name in names), None)
    if known is None and len(names) == 1 and shape.field is None:
        known = names[0]
    if known is None:
        raise UserError(f"no text in `{part}`", where=where, fix=f"--field: {', '.join(names)}" if names else None)
    return known


def is_dialogue(turns: Any) -> bool:
    """Returns True for a list of turns, each with a role and a content."""
    return (
        isinstance(turns, list)
        and bool(turns)
        and all(isinstance(t, Mapping) and are_strings([t.get("role"), t.get("content")]) for t in turns)
    )


def are_strings(values: Any) -> bool:
    """Returns True for a list of nothing but texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _meta(content: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = content.get("meta")
    return meta if isinstance(meta, Mapping) else {}


def _difference(item: PortableItem, read: PortableItem, whole: bool) -> dict[str, Any]:
    """Returns what `_overlay` needs to make ``item`` of ``read``.

    Args:
        whole: True if an answer that differs from the exported one is another person's.
    """
    extension: dict[str, Any] = {}
    if item.content.get("text") is not None and "prompt" not in item.content:
        # Else the text, which may be a megabyte, would be in the file twice.
        extension["plain"] = True
        read = _plain(read, extension)
    for name in ("record", "suggestion", "expected"):
        if not _same(getattr(item, name), getattr(read, name)):
            extension[name] = getattr(item, name)
    for name in ("content", "details"):
        after, before = getattr(item, name), getattr(read, name)
        changed = {key: value for key, value in after.items() if not _same(value, before.get(key, _MISSING))}
        if changed:
            extension[name] = changed
        if removed := [key for key in before if key not in after]:
            extension[f"no_{name}"] = removed
    # By these the import knows which answers are as they were exported.
    extension["seen"] = [_fingerprint(answer) for answer in read.answers]
    if len(item.answers) != len(read.answers) or (whole and item.answers):
        extension["all_answers"] = [_as_dict(answer) for answer in item.answers]
    elif any(changes := [_answer_difference(*pair) for pair in zip(item.answers, read.answers, strict=True)]):
        extension["answers"] = changes
        # Such as the name of a user whom the tool knows by a number.
        pairs = [(before.annotator, after.annotator) for after, before in zip(item.answers, read.answers, strict=True)]
        if names := {before: after for before, after in pairs if before not in ("", after)}:
            extension["names"] = names
    return extension if extension != {"seen": []} else {}


def _overlay(read: PortableItem, extension: Mapping[str, Any]) -> PortableItem:
    read = _plain(read, extension)
    values: dict[str, Any] = {
        name: extension[name] for name in ("record", "suggestion", "expected") if name in extension
    }
    for name in ("content", "details"):
        kept = {key: value for key, value in getattr(read, name).items() if key not in extension.get(f"no_{name}", ())}
        values[name] = {**kept, **extension.get(name, {})}
    seen = extension.get("seen", [])
    given = [_fingerprint(answer) for answer in read.answers]
    changes = dict(zip(seen, extension.get("answers", ()), strict=False))
    names = extension.get("names", {})
    answers = [
        replace(answer, **changes.get(mark, {"annotator": names.get(answer.annotator, answer.annotator)}))
        for answer, mark in zip(read.answers, given, strict=True)
    ]
    if "all_answers" in extension:
        of_annotator = {answer["annotator"]: PortableAnswer(**answer) for answer in extension["all_answers"]}
        new = (answer for answer, mark in zip(answers, given, strict=True) if mark not in seen)
        answers = list({**of_annotator, **{answer.annotator: answer for answer in new}}.values())
    if given != seen:
        # Somebody answered in the tool: what becomes of the item is decided anew.
        decided = ("status", "resolution", "wanted", "answered")
        values["details"] = {name: value for name, value in values["details"].items() if name not in decided}
    return replace(read, **values, answers=tuple(answers))


def _plain(read: PortableItem, extension: Mapping[str, Any]) -> PortableItem:
    """Returns an item whose input is a plain text instead of a prompt of one turn."""
    prompt = read.content.get("prompt")
    if not extension.get("plain") or prompt is None or not is_simple(prompt):
        return read
    content = {("text" if name == "prompt" else name): value for name, value in read.content.items()}
    return replace(read, content={**content, "text": prompt[0]["content"]})


def _answer_difference(answer: PortableAnswer, read: PortableAnswer) -> dict[str, Any]:
    after, before = _as_dict(answer), _as_dict(read)
    return {name: value for name, value in after.items() if not _same(value, before[name])}


def _fingerprint(answer: PortableAnswer) -> str:
    return hashlib.sha256(canonical_json(_as_dict(answer))).hexdigest()[:12]


def _as_dict(answer: PortableAnswer) -> dict[str, Any]:
    return {each.name: getattr(answer, each.name) for each in fields(answer)}


def _same(first: Any, second: Any) -> bool:
    # In Python 1 equals True and 1.0, and in JSON it does not.
    return type(first) is type(second) and first == second
