"""The kinds of answers that people give, how each is checked, and the training records that it becomes.

A new kind is one class in this file: give it a ``name``, `AnswerKind.check` and `AnswerKind.records`, and list it in
`KINDS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.models.answer_form import ChoicesForm, SpansForm
from posttrain.models.task import labelled_text
from posttrain.store.errors import UserError, shorten, suggest
from posttrain.store.hashing import canonical_json

_LONGEST = 100_000  # characters of an answer

_RATINGS = 5

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Question:
    """The part of an item that an answer is checked against.

    Attributes:
        content: What is shown: ``prompt`` (turns) or ``text``, ``candidates`` (answers to compare), ``answer`` (the
            model's answer, to rewrite or to rate), ``meta``.
        labels: The closed label set; None for open-ended answers.
    """

    content: Mapping[str, Any]
    labels: Sequence[str] | None


class AnswerKind(ABC):
    """A kind of answers.

    Attributes:
        name: As in `label_batches.kind`.
        votes: True if a majority of equal answers is an answer: free texts are rarely equal, and one more does not
            decide between two.
    """

    name: ClassVar[str]
    votes: ClassVar[bool] = True

    @abstractmethod
    def check(self, answer: Any, item: Question) -> Any:
        """Returns the answer as it is stored; equal answers are equal values.

        Raises:
            UserError: the answer does not fit the item.
        """

    @abstractmethod
    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        """Returns the training records of an answer that `check` has returned, as columns of a record.

        ``prompt``, ``text``, ``completion`` and ``rejected`` as in `posttrain.data.records.record`; other columns, such
        as ``label``, which is true for an answer that KTO shall make likelier, go to its ``meta``. No record: the
        answer says nothing to learn, such as a tie.
        """

    def key(self, answer: Any) -> str:
        """Returns an answer as text: equal texts are equal answers."""
        return canonical_json(answer).decode()

    def parse(self, text: str, item: Question) -> Any:
        """Returns the answer that a text states, such as a cell of a CSV file or what a model wrote.

        Raises:
            UserError: the text does not fit the item.
        """
        return text

    def others(self, answer: Any, labels: Sequence[str]) -> list[Any]:
        """Returns answers that differ from this one, for wrong suggestions; none where they cannot be made up."""
        return []


class Choice(AnswerKind):
    """One label of the closed set."""

    name = "choice"

    def check(self, answer: Any, item: Question) -> Any:
        return _label(answer, item.labels)

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        return [_input(item) | {"completion": answer}]

    def key(self, answer: Any) -> str:
        return str(answer)

    def others(self, answer: Any, labels: Sequence[str]) -> list[Any]:
        return [label for label in labels if label != answer]


class Choices(AnswerKind):
    """Several labels of the closed set, or none; `ChoicesForm` says how the record's answer has them."""

    name = "choices"

    def check(self, answer: Any, item: Question) -> Any:
        labels = [_label(label, item.labels) for label in _list(answer, "a list of labels")]
        if len(set(labels)) < len(labels):
            raise UserError("a label is given twice", fix="give each label once")
        return sorted(labels, key=list(item.labels or labels).index)

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        parts = [(label, "") for label in answer]
        return [_input(item) | {"completion": ChoicesForm(item.labels).write(parts, _shown_text(item))}]

    def parse(self, text: str, item: Question) -> Any:
        return [label for label, _ in ChoicesForm(item.labels).checked_parts(text, _shown_text(item))]

    def others(self, answer: Any, labels: Sequence[str]) -> list[Any]:
        return [[label] for label in labels if [label] != answer]


class FreeText(AnswerKind):
    """An answer in the annotator's words."""

    name = "text"
    votes = False

    def check(self, answer: Any, item: Question) -> Any:
        return _text(answer, "an answer")

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        return [_input(item) | {"completion": answer}]


class Spans(AnswerKind):
    """Marked parts of the text, in code points: ``[{"start": 0, "end": 4, "label": "name"}]``, the end excluded."""

    name = "spans"

    def check(self, answer: Any, item: Question) -> Any:
        length = len(_shown_text(item))
        spans = []
        for span in _list(answer, "a list of spans"):
            _object(span, {"start", "end", "label"}, "a span")
            start, end = (_integer(span[name], name) for name in ("start", "end"))
            if not 0 <= start < end <= length:
                raise UserError(f"the span from {start} to {end} is not within the {length} characters of the text")
            spans.append({"start": start, "end": end, "label": _label(span["label"], item.labels)})
        spans.sort(key=lambda span: (span["start"], span["end"], span["label"]))
        if any(span in spans[:row] for row, span in enumerate(spans)):
            raise UserError("a span is given twice", fix="give each span once")
        return spans

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        text = _shown_text(item)
        parts = [(span["label"], text[span["start"] : span["end"]]) for span in answer]
        return [_input(item) | {"completion": SpansForm(item.labels).write(parts, text), "spans": answer}]

    def parse(self, text: str, item: Question) -> Any:
        form, shown = SpansForm(item.labels), _shown_text(item)
        return form.spans(form.checked_parts(text, shown), shown)

    def others(self, answer: Any, labels: Sequence[str]) -> list[Any]:
        return [answer[:-1]] if answer else []


class Rewrite(AnswerKind):
    """The model's answer, rewritten: the new one is better than the old one."""

    name = "rewrite"
    votes = False

    def check(self, answer: Any, item: Question) -> Any:
        return _text(answer, "an answer")

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        before = item.content.get("answer")
        # Left as it was, it is a good answer, and no pair.
        worse = {"rejected": before} if before not in (None, "", answer) else {}
        return [_input(item) | {"completion": answer} | worse]


class Rating(AnswerKind):
    """A mark from 1 to 5 for the model's answer; KTO learns from those that are not in the middle.

    Without an answer of a model it is one for the text, and is the record's answer.
    """

    name = "rating"

    def check(self, answer: Any, item: Question) -> Any:
        rating = _integer(answer, "a rating")
        if not 1 <= rating <= _RATINGS:
            raise UserError(f"{rating} is not a rating", fix=f"give a number from 1 to {_RATINGS}")
        return rating

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        middle = (_RATINGS + 1) / 2
        if not item.content.get("answer"):
            return [_input(item) | {"completion": str(answer)}]
        if answer == middle:
            return []
        return [_input(item) | {"completion": item.content["answer"], "label": answer > middle, "rating": answer}]


class Preference(AnswerKind):
    """The better one of two candidates, as its index; ``"tie"``: neither."""

    name = "preference"
    texts: ClassVar[Mapping[str, int | str]] = {"a": 0, "b": 1, "tie": "tie"}
    """The answers as a CSV file has them."""

    def check(self, answer: Any, item: Question) -> Any:
        if answer == "tie":
            return answer
        if _integer(answer, "a preference") not in (0, 1):
            raise UserError(f"{answer} is not a preference", fix='give 0, 1 or "tie"')
        return answer

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        if answer == "tie":
            return []
        candidates = _candidates(item)
        return _pairs(item, [candidates[answer], candidates[1 - answer]])

    def parse(self, text: str, item: Question) -> Any:
        return self.texts[text]


class Ranking(AnswerKind):
    """All candidates as their indexes, the best first."""

    name = "ranking"

    def check(self, answer: Any, item: Question) -> Any:
        ranks = [_integer(rank, "a rank") for rank in _list(answer, "a list of candidates")]
        if sorted(ranks) != list(range(len(_candidates(item)))):
            raise UserError("a ranking names each candidate once", fix=f"order 0 to {len(_candidates(item)) - 1}")
        return ranks

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        candidates = _candidates(item)
        return _pairs(item, [candidates[rank] for rank in answer])


class Conversation(AnswerKind):
    """Turns that continue the item's prompt, the last one the assistant's."""

    name = "conversation"
    votes = False

    def check(self, answer: Any, item: Question) -> Any:
        turns = []
        for turn in _list(answer, "a list of turns"):
            _object(turn, {"role", "content"}, "a turn")
            if turn["role"] not in _ROLES:
                raise UserError(f"`{shorten(str(turn['role']))}` is not a role", fix=f"one of {', '.join(_ROLES)}")
            turns.append({"role": turn["role"], "content": _text(turn["content"], "a turn")})
        if not turns or turns[-1]["role"] != "assistant":
            raise UserError("the last turn must be the assistant's")
        return turns

    def records(self, answer: Any, item: Question) -> list[dict[str, Any]]:
        # Each of the assistant's turns is an answer to all that comes before it.
        before = list(item.content.get("prompt") or [])
        records = []
        for turn in answer:
            if turn["role"] == "assistant" and before:
                records.append({"prompt": list(before), "completion": turn["content"]})
            before.append(turn)
        return records


KINDS: dict[str, AnswerKind] = {
    kind.name: kind
    for kind in (
        *(Choice(), Choices(), FreeText(), Spans(), Rewrite()),
        *(Rating(), Preference(), Ranking(), Conversation()),
    )
}
"""Every kind of answers by its name."""


def answer_kind(name: str) -> AnswerKind:
    """Returns the kind of answers.

    Raises:
        UserError: there is no such kind.
    """
    if name not in KINDS:
        raise UserError(f"`{shorten(name)}` is not a kind of answers", fix=f"one of {', '.join(KINDS)}")
    return KINDS[name]


def _input(item: Question) -> dict[str, Any]:
    return {name: item.content[name] for name in ("prompt", "text") if item.content.get(name) is not None}


def _shown_text(item: Question) -> str:
    """Returns the text that spans are parts of: the plain text, or the last turn."""
    return labelled_text(item.content.get("prompt"), item.content.get("text"))


def _candidates(item: Question) -> Sequence[str]:
    candidates: Sequence[str] = item.content.get("candidates") or ()
    if len(candidates) < 2:
        raise UserError("the item has no candidates to compare")
    return candidates


def _pairs(item: Question, best_first: Sequence[str]) -> list[dict[str, Any]]:
    return [
        _input(item) | {"completion": better, "rejected": worse}
        for row, better in enumerate(best_first)
        for worse in best_first[row + 1 :]
        if better != worse
    ]


def _label(answer: Any, labels: Sequence[str] | None) -> str:
    if not isinstance(answer, str):
        raise UserError(f"{shorten(str(answer))} is not a label", fix="give a label as text")
    if labels is not None and answer not in labels:
        raise UserError(f"label `{shorten(answer)}` is not in the label set", fix=suggest(answer, labels))
    return answer


def _text(answer: Any, name: str) -> str:
    if not isinstance(answer, str) or not answer.strip():
        raise UserError(f"{name} is a text that is not empty")
    if len(answer) > _LONGEST:
        raise UserError(f"{name} has {len(answer):,} characters", fix=f"at most {_LONGEST:,}")
    # PostgreSQL's JSON holds neither, and no file of text does.
    if "\x00" in answer or any("\ud800" <= character <= "\udfff" for character in answer):
        raise UserError(f"{name} holds a character that is not text", fix="remove it")
    return answer


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} is a whole number, not {shorten(str(value))}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise UserError(f"the answer is {name}, not {shorten(str(value))}")
    if len(value) > 1000:
        raise UserError(f"the answer has {len(value):,} parts", fix="at most 1,000")
    return list(value)


def _object(value: Any, keys: set[str], name: str) -> None:
    if not isinstance(value, Mapping) or set(value) != keys:
        raise UserError(f"{name} has the keys {', '.join(sorted(keys))}")
