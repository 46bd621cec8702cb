"""Texts for people that pages can show in another language: a template in English, and the values in it."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

_NOUNS = (
    *("artifact", "example", "file", "input", "pair", "row", "suggestion", "tensor", "weight"),
    *("answer", "batch", "class", "core", "decision", "duplicate", "epoch", "item", "label", "line", "model", "pass"),
    *("record", "round", "step", "text", "token", "training", "trial", "turn"),
)


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun: ``1 answer``, ``1,200 answers``."""
    return f"{count:,} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "ch")) else "s")


_SINGULAR = {_plural(noun): noun for noun in _NOUNS} | {"people": "person"}
_VERBS = {"are": "is", "were": "was", "have": "has", "differ": "differs"}
_COUNTED = re.compile(rf"(\{{(\w+)[^{{}}]*\}} (?:\w+ )?)({'|'.join(_SINGULAR)})\b(?: ({'|'.join(_VERBS)})\b)?")


def fit_number(template: str, values: Mapping[str, Any]) -> str:
    """Puts the nouns of an English template that follow a count of 1 in the singular.

    ``{count} answers were given`` becomes ``{count} answer was given`` where ``count`` is 1.
    """

    def fit(match: re.Match[str]) -> str:
        start, name, noun, verb = match.groups()
        if values.get(name) not in (1, "1"):
            return match[0]
        return start + _SINGULAR[noun] + (f" {_VERBS[verb]}" if verb else "")

    return _COUNTED.sub(fit, template)


_PERCENT = re.compile(r"%[-+ 0,]*\d*(?:\.\d+)?[a-z]")


def fit_log_number(template: str, values: tuple[Any, ...]) -> str:
    """Does what `fit_number` does for a template of `logging`, whose places are ``%d`` and ``%s``."""
    fields = _PERCENT.findall(template)
    if len(fields) != len(values) or "{" in template or "%%" in template:
        return template
    names = iter(range(len(fields)))
    named = _PERCENT.sub(lambda _: f"{{{next(names)}}}", template)
    fitted = fit_number(named, {str(at): value for at, value in enumerate(values)})
    return re.sub(r"\{(\d+)\}", lambda match: fields[int(match[1])], fitted)


class Message(str):
    """A text in English that keeps its template and values; wherever a string is expected it is one.

    ``Message("{count} labels", count=3)`` reads ``3 labels``. Pages look the template up in the catalogue of their
    language, ``web/texts/LANGUAGE_messages.json``, and fill in the values, those that are messages translated too.
    Names of records, files and people are values, never part of a template.

    Attributes:
        template: Template in English; of joined texts what stands between them.
        values: Values by their names in the template; of joined texts the texts by their places.
    """

    template: str
    values: Mapping[str, Any]

    def __new__(cls, template: str, **values: Any) -> Self:
        """Fills the values in; a noun after a count of 1 is in the singular."""
        text = fit_number(template, values).format(**values) if values else template
        return cls._make(text, template, values)

    @classmethod
    def joined(cls, separator: str, parts: Iterable[str]) -> Self:
        """Joins texts, of which messages are translated one by one."""
        listed = list(parts)
        return cls._make(separator.join(listed), separator, {str(at): part for at, part in enumerate(listed)})

    @classmethod
    def _make(cls, text: str, template: str, values: Mapping[str, Any]) -> Self:
        message = super().__new__(cls, text)
        message.template, message.values = template, values
        return message

    def __reduce__(self) -> tuple[Any, ...]:
        return Message._make, (str(self), self.template, self.values)

    def translated(self, translate: Callable[[str], str]) -> str:
        """Returns the text in another language.

        Args:
            translate: Returns the translation of a template, or the template itself.
        """
        template = translate(self.template)
        values = {
            name: value.translated(translate) if isinstance(value, Message) else value
            for name, value in self.values.items()
        }
        if "0" in values:
            return template.join(values.values())
        return template.format(**values) if values else template

    def pack(self) -> dict[str, Any]:
        """Returns the message as JSON values, which `unpack` reads."""
        values = {name: value.pack() if isinstance(value, Message) else value for name, value in self.values.items()}
        return {"text": str(self), "template": self.template, "values": values}


def pack(text: str | None) -> Any:
    """Returns a text or a message as JSON values, which `unpack` reads."""
    return text.pack() if isinstance(text, Message) else text


def unpack(value: Any) -> Any:
    """Reads what `pack` returns; other values stay as they are."""
    if not isinstance(value, Mapping) or value.keys() != {"text", "template", "values"}:
        return value
    values = {name: unpack(each) for name, each in value["values"].items()}
    return Message._make(value["text"], value["template"], values)
