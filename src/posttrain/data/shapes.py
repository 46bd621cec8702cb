"""The shapes in which people keep records, and one small converter for each."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.normalise import Turn
from posttrain.store.nearest import did_you_mean

TARGETS = ("prompt", "completion", "chosen", "rejected", "text", "messages", "conversations", "group")
"""What a column can be mapped to in the config."""

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


class BadRecord(Exception):
    """A record that does not fit its shape."""

    def __init__(self, kind: str, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix = kind, message, fix


@dataclass
class Content:
    """What a record says, in the terms of RECORD; ``extra``: what its turns said besides role and content."""

    prompt: list[Turn] | None = None
    completion: str | None = None
    rejected: str | None = None
    text: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


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
    prompt = None if values["prompt"] is None else _turns(values["prompt"], "prompt")[0]
    if prompt is None:
        return _text(values)
    rejected = _answer(values["rejected"], "rejected")
    return Content(_checked(prompt), _answer(values["completion"], "completion"), rejected)


def _messages(values: Mapping[str, Any]) -> Content:
    return _conversation(*_turns(values["messages"], "messages"))


def _sharegpt(values: Mapping[str, Any]) -> Content:
    return _conversation(*_turns(values["conversations"], "conversations", "from", "value", SHAREGPT_ROLES))


def _preference(values: Mapping[str, Any]) -> Content:
    """Answers are strings, or conversations that may repeat the prompt (TRL's implicit prompt)."""
    chosen, rejected = values["chosen"], values["rejected"]
    given = values.get("prompt")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        prompt = _prompt(given)
        better, worse = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    else:
        left, right = _turns(chosen, "chosen")[0], _turns(rejected, "rejected")[0]
        prompt = _common_start(left, right) if given is None else _prompt(given)
        better = _answer(_after(prompt, left), "chosen")
        worse = _answer(_after(prompt, right), "rejected")
    if better is None or worse is None:
        raise BadRecord("empty answer", f"`{'chosen' if better is None else 'rejected'}` is empty")
    return Content(_checked(prompt), better, worse)


def _alpaca(values: Mapping[str, Any]) -> Content:
    instruction = _string(values["instruction"], "instruction")
    context = "" if values.get("input") is None else _string(values["input"], "input")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return Content(_checked([{"role": "user", "content": prompt}]), _answer(values.get("output"), "output"))


def _prompt_completion(values: Mapping[str, Any]) -> Content:
    return Content(_checked(_prompt(values["prompt"])), _answer(values.get("completion"), "completion"))


def _text(values: Mapping[str, Any]) -> Content:
    text = _string(values["text"], "text")
    if not text.strip():
        raise BadRecord("empty text", "`text` is empty")
    return Content(text=text)


def _conversation(turns: list[Turn], extra: dict[str, Any]) -> Content:
    """The last turn is the answer when the assistant speaks it; earlier answers belong to the prompt."""
    if turns[-1]["role"] != "assistant":
        return Content(_checked(turns), extra=extra)
    return Content(_checked(turns[:-1]), _answer(turns[-1]["content"], "content"), extra=extra)


def _prompt(value: Any) -> list[Turn]:
    if isinstance(value, list):
        return _turns(value, "prompt")[0]
    return [{"role": "user", "content": _string(value, "prompt")}]


def _answer(value: Any, column: str) -> str | None:
    """An answer as text, from a string or from one assistant turn; None for an empty one."""
    if isinstance(value, list):
        turns = _turns(value, column)[0]
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise BadRecord("wrong role", f"`{column}` must be one assistant turn after the prompt")
        value = turns[0]["content"]
    if value is None:
        return None
    text = _string(value, column)
    return text if text.strip() else None


def _turns(
    value: Any,
    column: str,
    role_key: str = "role",
    text_key: str = "content",
    roles: Mapping[str, str] | None = None,
) -> tuple[list[Turn], dict[str, Any]]:
    """Turns with our role names, and what else they said (by the name ``turns``, one object a turn)."""
    names = roles or {role: role for role in ROLES}
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRecord("not turns", f"`{column}` must be a list of turns with `{role_key}` and `{text_key}`")
    turns: list[Turn] = []
    extras: list[dict[str, Any]] = []
    for number, turn in enumerate(value, 1):
        others = {key: said for key, said in turn.items() if key not in (role_key, text_key) and said is not None}
        if called := next((key for key in ("tool_calls", "function_call") if others.get(key)), None):
            raise BadRecord("tool calls", f"turn {number} of `{column}` has `{called}`, which records cannot hold")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in names:
            fix = did_you_mean(role, names) if isinstance(role, str) else f"use one of {', '.join(names)}"
            raise BadRecord("wrong role", f"turn {number} of `{column}` has the role `{role}`", fix)
        turns.append({"role": names[role], "content": _string(turn.get(text_key), f"{column}.{text_key}")})
        extras.append(others)
    return turns, {"turns": extras} if any(extras) else {}


def _checked(prompt: list[Turn]) -> list[Turn]:
    """``prompt`` if an assistant could answer it."""
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise BadRecord("wrong role", "no user turn stands before the answer")
    if any(turn["role"] == "system" for turn in prompt[1:]):
        raise BadRecord("wrong role", "a system turn can only be the first")
    if any(not turn["content"].strip() for turn in prompt if turn["role"] != "system"):
        raise BadRecord("empty prompt", "the prompt is empty" if len(prompt) == 1 else "a turn of the prompt is empty")
    return prompt


def _string(value: Any, column: str) -> str:
    if value is None:
        raise BadRecord("not text", f"`{column}` is missing or null")
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)
        raise BadRecord("not text", f"`{column}` is not text but {type(value).__name__} {shown[:40]}")
    return value


def _common_start(left: list[Turn], right: list[Turn]) -> list[Turn]:
    same = 0
    while same < min(len(left), len(right)) - 1 and left[same] == right[same]:
        same += 1
    return left[:same]


def _after(prompt: list[Turn], turns: list[Turn]) -> list[Turn]:
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns


SHAPES = (
    Shape(
        "record",
        ("id", "input_id", "prompt", "completion", "rejected", "text"),
        ("id", "input_id", "prompt", "completion", "rejected", "text", "source", "line"),
        _stored,
    ),
    Shape("preference", ("chosen", "rejected"), ("prompt", "chosen", "rejected"), _preference),
    Shape("messages", ("messages",), ("messages",), _messages),
    Shape("ShareGPT", ("conversations",), ("conversations",), _sharegpt),
    Shape("Alpaca", ("instruction",), ("instruction", "input", "output"), _alpaca),
    Shape("prompt", ("prompt",), ("prompt", "completion"), _prompt_completion),
    Shape("text", ("text",), ("text",), _text),
)
