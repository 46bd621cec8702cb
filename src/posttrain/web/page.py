"""What all pages share: templates that escape what users wrote, one style sheet, and files written whole."""

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from posttrain.store.files import write_atomically
from posttrain.web import formatting

Tile = tuple[str, str, str]
"""One of the numbers on top of a page: value, what it is, and a remark."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column names, and rows of words."""


def render_page(template: str, **content: object) -> str:
    """A page as HTML; it loads nothing.

    Args:
        template: one that extends ``page.html``.
        content: everything that it names; a name that is not given is an error.
    """
    environment = Environment(
        loader=PackageLoader("posttrain.web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
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
    """Write a page to ``path``, whose folder exists: whole or not at all. What UTF-8 cannot hold becomes ``?``.

    Raises:
        UserError: the disk refused.
    """
    write_atomically(path, page.encode("utf-8", "replace"))


def now_text() -> str:
    """This moment as pages tell when they were made: ``2026-03-14 09:26 UTC``."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _section_id(name: str) -> str:
    """``Personal data`` as ``personal-data``."""
    return name.lower().replace(" ", "-")
