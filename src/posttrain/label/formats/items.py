"""Items of the queue as files hold them, and what all file formats have in common."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from posttrain.label.answer_kinds import KINDS
from posttrain.label.formats.files import FileRecord
from posttrain.store.errors import UserError

TEXT_KEYS = ("text", "prompt", "question", "content", "message", "instruction", "body")
"""Names under which tools and people keep the text to label, best first."""

ANSWER_COLUMNS = ("note", "seconds", "suggestion", "confidence", "guideline")
"""Columns of `label_answers` in the details of an answer, next to ``created_at``."""

_LONGEST_LABEL = 80


@dataclass(frozen=True)
class PortableAnswer:
    """An annotator's answer, skip or flag.

    Attributes:
        annotator: Name.
        details: Columns of `label_answers` that the others leave out, without NULL; times in UTC and ISO format.
    """

    annotator: str
    answer: Any = None
    status: str = "answered"
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PortableItem:
    """An item of the queue with its answers.

    Attributes:
        record: Id of its record; None where the file has none.
        content: As in `posttrain.label.answer_kinds.Question`.
        suggestion: ``answer``, ``confidence`` and ``annotator`` of a model's answer; None for none.
        expected: The right answer of a gold item; None for the others.
        details: Columns of `label_items` that the others leave out, without NULL.
        positions: The unit that a file states for the positions of spans; None if it does not, or for code points.
    """

    record: str | None
    content: Mapping[str, Any]
    suggestion: Mapping[str, Any] | None = None
    expected: Any = None
    answers: tuple[PortableAnswer, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    positions: str | None = None


@dataclass(frozen=True)
class Shape:
    """The kind and the labels of the answers in a file.

    Attributes:
        kind: One of `posttrain.label.answer_kinds.KINDS`.
        labels: The closed label set; None for open-ended answers.
        question: The tool's name for the question that is answered; None: ours.
        annotator: Who answered, in a file that does not say so.
        field: The name of the text to label; None: one of `TEXT_KEYS`.
    """

    kind: str
    labels: tuple[str, ...] | None = None
    question: str | None = None
    annotator: str = "import"
    field: str | None = None


class Survey:
    """Collects what a file asks, to decide on the kind of its answers before they are read.

    Attributes:
        batch: ``kind`` and ``labels`` of the batch, in a file that states them.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Counter[str]] = {}
        self._labels: dict[str, dict[str, None]] = {}
        self._has_texts: set[str] = set()
        self.batch: Mapping[str, Any] = {}

    def add(self, question: str, kind: str, labels: Sequence[str] = ()) -> None:
        """Notes an answer to a question; ``label or text`` is a kind that `shape` decides on."""
        self._kinds.setdefault(question, Counter())[kind] += 1
        self._labels.setdefault(question, {}).update(dict.fromkeys(labels))
        if kind == "label or text" and (len(labels[0]) > _LONGEST_LABEL or "\n" in labels[0]):
            self._has_texts.add(question)

    def shape(
        self,
        kind: str | None,
        question: str | None,
        labels: tuple[str, ...] | None,
        annotator: str,
        field: str | None,
    ) -> Shape:
        """Decides on the kind, the label set and the question.

        Args:
            kind: The user's; None: the file's.
            question: The user's; None: that with the most answers.
            labels: The config's label set; used for one label per record, unless the file has none of them.
            annotator: Who answered, in a file that does not say so.
            field: The name of the text to label; None: one of `TEXT_KEYS`.

        Raises:
            UserError: the file does not ask the question, or says nothing that a kind can be seen from.
        """
        if question is not None and question not in self._kinds:
            known = ", ".join(self._kinds) or "none"
            raise UserError(f"the file has no answers to `{question}`", where="--question", fix=f"there are: {known}")
        if question is None and self._kinds:
            question = max(self._kinds, key=lambda name: self._kinds[name].total())
        kind = kind or self.batch.get("kind") or self._guess(question) or ("choice" if labels else None)
        if kind is None:
            raise UserError("the file has no answers to see their kind from", fix=f"--kind: {', '.join(KINDS)}")
        if kind not in KINDS:
            raise UserError(f"`{kind}` is not a kind of answers", where="--kind", fix=f"one of {', '.join(KINDS)}")
        return Shape(kind, self._label_set(kind, question, labels), question, annotator, field)

    def _guess(self, question: str | None) -> str | None:
        kinds = self._kinds.get(question or "", Counter())
        if not kinds:
            return None
        if "choices" in kinds and set(kinds) <= {"choice", "choices", "label or text"}:
            return "choices"
        if (top := kinds.most_common(1)[0][0]) != "label or text":
            return top
        # Labels are short and come again; answers in words are neither.
        few = len(self._labels[question or ""]) <= max(2, kinds.total() // 2)
        return "choice" if few and question not in self._has_texts else "text"

    def _label_set(self, kind: str, question: str | None, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if kind not in ("choice", "choices", "spans"):
            return None
        if "labels" in self.batch:
            stated = self.batch["labels"]
            return None if stated is None else tuple(stated)
        own = tuple(self._labels.get(question or "", ()))
        # The config's set is not that of another question, such as one about moods in a workspace of topics.
        return labels if labels and kind == "choice" and (not own or set(own) & set(labels)) else own or None


class Format(ABC):
    """A file format.

    Attributes:
        name: As in ``--format``.
    """

    name: ClassVar[str]

    @abstractmethod
    def records(self, path: Path, name: str) -> Iterator[FileRecord]:
        """Yields the records of a file, one in memory at a time.

        Raises:
            UserError: the file cannot be read.
        """

    @abstractmethod
    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        """Notes the questions and labels of a record."""

    @abstractmethod
    def read(self, record: Mapping[str, Any], shape: Shape, where: str, left_out: Counter[str]) -> PortableItem:
        """Reads a record.

        Args:
            record: A record of `records`.
            shape: The kind and the labels of its answers.
            where: The record's place in errors.
            left_out: Counts parts that have no meaning here, by name.

        Raises:
            UserError: the record is not one of this format.
        """

    @abstractmethod
    def write(self, file: IO[str], items: Iterable[PortableItem], shape: Shape) -> int:
        """Writes items to an open file; returns their number."""


def shown_text(content: Mapping[str, Any], *, last_turn: bool = False) -> str:
    """Returns the input as people read it: the text, a single user turn, or one paragraph a turn.

    Args:
        content: An item's content.
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
    return isinstance(prompt, list | tuple) and len(prompt) == 1 and prompt[0]["role"] == "user"


def user_prompt(text: str) -> list[dict[str, str]]:
    """Returns the prompt of one user turn."""
    return [{"role": "user", "content": text}]


def text_key(names: Sequence[str], shape: Shape, part: str, where: str) -> str:
    """Returns which of a record's texts is the one to label.

    Args:
        names: Names of its texts.
        shape: Names the text if the user does.
        part: The part of the record that they are in, for errors.
        where: The record's place, for errors.

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
