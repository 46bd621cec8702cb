"""Positions of spans: code points here, and the units that the labelling tools count in.

JavaScript tools count UTF-16 code units, so that a character above U+FFFF counts twice, and browsers may count a line
end CRLF once. A file rarely says which. Where its spans hold their words, the unit that gives these words is taken.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from posttrain.label.formats.items import PortableItem, shown_text
from posttrain.store.errors import UserError, shorten, suggest

CODE_POINTS, UTF_16 = "code-points", "utf-16"
UNITS = (CODE_POINTS, UTF_16, "code-points-lf", "utf-16-lf")
"""Units of positions, in the order in which they are tried; with ``-lf`` a line end CRLF counts once."""

_LINE_END = re.compile("\r\n|\r")


def check_unit(unit: str | None, kind: str) -> None:
    """Raises a UserError if this is not the name of a unit, or the answers are not of a kind with positions."""
    if unit is not None and kind != "spans":
        raise UserError(f"a {kind} has no positions", where="--positions", fix="leave it out")
    if unit is not None and unit not in UNITS:
        raise UserError(f"`{unit}` is not a unit of positions", where="--positions", fix=suggest(unit, UNITS))


class UnitChoice:
    """The units that the positions of a file may be in.

    Args:
        unit: The user's; None: the one that a record states, or that gives the words of the spans.

    Attributes:
        uncertain: Places of records whose spans mean other words in another unit, and that do not say which is right.
    """

    def __init__(self, unit: str | None) -> None:
        self.is_given = unit is not None
        self.units: Sequence[str] = UNITS if unit is None else (unit,)
        self.uncertain: list[str] = []

    def add(self, item: PortableItem) -> None:
        """Rules out the units that a record does not fit."""
        if not self.is_given and item.positions is None:
            # A record that fits none is reported when it is read. It does not decide on the others.
            self.units = [unit for unit in self.units if _read_item(item, unit) is not None] or self.units

    def read(self, item: PortableItem, where: str) -> PortableItem:
        """Returns an item of a file with positions in code points, and its spans without their words.

        Raises:
            UserError: a span is not within the text, or its words stand elsewhere.
        """
        stated = [item.positions] if item.positions in UNITS else []
        # Two tools may have written into one file, so a record may differ from the others.
        order = self.units if self.is_given else list(dict.fromkeys([*stated, *self.units, *UNITS]))
        results = {unit: _read_item(item, unit) for unit in order}
        result = next((each for each in results.values() if each is not None), None)
        if result is None:
            raise _misfit(item, order[0], where)
        if not stated and any(other not in (None, result) for other in map(results.get, self.units)):
            self.uncertain.append(where)
        return result


def write_positions(item: PortableItem, unit: str) -> PortableItem:
    """Returns an item for a file, with positions in a unit, and the words of each span beside them."""
    text = shown_text(item.content, last_turn=True)
    places = _places(text, unit)

    def write(spans: Any) -> Any:
        # A suggestion that an annotator has seen is kept as it was sent, and nobody has checked it.
        if not _are_spans(spans) or any(
            not 0 <= at < len(places) for span in spans for at in (span["start"], span["end"])
        ):
            return spans
        return [
            {
                **span,
                "start": places[span["start"]],
                "end": places[span["end"]],
                "text": text[span["start"] : span["end"]],
            }
            for span in spans
        ]

    return replace(_map_spans(item, write), positions=unit)


def move_positions(item: PortableItem, content: Mapping[str, Any], where: str) -> PortableItem:
    """Returns an item with positions in the text of a stored item, whose line ends may differ from the file's.

    Raises:
        UserError: the two texts differ in more than that.
    """
    text, stored = (shown_text(each, last_turn=True) for each in (item.content, content))
    if text == stored or not any(_span_lists(item)):
        return item
    is_same = _LINE_END.sub("\n", text).rstrip() == _LINE_END.sub("\n", stored).rstrip()
    unit = "code-points-lf"
    moved = _read_item(write_positions(item, unit), unit, stored) if is_same else None
    if moved is None:
        what = "the text is not that of the batch's record, so that positions in it mean other words"
        raise UserError(what, where=where, fix="export the batch again, or name another batch")
    return moved


def _places(text: str, unit: str) -> Sequence[int]:
    """Returns the position of each code point in a unit, and that of the text's end."""
    is_wide, is_lf = unit.startswith(UTF_16), unit.endswith("-lf")
    if not (is_wide and not text.isascii()) and not (is_lf and "\r\n" in text):
        return range(len(text) + 1)
    widths = [2 if is_wide and character > "\uffff" else 1 for character in text]
    if is_lf:
        for match in re.finditer("\r\n", text):
            widths[match.start()] = 0
    return list(accumulate(widths, initial=0))


def _read_item(item: PortableItem, unit: str, text: str | None = None) -> PortableItem | None:
    """Returns an item with positions in code points; None if they are not in this unit."""
    text = shown_text(item.content, last_turn=True) if text is None else text
    places = _places(text, unit)

    def read(spans: Any) -> Any:
        if not _are_spans(spans):
            # The check of the answers says what is wrong with them.
            return spans
        result = []
        for span in spans:
            start, end = (bisect_left(places, span[name]) for name in ("start", "end"))
            if any(at == len(places) or places[at] != span[name] for at, name in ((start, "start"), (end, "end"))):
                raise ValueError
            if (quoted := _quoted_text(span)) is not None and not _is_same(quoted, text[start:end]):
                raise ValueError
            result.append({**_without_text(span), "start": start, "end": end})
        return result

    try:
        return replace(_map_spans(item, read), positions=None)
    except ValueError:
        return None


def _misfit(item: PortableItem, unit: str, where: str) -> UserError:
    """Describes the first span that does not fit the text."""
    text = shown_text(item.content, last_turn=True)
    places = _places(text, unit)
    for spans in _span_lists(item):
        for span in spans:
            start, end, quoted = span["start"], span["end"], _quoted_text(span)
            subject = f"the span from {start} to {end}"
            if not 0 <= start <= end <= places[-1]:
                return UserError(f"{subject} is not within the {places[-1]} characters of the text", where=where)
            there = text[bisect_left(places, start) : bisect_left(places, end)]
            if quoted is not None and not _is_same(quoted, there):
                what = f"{subject} is `{shorten(quoted)}` in the file, and the text has `{shorten(there)}` there"
                return UserError(what, where=where, fix="correct the positions, or remove the words of the span")
    return UserError("a span begins or ends within a character", where=where, fix=f"--positions: {', '.join(UNITS)}")


def _map_spans(item: PortableItem, change: Callable[[Any], Any]) -> PortableItem:
    """Returns an item with all its spans changed: of answers, suggestions, the right answer and the decision."""

    def inside(holder: Any) -> Any:
        has_answer = isinstance(holder, Mapping) and holder.get("answer") is not None
        return {**holder, "answer": change(holder["answer"])} if has_answer else holder

    def details(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: inside(value) if key in ("suggestion", "resolution") else value for key, value in values.items()}

    answers = tuple(
        replace(each, answer=None if each.answer is None else change(each.answer), details=details(each.details))
        for each in item.answers
    )
    expected = None if item.expected is None else change(item.expected)
    rest = {"suggestion": inside(item.suggestion), "details": details(item.details)}
    return replace(item, answers=answers, expected=expected, **rest)


def _span_lists(item: PortableItem) -> Iterable[Sequence[Mapping[str, Any]]]:
    """Returns the lists of spans in an item that have the right form."""
    lists: list[Any] = []
    _map_spans(item, lists.append)
    return [spans for spans in lists if _are_spans(spans)]


def _are_spans(spans: Any) -> bool:
    return isinstance(spans, list) and all(
        isinstance(span, Mapping) and type(span.get("start")) is int and type(span.get("end")) is int for span in spans
    )


def _quoted_text(span: Mapping[str, Any]) -> str | None:
    """Returns the text that a file gives for a span; None if it gives none."""
    text = span.get("text")
    return text if isinstance(text, str) and text else None


def _without_text(span: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in span.items() if name != "text"}


def _is_same(quoted: str, text: str) -> bool:
    """Returns True if a file quotes this text; Label Studio writes a line end as a backslash and an `n`."""
    given = _LINE_END.sub("\n", quoted)
    return _LINE_END.sub("\n", text) in (given, given.replace("\\n", "\n")) or re.sub("[\r\n]", r"\\n", text) == quoted
