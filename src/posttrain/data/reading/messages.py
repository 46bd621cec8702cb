"""Converts rows of each shape (messages, ShareGPT, preference pairs, Alpaca, ...) to turns and texts of a record."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.reading.rows import join_names
from posttrain.data.records.record import Turn
from posttrain.store.errors import shorten, suggest

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    # OpenAI's later name of the system role, and its first one of the tool's.
    "developer": "system", "function": "tool",
}  # fmt: skip

# Collections of ShareGPT conversations differ in the names of their speakers.
SHAREGPT_ROLES = {
    **ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip

_CALLS = ("function_call", "tool_call", "tool_calls")
"""Keys of a turn that hold the assistant's call of a tool, and roles of turns that are one."""

# HH-RLHF keeps a dialogue in one string, each turn after an empty line and its speaker (Bai et al. 2022, "Training a
# Helpful and Harmless Assistant", the published ``chosen`` and ``rejected``).
_TURN_START = re.compile(r"\n\n(Human|Assistant):")

_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}


class InvalidRecord(Exception):
    """Raised for a record that does not fit its shape.

    Attributes:
        blocking: whether the file is refused for it; see :class:`posttrain.data.reading.rows.Problem`.
    """

    def __init__(self, kind: str, message: str, fix: str | None = None, *, blocking: bool = True) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix, self.blocking = kind, message, fix, blocking


@dataclass(slots=True)
class Content:
    """The texts of a record by RECORD's columns; ``extra`` holds the other values of its turns."""

    prompt: list[Turn] | None = None
    completion: str | None = None
    rejected: str | None = None
    text: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def split_conversation(turns: list[Turn], extra: dict[str, Any]) -> Content:
    """Split turns into prompt and answer: the answer is the last turn, if the assistant's."""
    if turns[-1]["role"] != "assistant":
        return Content(check_prompt(turns), extra=extra)
    return Content(check_prompt(turns[:-1]), parse_answer(turns[-1]["content"], "content"), extra=extra)


def parse_prompt(value: Any) -> list[Turn]:
    """Parses a prompt: a list of turns, or the text of one user turn."""
    if isinstance(value, list):
        return parse_turns(value, "prompt")[0]
    return [{"role": "user", "content": parse_text(value, "prompt")}]


def parse_answer(value: Any, column: str) -> str | None:
    """Parses an answer: a string, or a list of one assistant turn; None for an empty one."""
    if isinstance(value, list):
        turns = parse_turns(value, column)[0]
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise InvalidRecord("wrong role", f"`{column}` must be one assistant turn after the prompt")
        value = turns[0]["content"]
    if value is None:
        return None
    text = parse_text(value, column)
    return text if text and not text.isspace() else None


def parse_turns(
    value: Any,
    column: str,
    role_key: str = "role",
    text_key: str = "content",
    roles: Mapping[str, str] = ROLES,
) -> tuple[list[Turn], dict[str, Any]]:
    """Parses a list of turns, and returns them with our role names, and their other values as ``{"turns": [...]}``."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        raise InvalidRecord("not turns", f"`{column}` must be a list of turns with `{role_key}` and `{text_key}`")
    turns: list[Turn] = []
    extras: list[dict[str, Any]] = []
    for number, turn in enumerate(value, 1):
        others = {key: field for key, field in turn.items() if key not in (role_key, text_key) and field is not None}
        if called := next((key for key in _CALLS if others.get(key)), None):
            raise InvalidRecord("tool calls", f"turn {number} of `{column}` has `{called}`, which records cannot hold")
        role = turn.get(role_key)
        if role in _CALLS:
            message = f"turn {number} of `{column}` calls a tool (`{role}`), which records cannot hold"
            raise InvalidRecord("tool calls", message, "leave such conversations out")
        if not isinstance(role, str) or role not in roles:
            fix = suggest(role[:100], roles) if isinstance(role, str) else f"use one of {join_names(list(roles))}"
            raise InvalidRecord("wrong role", f"turn {number} of `{column}` has the role `{preview(role)}`", fix)
        turns.append({"role": roles[role], "content": parse_text(turn.get(text_key), f"{column}.{text_key}")})
        extras.append(others)
    return turns, {"turns": extras} if any(extras) else {}


def check_prompt(prompt: list[Turn]) -> list[Turn]:
    """Returns the prompt if an assistant could answer it, else raise InvalidRecord."""
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise InvalidRecord("wrong role", "no user turn stands before the answer")
    for number, turn in enumerate(prompt):
        if turn["role"] == "system":
            if number:
                raise InvalidRecord("wrong role", "a system turn can only be the first")
        elif not turn["content"] or turn["content"].isspace():
            message = "the prompt is empty" if len(prompt) == 1 else "a turn of the prompt is empty"
            raise InvalidRecord("empty prompt", message)
    return prompt


def parse_text(value: Any, column: str) -> str:
    """Parses a text: a string, or OpenAI's ``[{"type": "text", "text": ...}, ...]``."""
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidRecord("encoding", f"`{column}` holds a NUL character, which is not text", "take it out")
        return value
    if value is None:
        raise InvalidRecord("not text", f"`{column}` is missing or null")
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return parse_text("\n".join(_text_part(part, column) for part in value), column)
    if isinstance(value, float) and value != value:  # NaN, as pandas writes an empty cell
        fix = "fill it in, or leave it empty for a record without an answer"
        raise InvalidRecord("NaN", f"`{column}` is NaN, not text", fix)
    raise InvalidRecord("not text", f"`{column}` is not text but {type(value).__name__} {preview(value)}")


def preview(value: Any) -> str:
    """Returns the start of a value, for messages."""
    try:
        return shorten(value if isinstance(value, str) else json.dumps(value, default=str), 40)
    except (ValueError, TypeError, RecursionError):
        return f"({type(value).__name__})"


def common_prefix(left: list[Turn], right: list[Turn]) -> list[Turn]:
    """Returns the turns on which two conversations agree, before the last turn of the shorter one."""
    same = 0
    while same < min(len(left), len(right)) - 1 and left[same] == right[same]:
        same += 1
    return left[:same]


def without_prefix(prompt: list[Turn], turns: list[Turn]) -> list[Turn]:
    """Removes the prompt from turns that repeat it."""
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns


def _text_part(part: Mapping[str, Any], column: str) -> str:
    text = part.get("text")
    if part["type"] not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise InvalidRecord("not text", f"`{column}` has a part of the type `{preview(part['type'])}`, not only text")
    return text


def is_dialogue(value: Any) -> bool:
    """Returns True for a dialogue in the format of HH-RLHF in which the human speaks first."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def parse_dialogue(text: str) -> list[Turn]:
    """Parses a dialogue in one string to stripped turns; consecutive turns of one speaker are joined."""
    parts = _TURN_START.split(text)
    turns: list[Turn] = []
    for speaker, speech in zip(parts[1::2], parts[2::2], strict=True):
        role, content = _DIALOGUE_ROLES[speaker], speech.strip()
        if turns and turns[-1]["role"] == role:
            content = "\n\n".join(part for part in (turns.pop()["content"], content) if part)
        turns.append({"role": role, "content": content})
    return turns


def parse_dialogue_pair(chosen: str, rejected: str) -> Content:
    """Parses a preference pair of dialogues: the shared turns are the prompt, the turns that differ the answers."""
    better, worse = parse_dialogue(chosen), parse_dialogue(rejected)
    prompt = common_prefix(better, worse)
    answers = []
    for column, turns in (("chosen", better), ("rejected", worse)):
        rest = turns[len(prompt) :]
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            message = f"`{column}` does not end in one answer to what both dialogues share"
            raise InvalidRecord("wrong role", message, "give both the same turns up to the last answer")
        if not rest[0]["content"]:
            # HH-RLHF as published has some of these, so they do not block the file.
            raise InvalidRecord("empty answer", f"`{column}` ends in an empty answer", blocking=False)
        answers.append(rest[0]["content"])
    return Content(check_prompt(prompt), *_different(*answers))


def _different(better: str, worse: str) -> tuple[str, str]:
    """Returns the answers of a preference pair, which must differ: in two equal ones there is nothing to learn."""
    if better == worse:
        # Published sets have some of these, so they do not block the file.
        raise InvalidRecord("identical answers", "`chosen` and `rejected` are the same", blocking=False)
    return better, worse


def with_context(convert: Callable[[Mapping[str, Any]], Content]) -> Callable[[Mapping[str, Any]], Content]:
    """Has a conversion put the columns ``system`` and ``history`` before the prompt."""

    def converted(values: Mapping[str, Any]) -> Content:
        content = convert(values)
        if content.prompt is not None and ("system" in values or "history" in values):
            turns = add_context(content.prompt, values.get("system"), values.get("history"))
            content.prompt = check_prompt(turns)
        return content

    return converted


def add_context(prompt: list[Turn], system: Any, history: Any = None) -> list[Turn]:
    """Returns a prompt after a system message and earlier turns, which may be missing."""
    start = int(prompt[0]["role"] == "system")
    turns = [*prompt[:start], *_parse_history(history), *prompt[start:]]
    text = "" if system is None else parse_text(system, "system")
    if text and not text.isspace():
        if start and turns[0]["content"] != text:
            message = "the column `system` and the system turn of the conversation differ"
            raise InvalidRecord("two system messages", message, "keep one of them")
        turns = [{"role": "system", "content": text}, *turns[start:]]
    return turns


def _parse_history(value: Any) -> list[Turn]:
    """Parses Alpaca's ``history``: a list of ``[question, answer]``, or of turns."""
    if value is None or value in ([], ""):
        return []
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return [
            {"role": role, "content": parse_text(text, "history")}
            for pair in value
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return parse_turns(value, "history")[0]
    fix = "write it as [[question, answer], ...], or give the column another name if it is something else"
    raise InvalidRecord("not turns", "`history` is not a list of earlier questions and answers", fix)


def convert_export(values: Mapping[str, Any]) -> Content:
    """Converts a row of our own Parquet export."""
    prompt = None if values["prompt"] is None else parse_turns(values["prompt"], "prompt")[0]
    if prompt is None:
        return convert_text(values)
    rejected = parse_answer(values["rejected"], "rejected")
    return Content(check_prompt(prompt), parse_answer(values["completion"], "completion"), rejected)


def convert_messages(values: Mapping[str, Any]) -> Content:
    """Converts a list of messages, as OpenAI and Hugging Face write it."""
    return split_conversation(*parse_turns(values["messages"], "messages"))


def convert_sharegpt(values: Mapping[str, Any]) -> Content:
    """Converts a conversation with ShareGPT's names of keys and roles."""
    return split_conversation(*parse_turns(values["conversations"], "conversations", "from", "value", SHAREGPT_ROLES))


def convert_preference(values: Mapping[str, Any]) -> Content:
    """Converts a preference pair: strings, or conversations that may repeat the prompt (TRL's implicit prompt)."""
    chosen, rejected = values["chosen"], values["rejected"]
    explicit = values.get("prompt")
    if "prompt" not in values and "instruction" in values:
        explicit = _alpaca_prompt(values)
    if explicit is None and is_dialogue(chosen) and is_dialogue(rejected):
        return parse_dialogue_pair(chosen, rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        prompt = parse_prompt(explicit)
        better, worse = parse_answer(chosen, "chosen"), parse_answer(rejected, "rejected")
    else:
        left, right = parse_turns(chosen, "chosen")[0], parse_turns(rejected, "rejected")[0]
        prompt = common_prefix(left, right) if explicit is None else parse_prompt(explicit)
        # Answers may repeat an explicit prompt, as TRL accepts it.
        better = parse_answer(without_prefix(prompt, left), "chosen")
        worse = parse_answer(without_prefix(prompt, right), "rejected")
    if better is None or worse is None:
        raise InvalidRecord("empty answer", f"`{'chosen' if better is None else 'rejected'}` is empty")
    return Content(check_prompt(prompt), *_different(better, worse))


def convert_alpaca(values: Mapping[str, Any]) -> Content:
    """Converts an instruction of Alpaca, with its input after an empty line."""
    prompt: list[Turn] = [{"role": "user", "content": _alpaca_prompt(values)}]
    return Content(check_prompt(prompt), parse_answer(values.get("output"), "output"))


def _alpaca_prompt(values: Mapping[str, Any]) -> str:
    instruction = parse_text(values["instruction"], "instruction")
    context = "" if values.get("input") is None else parse_text(values["input"], "input")
    return f"{instruction}\n\n{context}" if context.strip() else instruction


def convert_prompt(values: Mapping[str, Any]) -> Content:
    """Converts a prompt and its answer, if it has one."""
    return Content(check_prompt(parse_prompt(values["prompt"])), parse_answer(values.get("completion"), "completion"))


def convert_text(values: Mapping[str, Any]) -> Content:
    """Converts plain text."""
    text = parse_text(values["text"], "text")
    if not text or text.isspace():
        raise InvalidRecord("empty text", "`text` is empty")
    return Content(text=text)
