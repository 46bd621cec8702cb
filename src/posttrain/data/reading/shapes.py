"""Recognises the shapes of records by their columns (messages, preference pairs, Alpaca, ...) and converts each."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.reading.messages import (
    SHAREGPT_ROLES,
    Content,
    InvalidRecord,
    check_prompt,
    common_prefix,
    is_dialogue,
    parse_answer,
    parse_dialogue_pair,
    parse_prompt,
    parse_text,
    parse_turns,
    split_conversation,
    without_prefix,
)
from posttrain.data.reading.request_log import LOG_COLUMNS, parse_request_log

__all__ = ["SHAPES", "TARGETS", "Content", "InvalidRecord", "Shape", "shape_of"]

TARGETS = ("prompt", "completion", "chosen", "rejected", "text", "messages", "conversations", "group")
"""The names to which the config can map a column."""


@dataclass(frozen=True)
class Shape:
    """A shape of records: recognised by the columns ``needs``, reading the columns ``uses``."""

    name: str
    needs: Collection[str]
    uses: Collection[str]
    convert: Callable[[Mapping[str, Any]], Content]


def shape_of(columns: Collection[str]) -> Shape | None:
    """Return the first shape that these columns satisfy, or None."""
    return next((shape for shape in SHAPES if all(name in columns for name in shape.needs)), None)


def _exported_record(values: Mapping[str, Any]) -> Content:
    """Convert a row of our own Parquet export."""
    prompt = None if values["prompt"] is None else parse_turns(values["prompt"], "prompt")[0]
    if prompt is None:
        return _text(values)
    rejected = parse_answer(values["rejected"], "rejected")
    return Content(check_prompt(prompt), parse_answer(values["completion"], "completion"), rejected)


def _messages(values: Mapping[str, Any]) -> Content:
    return split_conversation(*parse_turns(values["messages"], "messages"))


def _sharegpt(values: Mapping[str, Any]) -> Content:
    return split_conversation(*parse_turns(values["conversations"], "conversations", "from", "value", SHAREGPT_ROLES))


def _preference(values: Mapping[str, Any]) -> Content:
    """Convert a preference pair: strings, or conversations that may repeat the prompt (TRL's implicit prompt)."""
    chosen, rejected = values["chosen"], values["rejected"]
    given = values.get("prompt")
    if given is None and is_dialogue(chosen) and is_dialogue(rejected):
        return parse_dialogue_pair(chosen, rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        prompt = parse_prompt(given)
        better, worse = parse_answer(chosen, "chosen"), parse_answer(rejected, "rejected")
    else:
        left, right = parse_turns(chosen, "chosen")[0], parse_turns(rejected, "rejected")[0]
        prompt = common_prefix(left, right) if given is None else parse_prompt(given)
        better = parse_answer(without_prefix(prompt, left), "chosen")
        worse = parse_answer(without_prefix(prompt, right), "rejected")
    if better is None or worse is None:
        raise InvalidRecord("empty answer", f"`{'chosen' if better is None else 'rejected'}` is empty")
    return Content(check_prompt(prompt), better, worse)


def _alpaca(values: Mapping[str, Any]) -> Content:
    instruction = parse_text(values["instruction"], "instruction")
    context = "" if values.get("input") is None else parse_text(values["input"], "input")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return Content(check_prompt([{"role": "user", "content": prompt}]), parse_answer(values.get("output"), "output"))


def _prompt_completion(values: Mapping[str, Any]) -> Content:
    return Content(check_prompt(parse_prompt(values["prompt"])), parse_answer(values.get("completion"), "completion"))


def _text(values: Mapping[str, Any]) -> Content:
    text = parse_text(values["text"], "text")
    if not text or text.isspace():
        raise InvalidRecord("empty text", "`text` is empty")
    return Content(text=text)


SHAPES = (
    Shape(
        "record",
        ("id", "input_id", "prompt", "completion", "rejected", "text"),
        ("id", "input_id", "prompt", "completion", "rejected", "text", "source", "line"),
        _exported_record,
    ),
    Shape("preference", ("chosen", "rejected"), ("prompt", "chosen", "rejected"), _preference),
    *(Shape("request log", ("messages", answer), LOG_COLUMNS, parse_request_log) for answer in ("choices", "error")),
    Shape("messages", ("messages",), ("messages",), _messages),
    Shape("ShareGPT", ("conversations",), ("conversations",), _sharegpt),
    Shape("Alpaca", ("instruction",), ("instruction", "input", "output"), _alpaca),
    Shape("prompt", ("prompt",), ("prompt", "completion"), _prompt_completion),
    Shape("text", ("text",), ("text",), _text),
    *(
        Shape("request log", (asked, answer), LOG_COLUMNS, parse_request_log)
        for asked in ("request", "body", "custom_id")
        for answer in ("response", "choices", "error")
    ),
    Shape("request log", ("custom_id", "body"), LOG_COLUMNS, parse_request_log),
)
