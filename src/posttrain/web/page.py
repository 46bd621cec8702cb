"""Renders pages from templates that escape user text, with one style sheet, and writes them atomically."""

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from posttrain.store.files import write_atomically
from posttrain.web import formatting

Tile = tuple[str, str, str]
"""A headline number: value, name and remark."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column names, and rows of cells."""


def render_page(template: str, **content: object) -> str:
    """Renders a page as HTML; it loads nothing.

    Args:
        template: one that extends ``page.html``.
        content: everything that it names; a name that is not given is an error.
    """
    environment = Environment(
        loader=PackageLoader("posttrain.web"),
        # Records are foreign text: a record with a script tag must stay text.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in a template must fail in the tests instead of leaving a hole in the page.
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "duration": formatting.duration_text,
        "metric_name": formatting.metric_name,
        "section_id": _section_id,
        "words": formatting.reason_text,
    }
    return environment.get_template(template).render(content)


def write_page(path: Path, page: str) -> None:
    """Writes a page atomically to ``path``, whose folder exists.

    Raises:
        UserError: the disk refused.
    """
    # Records may hold lone surrogates, which UTF-8 cannot encode: a "?" beats a page that is never written.
    write_atomically(path, page.encode("utf-8", "replace"))


def now_text() -> str:
    """Formats the current time: ``2026-03-14 09:26 UTC``."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _section_id(name: str) -> str:
    """Turns ``Personal data`` into ``personal-data``."""
    return name.lower().replace(" ", "-")
