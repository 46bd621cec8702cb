"""Answers with several parts: the one text that a model learns to write, and the parts that a text states."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.store.errors import UserError, shorten, suggest
from posttrain.store.text_files import normalise_text

NONE = "none"
"""The text of an answer without a label."""

_SEPARATOR = "; "

Part = tuple[str, str]
"""A label, and the words that it marks; "" for a label of the whole record."""


@dataclass(frozen=True)
class AnswerForm(ABC):
    """The form of answers with several parts.

    Attributes:
        labels: The labels that parts may have; None for any.
        kind: As in `posttrain.label.answer_kinds.KINDS`, and in ``task.kind``.
    """

    labels: Sequence[str] | None
    kind: ClassVar[str]

    @property
    @abstractmethod
    def instruction(self) -> str:
        """Tells the model which labels there are, and how to write its answer."""

    @abstractmethod
    def parts(self, answer: str, text: str) -> tuple[list[Part], list[UserError]]:
        """Returns the parts of an answer, each once, and a problem for each that cannot be used.

        Args:
            answer: What a model or a person wrote, or the JSON of a file.
            text: The text that is labelled.
        """

    @abstractmethod
    def write(self, parts: Iterable[Part], text: str) -> str:
        """Returns the one text of these parts."""

    @abstractmethod
    def labels_of(self, answer: str) -> list[str]:
        """Returns the labels in a text of `write`."""

    def read(self, answer: str, text: str) -> str:
        """Returns the one text of an answer.

        Raises:
            UserError: a part of it cannot be used.
        """
        return self.write(self.checked_parts(answer, text), text)

    def checked_parts(self, answer: str, text: str) -> list[Part]:
        """Returns the parts of an answer; raises a UserError if one of them cannot be used."""
        parts, problems = self.parts(answer, text)
        if problems:
            raise problems[0]
        return parts

    def _label(self, name: str) -> str:
        """Returns a label as the label set spells it."""
        if self.labels is None or name in self.labels:
            return name
        spelled = {normalise_text(label): label for label in self.labels}
        if normalise_text(name) not in spelled:
            fix = suggest(name[:100], self.labels)
            raise UserError(f"label `{shorten(name)}` is not in the label set", fix=fix)
        return spelled[normalise_text(name)]


@dataclass(frozen=True)
class ChoicesForm(AnswerForm):
    """Several labels, or none: ``card; cash`` in the order of the label set, or ``none``.

    A list in JSON is read too, and commas or lines separate labels unless a label holds a comma.
    """

    kind = "choices"

    @property
    def instruction(self) -> str:
        names = _SEPARATOR.join(self.labels or ())
        return f"Which of these labels apply: {names}? Write them separated by `{_SEPARATOR.strip()}`, or `{NONE}`."

    def parts(self, answer: str, text: str) -> tuple[list[Part], list[UserError]]:
        names = _json(answer)
        if not isinstance(names, list):
            commas = self.labels is not None and not any("," in label for label in self.labels)
            separated = answer.replace("\n", ";").replace("," if commas else ";", ";")
            names = [name.strip() for name in separated.split(";") if name.strip()]
            if not names:
                return [], [UserError("the answer is empty", fix=f"write `{NONE}` where no label applies")]
            names = [] if [name.casefold() for name in names] == [NONE] else names
        parts, problems = [], []
        for name in names:
            try:
                parts.append((self._label(name if isinstance(name, str) else json.dumps(name)), ""))
            except UserError as error:
                problems.append(error)
        return list(dict.fromkeys(parts)), problems

    def write(self, parts: Iterable[Part], text: str) -> str:
        names = {label for label, _ in parts}
        return _SEPARATOR.join(sorted(names, key=list(self.labels or sorted(names)).index)) or NONE

    def labels_of(self, answer: str) -> list[str]:
        return [] if answer == NONE else answer.split(_SEPARATOR)


@dataclass(frozen=True)
class SpansForm(AnswerForm):
    """Marked parts of the text: ``[{"label": "name", "text": "Dana Kim"}]``, in the order of their positions.

    A model reads and writes words, and counts characters badly. Words that stand in the text several times mean the
    first place after the span before. Files may give positions instead of words: ``{"start": 0, "end": 4, "label":
    "name"}`` or ``[0, 4, "name"]``, in code points, the end excluded.
    """

    kind = "spans"

    @property
    def instruction(self) -> str:
        return (
            f"Which parts of the text have one of these labels: {_SEPARATOR.join(self.labels or ())}? "
            'Write a list such as [{"label": "...", "text": "..."}], with words as they stand in the text.'
        )

    def parts(self, answer: str, text: str) -> tuple[list[Part], list[UserError]]:
        values, problems = _json(answer), []
        if not isinstance(values, list):
            what = f"`{shorten(answer)}` is not a list of spans"
            problems.append(UserError(what, fix='write [{"label": "...", "text": "..."}], or [] for none'))
            # What a model wrote before its answer was cut off.
            values = _json(f"{answer.rpartition('}')[0]}}}]") or []
        counts: Counter[Part] = Counter()
        parts = []
        for value in values:
            try:
                part = self._part(value, text)
                if counts[part] and counts[part] >= text.count(part[1]):
                    raise UserError(f"the span `{shorten(part[1])}` is given twice", fix="give each span once")
                counts[part] += 1
                parts.append(part)
            except UserError as error:
                problems.append(error)
        return parts, problems

    def write(self, parts: Iterable[Part], text: str) -> str:
        spans = self.spans(parts, text)
        marked = [{"label": span["label"], "text": text[span["start"] : span["end"]]} for span in spans]
        return json.dumps(marked, ensure_ascii=False)

    def labels_of(self, answer: str) -> list[str]:
        return [span["label"] for span in json.loads(answer)]

    def spans(self, parts: Iterable[Part], text: str) -> list[dict[str, Any]]:
        """Returns the positions of parts, in order: ``[{"start": 0, "end": 4, "label": "name"}]``."""
        parts = list(parts)
        starts = _starts_in_order(parts, text) or _starts_by_mention(parts, text)
        spans = [
            {"start": start, "end": start + len(quote), "label": label}
            for (label, quote), start in zip(parts, starts, strict=True)
        ]
        return sorted(spans, key=lambda span: (span["start"], span["end"], span["label"]))

    def _part(self, value: Any, text: str) -> Part:
        if isinstance(value, list) and len(value) == 3:
            value = dict(zip(("start", "end", "label"), value, strict=True))
        if not isinstance(value, Mapping) or not isinstance(value.get("label"), str):
            raise UserError(f"`{shorten(json.dumps(value, ensure_ascii=False))}` is not a span with a label")
        quote, label = value.get("text"), self._label(value["label"])
        start, end = value.get("start"), value.get("end")
        if type(start) is int and type(end) is int:
            if not 0 <= start < end <= len(text):
                what = f"the span from {start} to {end} is not within the {len(text)} characters of the text"
                raise UserError(what)
            if quote not in (None, text[start:end]):
                raise UserError(f"the span from {start} to {end} is `{shorten(text[start:end])}`, not `{quote}`")
            quote = text[start:end]
        if not isinstance(quote, str) or not quote:
            raise UserError(f"a span of `{label}` has no words", fix='write {"label": "...", "text": "..."}')
        if quote not in text:
            raise UserError(f"`{shorten(quote)}` is not in the text", fix="quote the words as they stand there")
        return label, quote


def check_labels(labels: Sequence[str]) -> None:
    """Raises a UserError for labels that answers with several labels cannot hold."""
    for label in labels:
        if ";" in label or "\n" in label:
            what = f"label `{shorten(label)}` holds the sign that separates several labels"
            raise UserError(what, where="task.labels", fix="write it without `;` and line breaks")
        if label.strip().casefold() == NONE:
            what = f"`{label}` is the answer without a label, and not a label"
            raise UserError(what, where="task.labels", fix="remove it, or give it another name")


FORMS: dict[str, type[AnswerForm]] = {form.kind: form for form in (ChoicesForm, SpansForm)}
"""The forms by their kind of answers."""


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None


def _starts_in_order(parts: Sequence[Part], text: str) -> list[int]:
    """Returns where each part begins, none before the part that it follows; empty if the parts are in another order."""
    starts: list[int] = []
    last: dict[str, int] = {}
    for _, quote in parts:
        at = starts[-1] if starts else 0
        start = text.find(quote, max(at, last.get(quote, -1) + 1))
        # Another label may mark the same words.
        start = last[quote] if start < 0 and last.get(quote, -1) >= at else start
        if start < 0:
            return []
        last[quote] = start
        starts.append(start)
    return starts


def _starts_by_mention(parts: Sequence[Part], text: str) -> list[int]:
    """Returns where each part begins: at the first place of its words, and at the next one where they come again."""
    last: dict[str, int] = {}
    starts = []
    for _, quote in parts:
        start = text.find(quote, last.get(quote, -1) + 1)
        last[quote] = last[quote] if start < 0 else start
        starts.append(last[quote])
    return starts
