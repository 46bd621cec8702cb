"""Checks the items of a file before they are stored, as anybody may have edited it."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from posttrain.label.answer_kinds import KINDS, Question
from posttrain.label.formats.items import PortableAnswer, PortableItem, Shape
from posttrain.label.queue_rows import check_confidence
from posttrain.store.errors import UserError, shorten
from posttrain.store.hashing import digest
from posttrain.store.rows import ANSWER_STATUSES, ITEM_STATUSES

_LONGEST = {"annotator": 80, "record": 100}


def checked_item(item: PortableItem, shape: Shape, where: str) -> PortableItem:
    """Returns an item with answers as they are stored.

    Raises:
        UserError: an answer or a name does not fit.
    """
    _check_types(item, where)
    kind, question = KINDS[shape.kind], Question(item.content, shape.labels)
    candidates = len(item.content.get("candidates") or ())
    if (shape.kind == "preference" and candidates != 2) or (shape.kind == "ranking" and candidates < 2):
        raise UserError(
            f"{candidates} candidates, where a {shape.kind} compares {2 if candidates else 'some'}", where=where
        )
    if shape.kind in ("rewrite", "rating") and not item.content.get("answer"):
        raise UserError(f"no `answer` for a {shape.kind}", where=where)
    try:
        answers = tuple(
            replace(each, answer=kind.check(each.answer, question)) if each.status == "answered" else each
            for each in item.answers
        )
        expected = None if item.expected is None else kind.check(item.expected, question)
        for each in item.answers:
            check_confidence(each.details.get("confidence"))
        if item.suggestion is not None:
            kind.check(item.suggestion["answer"], question)
            check_confidence(item.suggestion.get("confidence"))
    except UserError as error:
        raise UserError(error.what, where=where, fix=error.fix) from None
    # Equal inputs have equal ids, so that the same file imported again finds its items.
    record = item.record or digest([item.content.get(name) for name in ("prompt", "text", "candidates")])[:24]
    for name, value in (("record", record), *(("annotator", answer.annotator) for answer in answers)):
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST[name]:
            what = f"the {name} `{shorten(str(value))}` must have 1 to {_LONGEST[name]} characters"
            raise UserError(what, where=where)
    names = [answer.annotator for answer in answers]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"`{shorten(repeated)}` answers the item twice", where=where)
    return replace(item, record=record, answers=answers, expected=expected)


def _check_types(item: PortableItem, where: str) -> None:
    content, details = item.content, item.details
    checks = {
        "content": _is_content(content),
        "suggestion": item.suggestion is None or (isinstance(item.suggestion, Mapping) and "answer" in item.suggestion),
        "priority": _is_number(details.get("priority", 0)),
        "reason": isinstance(details.get("reason", ""), str),
        "checked": isinstance(details.get("checked", False), bool),
        "status": "status" not in details
        or (details["status"] in ITEM_STATUSES and type(details.get("wanted")) is int and details["wanted"] >= 0),
        "resolution": _is_resolution(details.get("resolution"), details.get("status")),
        "answers": all(_is_answer(answer) for answer in item.answers),
    }
    if wrong := next((name for name, fits in checks.items() if not fits), None):
        raise UserError(f"`{wrong}` is not of the right form", where=where, fix="correct or remove it")


def _is_content(content: Any) -> bool:
    texts = [content.get(name, "") for name in ("text", "answer")]
    turns, candidates = content.get("prompt", []), content.get("candidates", [])
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return False
    texts += [turn.get(name) for turn in turns for name in ("role", "content")]
    if not isinstance(candidates, list) or not isinstance(content.get("meta", {}), Mapping):
        return False
    return bool(turns or "text" in content) and all(isinstance(text, str) for text in [*texts, *candidates])


def _is_resolution(resolution: Any, status: Any) -> bool:
    if resolution is None:
        return bool(status != "done")
    return (
        isinstance(resolution, Mapping)
        and {"answer", "how", "by"} <= set(resolution)
        and isinstance(resolution["by"], list)
        and all(isinstance(name, str) for name in resolution["by"])
    )


def _is_answer(answer: PortableAnswer) -> bool:
    details = answer.details
    if not isinstance(details, Mapping) or answer.status not in ANSWER_STATUSES:
        return False
    try:
        datetime.fromisoformat(details.get("created_at", "2000-01-01"))
    except (ValueError, TypeError):
        return False
    return (
        isinstance(answer.annotator, str)
        and isinstance(details.get("note", ""), str)
        and _is_number(details.get("seconds", 0))
        and type(details.get("guideline", 0)) is int
        and isinstance(details.get("suggestion", {}), Mapping)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and bool(value >= -1e300)
