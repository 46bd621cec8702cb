"""The shapes in which people keep records, and one small converter for each."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.reading.dialogue import is_dialogue, preference_of_dialogues
from posttrain.data.reading.request_log import LOG_COLUMNS, logged
from posttrain.data.records.content import (
    SHAREGPT_ROLES,
    BadRecord,
    Content,
    after,
    answer_in,
    checked_prompt,
    common_start,
    conversation,
    prompt_in,
    text_in,
    turns_of,
)

__all__ = ["SHAPES", "TARGETS", "BadRecord", "Content", "Shape", "shape_of"]

TARGETS = ("prompt", "completion", "chosen", "rejected", "text", "messages", "conversations", "group")
"""What a column can be mapped to in the config."""


@dataclass(frozen=True)
class Shape:
    """A shape is known by the columns ``needs``; ``uses`` are all that it reads."""

    name: str
    needs: Collection[str]
    uses: Collection[str]
    convert: Callable[[Mapping[str, Any]], Content]


def shape_of(columns: Collection[str]) -> Shape | None:
    """The shape that a record with these columns has; None when it has none that we know."""
    return next((shape for shape in SHAPES if all(name in columns for name in shape.needs)), None)


def _stored(values: Mapping[str, Any]) -> Content:
    """A row of our own Parquet export."""
    prompt = None if values["prompt"] is None else turns_of(values["prompt"], "prompt")[0]
    if prompt is None:
        return _text(values)
    rejected = answer_in(values["rejected"], "rejected")
    return Content(checked_prompt(prompt), answer_in(values["completion"], "completion"), rejected)


def _messages(values: Mapping[str, Any]) -> Content:
    return conversation(*turns_of(values["messages"], "messages"))


def _sharegpt(values: Mapping[str, Any]) -> Content:
    return conversation(*turns_of(values["conversations"], "conversations", "from", "value", SHAREGPT_ROLES))


def _preference(values: Mapping[str, Any]) -> Content:
    """Answers are strings, or conversations that may repeat the prompt (TRL's implicit prompt)."""
    chosen, rejected = values["chosen"], values["rejected"]
    given = values.get("prompt")
    if given is None and is_dialogue(chosen) and is_dialogue(rejected):
        return preference_of_dialogues(chosen, rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        prompt = prompt_in(given)
        better, worse = answer_in(chosen, "chosen"), answer_in(rejected, "rejected")
    else:
        left, right = turns_of(chosen, "chosen")[0], turns_of(rejected, "rejected")[0]
        prompt = common_start(left, right) if given is None else prompt_in(given)
        better = answer_in(after(prompt, left), "chosen")
        worse = answer_in(after(prompt, right), "rejected")
    if better is None or worse is None:
        raise BadRecord("empty answer", f"`{'chosen' if better is None else 'rejected'}` is empty")
    return Content(checked_prompt(prompt), better, worse)


def _alpaca(values: Mapping[str, Any]) -> Content:
    instruction = text_in(values["instruction"], "instruction")
    context = "" if values.get("input") is None else text_in(values["input"], "input")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return Content(checked_prompt([{"role": "user", "content": prompt}]), answer_in(values.get("output"), "output"))


def _prompt_completion(values: Mapping[str, Any]) -> Content:
    return Content(checked_prompt(prompt_in(values["prompt"])), answer_in(values.get("completion"), "completion"))


def _text(values: Mapping[str, Any]) -> Content:
    text = text_in(values["text"], "text")
    if not text or text.isspace():
        raise BadRecord("empty text", "`text` is empty")
    return Content(text=text)


SHAPES = (
    Shape(
        "record",
        ("id", "input_id", "prompt", "completion", "rejected", "text"),
        ("id", "input_id", "prompt", "completion", "rejected", "text", "source", "line"),
        _stored,
    ),
    Shape("preference", ("chosen", "rejected"), ("prompt", "chosen", "rejected"), _preference),
    *(Shape("request log", ("messages", answer), LOG_COLUMNS, logged) for answer in ("choices", "error")),
    Shape("messages", ("messages",), ("messages",), _messages),
    Shape("ShareGPT", ("conversations",), ("conversations",), _sharegpt),
    Shape("Alpaca", ("instruction",), ("instruction", "input", "output"), _alpaca),
    Shape("prompt", ("prompt",), ("prompt", "completion"), _prompt_completion),
    Shape("text", ("text",), ("text",), _text),
    *(
        Shape("request log", (asked, answer), LOG_COLUMNS, logged)
        for asked in ("request", "body", "custom_id")
        for answer in ("response", "choices", "error")
    ),
    Shape("request log", ("custom_id", "body"), LOG_COLUMNS, logged),
)
