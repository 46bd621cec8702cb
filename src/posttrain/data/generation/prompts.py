"""Writes prompts that request new records from a model, and parses its replies."""

import json
import re
from collections.abc import Sequence
from typing import Literal

from posttrain.data.records.record import Turn

Form = Literal["json", "lines"]

_FORMATS: dict[Form, str] = {
    "json": "Reply with a JSON array of {count} strings and nothing else.",
    "lines": "Write one on each line, numbered from 1 to {count}, and nothing else.",
}

_LINES = re.compile(re.escape(_FORMATS["lines"]).replace(r"\{count\}", "([0-9]+)") + r"\Z")

_ITEM = re.compile(r"\s*(?:[0-9]{1,3}[.):、]|[-*•])\s*(\S.*)")

_QUOTES = ('""', "''", "“”", "‘’", "``", "「」", "«»")


def instructions_prompt(examples: Sequence[str], count: int, form: Form = "json") -> list[Turn]:
    """Asks for tasks like the examples, after the idea of Self-Instruct (Wang et al. 2023, arXiv:2212.10560)."""
    return _build_prompt(
        f"These are {len(examples)} tasks that people gave to an assistant:",
        examples,
        f"Write {count} more tasks that people might give to it. Vary topic, wording and form; each must make sense "
        "by itself and be answerable in text.",
        count,
        form,
    )


def label_inputs_prompt(label: str, examples: Sequence[str], count: int, form: Form = "json") -> list[Turn]:
    """Asks for inputs of one class."""
    return _build_prompt(
        f"These are {len(examples)} messages of the class `{label}`:",
        examples,
        f"Write {count} more messages of this class, and of no other. Vary wording, length and detail.",
        count,
        form,
    )


def paraphrase_prompt(text: str, count: int, form: Form = "json") -> list[Turn]:
    """Asks for a text in other words."""
    return _build_prompt(
        "This is a message:",
        [text],
        f"Say it in {count} other ways. Keep the meaning, every name and every number; change words and order.",
        count,
        form,
    )


def parse_json(reply: str) -> list[str] | None:
    """Parses a reply that is a JSON array of strings, fenced or not; None for any other reply."""
    text = reply.strip()
    if fenced := re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", text, re.DOTALL):
        text = fenced[1]
    try:
        values = json.loads(text)
    # Deeply nested brackets exhaust the parser's recursion.
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str) and value.strip() and _storable(value) for value in values):
        return None
    return [value.strip() for value in values]


def parse_list(reply: str) -> list[str] | None:
    """Parses the numbered or bulleted lines of a reply, without the quotes around them; None if there are none.

    Other lines, as before and after a list, are not items.
    """
    items = [_unquoted(match[1].strip()) for line in reply.splitlines() if (match := _ITEM.fullmatch(line))]
    return [text for text in items if text and _storable(text)] or None


def requested_lines(prompt: Sequence[Turn]) -> int | None:
    """Number of lines that a prompt of this module requests; None for any other prompt."""
    match = _LINES.search(prompt[-1]["content"])
    return int(match[1]) if match else None


def _unquoted(text: str) -> str:
    # Quotes inside would mean that the outer ones do not belong together.
    quoted = len(text) > 2 and text[0] + text[-1] in _QUOTES and text[0] not in text[1:-1]
    return text[1:-1].strip() if quoted else text


def _build_prompt(opening: str, examples: Sequence[str], wish: str, count: int, form: Form) -> list[Turn]:
    # As JSON, so that no example can end the list.
    lines = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    content = f"{opening}\n\n{lines}\n\n{wish} {_FORMATS[form].format(count=count)}"
    return [{"role": "user", "content": content}]


def _storable(text: str) -> bool:
    try:
        # A lone surrogate parses as JSON but cannot be stored as UTF-8.
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
