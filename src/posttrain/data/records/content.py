"""What a record says, and the turns that it is made of."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.reading.problem import listed, shortened
from posttrain.data.records.normalise import Turn
from posttrain.store.nearest import did_you_mean

ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


class BadRecord(Exception):
    """A record that does not fit its shape.

    Attributes:
        blocking: whether the file is refused for it; see :class:`posttrain.data.reading.problem.Problem`.
    """

    def __init__(self, kind: str, message: str, fix: str | None = None, *, blocking: bool = True) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix, self.blocking = kind, message, fix, blocking


@dataclass(slots=True)
class Content:
    """What a record says, in the terms of RECORD; ``extra``: what its turns said besides role and content."""

    prompt: list[Turn] | None = None
    completion: str | None = None
    rejected: str | None = None
    text: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def conversation(turns: list[Turn], extra: dict[str, Any]) -> Content:
    """The last turn is the answer when the assistant speaks it; earlier answers belong to the prompt."""
    if turns[-1]["role"] != "assistant":
        return Content(checked_prompt(turns), extra=extra)
    return Content(checked_prompt(turns[:-1]), answer_in(turns[-1]["content"], "content"), extra=extra)


def prompt_in(value: Any) -> list[Turn]:
    """The turns of a prompt that is a list of them, or the text of the only one."""
    if isinstance(value, list):
        return turns_of(value, "prompt")[0]
    return [{"role": "user", "content": text_in(value, "prompt")}]


def answer_in(value: Any, column: str) -> str | None:
    """An answer as text, from a string or from one assistant turn; None for an empty one."""
    if isinstance(value, list):
        turns = turns_of(value, column)[0]
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise BadRecord("wrong role", f"`{column}` must be one assistant turn after the prompt")
        value = turns[0]["content"]
    if value is None:
        return None
    text = text_in(value, column)
    return text if text and not text.isspace() else None


def turns_of(
    value: Any,
    column: str,
    role_key: str = "role",
    text_key: str = "content",
    roles: Mapping[str, str] = ROLES,
) -> tuple[list[Turn], dict[str, Any]]:
    """Turns with our role names, and what else they said (by the name ``turns``, one object a turn)."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRecord("not turns", f"`{column}` must be a list of turns with `{role_key}` and `{text_key}`")
    turns: list[Turn] = []
    extras: list[dict[str, Any]] = []
    for number, turn in enumerate(value, 1):
        others = {key: said for key, said in turn.items() if key not in (role_key, text_key) and said is not None}
        if called := next((key for key in ("tool_calls", "function_call") if others.get(key)), None):
            raise BadRecord("tool calls", f"turn {number} of `{column}` has `{called}`, which records cannot hold")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            fix = did_you_mean(role[:100], roles) if isinstance(role, str) else f"use one of {listed(list(roles))}"
            raise BadRecord("wrong role", f"turn {number} of `{column}` has the role `{shown(role)}`", fix)
        turns.append({"role": roles[role], "content": text_in(turn.get(text_key), f"{column}.{text_key}")})
        extras.append(others)
    return turns, {"turns": extras} if any(extras) else {}


def checked_prompt(prompt: list[Turn]) -> list[Turn]:
    """``prompt`` if an assistant could answer it."""
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise BadRecord("wrong role", "no user turn stands before the answer")
    for number, turn in enumerate(prompt):
        if turn["role"] == "system":
            if number:
                raise BadRecord("wrong role", "a system turn can only be the first")
        elif not turn["content"] or turn["content"].isspace():
            message = "the prompt is empty" if len(prompt) == 1 else "a turn of the prompt is empty"
            raise BadRecord("empty prompt", message)
    return prompt


def text_in(value: Any, column: str) -> str:
    """A text, or the one that OpenAI's ``[{"type": "text", "text": ...}, ...]`` holds."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRecord("encoding", f"`{column}` holds a NUL character, which is no text", "take it out")
        return value
    if value is None:
        raise BadRecord("not text", f"`{column}` is missing or null")
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return text_in("\n".join(_part(part, column) for part in value), column)
    if isinstance(value, float) and value != value:
        fix = "fill it in, or leave it empty for a record without an answer"
        raise BadRecord("NaN", f"`{column}` is NaN, not text", fix)
    raise BadRecord("not text", f"`{column}` is not text but {type(value).__name__} {shown(value)}")


def shown(value: Any) -> str:
    """The start of a value, for messages."""
    try:
        return shortened(value if isinstance(value, str) else json.dumps(value, default=str), 40)
    except (ValueError, TypeError, RecursionError):
        return f"({type(value).__name__})"


def common_start(left: list[Turn], right: list[Turn]) -> list[Turn]:
    """The turns in which two conversations agree before the last of the shorter one."""
    same = 0
    while same < min(len(left), len(right)) - 1 and left[same] == right[same]:
        same += 1
    return left[:same]


def after(prompt: list[Turn], turns: list[Turn]) -> list[Turn]:
    """``turns`` without the prompt that they may repeat."""
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns


def _part(part: Mapping[str, Any], column: str) -> str:
    text = part.get("text")
    if part["type"] not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise BadRecord("not text", f"`{column}` has a part of the type `{shown(part['type'])}`, not only text")
    return text
