"""The texts of the pages in English and Chinese, and the choice between them."""

import json
from pathlib import Path

from starlette.requests import Request

LANGUAGES = {"en": "English", "zh": "中文"}
LANGUAGE_COOKIE = "posttrain-language"

TEXTS: dict[str, dict[str, str]] = {
    language: json.loads((Path(__file__).parent / "texts" / f"{language}.json").read_text(encoding="utf-8"))
    for language in LANGUAGES
}
"""Each text by its language and id; parts in braces are filled in."""


class Translator:
    """Returns texts in one language: ``translate("nav.label")``."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, key: str, **values: object) -> str:
        text = TEXTS[self.language][key]
        return text.format(**values) if values else text

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
