"""The texts of the pages in English and Chinese, and the choice between them."""

import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from starlette.requests import Request

from posttrain.store.message import Message, fit_number

LANGUAGES = {"en": "English", "zh": "中文"}
LANGUAGE_COOKIE = "posttrain-language"

_FOLDER = Path(__file__).parent / "texts"

TEXTS: dict[str, dict[str, str]] = {
    language: json.loads((_FOLDER / f"{language}.json").read_text(encoding="utf-8")) for language in LANGUAGES
}
"""Each text by its language and id; parts in braces are filled in."""

LINES: dict[str, dict[str, str]] = {"zh": json.loads((_FOLDER / "zh_lines.json").read_text(encoding="utf-8"))}
"""Translations of what other parts of the program say in English, by language and English line.

``{}`` in the English line stands for any text and ``{#}`` for a number. ``{0}`` in a translation is the first of them,
``{0:t}`` its translation.
"""

MESSAGES: dict[str, dict[str, str]] = {"zh": json.loads((_FOLDER / "zh_messages.json").read_text(encoding="utf-8"))}
"""Translations of messages by language and template."""

_LONGEST_LINE = 1000
_NUMBER = r"([-+−]?[\d.,]+(?:e-?\d+)?%?)"


class Translator:
    """Returns texts in one language: ``translate("nav.label")``."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, key: str, **values: object) -> str:
        text = TEXTS[self.language][key]
        text = fit_number(text, values) if self.language == "en" else text
        return text.format(**values) if values else text

    def line(self, text: str) -> str:
        """Translates an error, a finding, or the words of a chart, which are English; what is not known stays so."""
        if self.language == "en":
            return text
        if isinstance(text, Message) and (translated := text.translated(self._template)) != text:
            return translated
        return _translate(self.language, text)

    def _template(self, template: str) -> str:
        return MESSAGES[self.language].get(template, template)

    def rows(self, rows: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
        """Translates the cells of rows that the program wrote."""
        return [tuple(map(self.line, row)) for row in rows]

    def has(self, key: str) -> bool:
        """Returns whether there is a text of this id."""
        return key in TEXTS[self.language]

    def with_prefix(self, prefix: str) -> dict[str, str]:
        """Returns the texts whose ids begin so, by their ids without the prefix."""
        texts = TEXTS[self.language]
        return {key.removeprefix(prefix): text for key, text in texts.items() if key.startswith(prefix)}


def choose_language(request: Request) -> str:
    """Returns the language of a request: the one that its person chose, else the first that the browser asks for."""
    chosen = request.cookies.get(LANGUAGE_COOKIE, "")
    if chosen in LANGUAGES:
        return chosen
    ranked = sorted(_accepted(request.headers.get("accept-language", "")[:500]), key=lambda item: -item[0])
    return next((language for _, language in ranked if language in LANGUAGES), "en")


def translator_of(request: Request) -> Translator:
    """Returns the translator to the language of a request."""
    return Translator(choose_language(request))


def _accepted(header: str) -> list[tuple[float, str]]:
    """Parses ``zh-CN,zh;q=0.9,en;q=0.8`` to weights and languages."""
    accepted = []
    for part in header.split(","):
        name, _, weight = part.partition(";q=")
        try:
            accepted.append((float(weight or 1), name.strip().split("-")[0].lower()))
        except ValueError:
            continue
    return accepted


class _Part(str):
    """A part that is filled in; with the format ``t`` it is translated itself."""

    def __new__(cls, text: str, language: str) -> "_Part":
        part = super().__new__(cls, text)
        part.language = language
        return part

    language: str

    def __format__(self, spec: str) -> str:
        return _translate(self.language, str(self)) if spec == "t" else str(self)


@lru_cache(4096)
def _translate(language: str, line: str) -> str:
    """Translates a line, or those of its parts that are known: of rows of a label, and of clauses with a semicolon."""
    if (exact := LINES[language].get(line)) is not None:
        return exact
    if len(line) > _LONGEST_LINE:
        return line
    for pattern, translation in _patterns(language):
        if match := pattern.fullmatch(line):
            return translation.format(*(_Part(part, language) for part in match.groups()))
    for separator, joined in (("\n", "\n"), ("; ", "；")):
        first, _, rest = line.partition(separator)
        if rest:
            parts = [first, rest]
            translated = [_translate(language, part) for part in parts]
            return joined.join(translated) if translated != parts else line
    return line


@cache
def _patterns(language: str) -> list[tuple[re.Pattern[str], str]]:
    """Returns the lines with parts to fill in, those with most words first, as others may fit too."""
    filled = sorted((line for line in LINES[language] if "{" in line), key=lambda line: -len(re.sub("{#?}", "", line)))
    return [(_pattern(line), LINES[language][line]) for line in filled]


def _pattern(line: str) -> re.Pattern[str]:
    # A part of any text stays within its clause.
    parts = {"{}": "((?:(?!; ).)+?)", "{#}": _NUMBER}
    return re.compile("".join(parts.get(part) or re.escape(part) for part in re.split("({#?})", line)), re.DOTALL)
