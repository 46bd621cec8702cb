"""Writes prompts that request new records from a model, and parses its replies."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.data.records.record import Turn
from posttrain.store.errors import to_line

Form = Literal["json", "lines"]

_FORMATS: dict[Form, str] = {
    "json": "Reply with a JSON array of {count} strings and nothing else.",
    "lines": "Write one on each line, numbered from 1 to {count}, and nothing else.",
}

_LINES = re.compile(re.escape(_FORMATS["lines"]).replace(r"\{count\}", "([0-9]+)") + r"\Z")

# Without a space `**Billing**` is a heading, not an item.
_ITEM = re.compile(r"\s*(?:[0-9]{1,3}[.):、]\s*|[-*•]\s+)(\S.*)")

_CONTENT = re.compile(r"[^\W\d_]|\w\W+\w")  # a lone number or a rule is not an item


@dataclass(frozen=True)
class _Demonstration:
    """A request with its answer: small models follow these where they do not follow a description."""

    examples: Sequence[str]
    answers: Sequence[str]


_TASKS = _Demonstration(
    ("Explain to a child why the sky is blue.", "Which is larger, 3/7 or 4/9?"),
    (
        "Write a short note that thanks a neighbour for watering the plants.",
        "Name three birds that cannot fly.",
        "How long do I boil an egg so that the yolk stays soft?",
        "Turn this sentence into the past tense: She walks to work.",
    ),
)

_HOURS = _Demonstration(
    ("When does the library on Mill Street open on Sundays?",),
    (
        "Sunday opening hours of the Mill Street library, please.",
        "At what time can I visit the library on Mill Street on a Sunday?",
        "I would like to know when the Mill Street library opens on Sundays.",
        "Is the library on Mill Street open on Sundays, and from when?",
    ),
)

_QUOTES = ('""', "''", "“”", "‘’", "``", "「」", "«»")


def instructions_prompt(examples: Sequence[str], count: int, form: Form = "json") -> list[Turn]:
    """Asks for tasks like the examples, after the idea of Self-Instruct (Wang et al. 2023, arXiv:2212.10560)."""

    def ask(shown: Sequence[str], count: int) -> list[Turn]:
        opening = f"These are {len(shown)} tasks that people gave to an assistant:"
        wish = f"Write {count} more tasks that people might give to it. Vary topic, wording and form; each must make "
        return _request(opening, shown, f"{wish}sense by itself and be answerable in text.", count, form)

    return _demonstrate(ask, _TASKS, count, form) + ask(examples, count)


def label_inputs_prompt(label: str, examples: Sequence[str], count: int, form: Form = "json") -> list[Turn]:
    """Asks for inputs of one class."""

    def ask(shown: Sequence[str], count: int, name: str = "opening hours") -> list[Turn]:
        opening = f"These are {len(shown)} messages of the class `{name}`:"
        wish = f"Write {count} more messages of this class, and of no other. Vary wording, length and detail."
        return _request(opening, shown, wish, count, form)

    return _demonstrate(ask, _HOURS, count, form) + ask(examples, count, label)


def paraphrase_prompt(text: str, count: int, form: Form = "json") -> list[Turn]:
    """Asks for a text in other words."""

    def ask(shown: Sequence[str], count: int) -> list[Turn]:
        wish = f"Say it in {count} other ways. Keep the meaning, every name and every number; change words and order."
        return _request("This is a message:", shown, wish, count, form)

    return _demonstrate(ask, _HOURS, count, form) + ask([text], count)


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
    lines = [_unquoted(line.strip()) for line in reply.splitlines()]
    items = [_item(line) for line in lines if _ITEM.fullmatch(line)]
    return [text for text in items if _CONTENT.search(text) and _storable(text)] or None


def requested_lines(prompt: Sequence[Turn]) -> int | None:
    """Number of lines that a prompt of this module requests; None for any other prompt."""
    match = _LINES.search(prompt[-1]["content"])
    return int(match[1]) if match else None


def _item(line: str) -> str:
    """Returns the text of a line; small models number and quote an item twice."""
    while match := _ITEM.fullmatch(line):
        line = _unquoted(match[1].strip())
    return line


def _unquoted(text: str) -> str:
    # Quotes inside would mean that the outer ones do not belong together.
    quoted = len(text) > 2 and text[0] + text[-1] in _QUOTES and text[0] not in text[1:-1]
    return text[1:-1].strip() if quoted else text


def _request(opening: str, examples: Sequence[str], wish: str, count: int, form: Form) -> list[Turn]:
    # As JSON, so that no example can end the list.
    shown = [json.dumps(example, ensure_ascii=False) if form == "json" else to_line(example) for example in examples]
    lines = _number(shown) if form == "lines" and len(shown) > 1 else "\n".join(shown)
    content = f"{opening}\n\n{lines}\n\n{wish} {_FORMATS[form].format(count=count)}"
    return [{"role": "user", "content": content}]


def _demonstrate(
    ask: Callable[[Sequence[str], int], list[Turn]], demonstration: _Demonstration, count: int, form: Form
) -> list[Turn]:
    if form == "json":
        return []
    answers = demonstration.answers[:count]
    return [*ask(demonstration.examples, len(answers)), {"role": "assistant", "content": _number(answers)}]


def _number(texts: Sequence[str]) -> str:
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def _storable(text: str) -> bool:
    try:
        # A lone surrogate parses as JSON but cannot be stored as UTF-8.
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
