"""Renders pages from templates that escape user text, with style and scripts inside, and writes them atomically."""

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from posttrain.report import formatting
from posttrain.report.charts.chart import Chart
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically

Tile = tuple[str, str, str]
"""A headline number: value, name and remark."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column names, and rows of cells."""


PAGE_BYTES = 2_000_000
"""Size of a report that can still be mailed; the charting library is 0.74 MB of it."""

SCRIPTS = ("static/echarts/echarts.min.js", "static/charts.js")
"""The scripts of a page with charts, in the order in which they run."""


def render_page(template: str, styles: Sequence[str] = (), **content: object) -> str:
    """Renders a page as HTML; it loads nothing, and runs no script but those of the package.

    Args:
        template: one that extends ``page.html``.
        styles: names of style sheets besides those of all pages.
        content: everything that it names; a name that is not given is an error.
    """
    environment = template_environment()
    sheets = ("static/theme.css", "templates/page.css", "static/charts.css", *(f"templates/{name}" for name in styles))
    style = "".join(map(_package_file, sheets))
    scripts = [_package_file(name) for name in SCRIPTS]
    # Hashes instead of 'unsafe-inline': a script that a record smuggles in does not run.
    policy = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes([style])}; img-src data:"
    return environment.get_template(template).render(
        content,
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
    )


@cache
def template_environment() -> Environment:
    """Returns the templates of the package, which escape whatever they are given."""
    environment = Environment(
        loader=PackageLoader("posttrain.web"),
        # Records and names are foreign text: a script tag in them must stay text.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in a template must fail in the tests instead of leaving a hole in the page.
        undefined=StrictUndefined,
        finalize=_in_language,
    )
    environment.filters |= {
        "duration": formatting.duration_text,
        "metric_name": formatting.metric_name,
        "section_id": _section_id,
        "words": formatting.reason_text,
    }
    return environment


@pass_context
def _in_language(context: Context, value: Any) -> Any:
    """Translates a chart to the language of the page, if that has one."""
    translator = context.get("_")
    return value.translated(translator.line) if isinstance(value, Chart) and translator else value


def _package_file(name: str) -> str:
    return files("posttrain.web").joinpath(*name.split("/")).read_text("utf-8")


def _hashes(texts: Sequence[str]) -> str:
    """Returns the sources of a content security policy that allow just these inline texts."""
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)


def check_page_file(path: Path) -> None:
    """Checks before any work that a page can be written to ``path``, over an earlier one.

    Raises:
        UserError: it is a folder, its folder does not exist, or its suffix names another format.
    """
    if not path.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent), fix="make it first")
    if path.is_dir():
        raise UserError("is a folder", where=str(path), fix=f"name a file, such as {path / 'report.html'}")
    if path.suffix == ".svg":
        fix = "name a file that ends in .html; below each of its charts, Data has a button that saves the chart as SVG"
        raise UserError("a report is HTML", where=str(path), fix=fix)


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
