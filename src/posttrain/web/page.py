"""Renders pages from templates that escape user text, and writes those that are files."""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from posttrain.report.charts.chart import Chart
from posttrain.report.charts.rounds import DECISION_NAMES
from posttrain.report.section import Page
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.store.message import Message
from posttrain.web.translations import Translator

PAGE_BYTES = 2_000_000
"""Size of a page that can still be mailed; the charting library is 0.74 MB of it."""

SCRIPTS = ("static/echarts/echarts.min.js", "static/charts.js")
"""The scripts of a page with charts, in the order in which they run."""

_STYLES = ("static/theme.css", "templates/page.css", "static/content.css", "static/charts.css")

_DETAILS = (1.0, 0.5, 0.25, 0.1)
"""Shares of the points and rows that a page shows, until it is small enough."""

_ENDS = (".", "!", "?", "。", "！", "？")


def render_page(page: Page, created: str = "") -> str:
    """Renders a page as HTML; it loads nothing, and runs no script but those of the package.

    Args:
        page: The page.
        created: Time of creation, as text.
    """
    style = "".join(map(_package_file, _STYLES))
    scripts = [_package_file(name) for name in SCRIPTS]
    # Hashes instead of 'unsafe-inline': a script that a record smuggles in does not run.
    policy = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes([style])}; img-src data:"
    return (
        template_environment()
        .get_template("page.html")
        .render(
            page=page,
            created=created,
            policy=f"{policy}; base-uri 'none'; form-action 'none'",
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            _=Translator("en"),
        )
    )


def write_page(path: Path, build: Callable[[float], Page]) -> Page:
    """Writes a page atomically to ``path``, whose folder exists, and returns it.

    It has less than 2 MB, as far as less detail can make it so.

    Args:
        path: The file.
        build: Returns the page with a share of the points and rows that there is room for.

    Raises:
        UserError: the disk refused.
    """
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for detail in _DETAILS:
        page = build(detail)
        # Records may hold lone surrogates, which UTF-8 cannot encode: a "?" beats a page that is never written.
        content = render_page(page, created).encode("utf-8", "replace")
        if len(content) < PAGE_BYTES:
            break
    write_atomically(path, content)
    return page


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


@cache
def template_environment() -> Environment:
    """Returns the templates of the package, which escape whatever they are given, and translate messages and charts."""
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
        "sentence": _sentence,
        "breakable": _breakable,
        "inline": _inline,
        "decision": _decision,
        "held": _held,
    }
    return environment


@pass_context
def _in_language(context: Context, value: Any) -> Any:
    """Translates a chart or a message to the language of the page."""
    if isinstance(value, Chart):
        return value.translated(_translator(context).line)
    return _translator(context).line(value) if isinstance(value, Message) else value


@pass_context
def _breakable(context: Context, text: str) -> Markup:
    """Lets a name break behind its underscores: a browser takes it for one word, and would break it anywhere."""
    shown = _translator(context).line(text) if isinstance(text, Message) else text
    return Markup(str(escape(shown)).replace("_", "_<wbr>"))


@pass_context
def _inline(context: Context, text: str) -> Markup:
    """Shows what stands between backticks as code."""
    shown = _translator(context).line(text) if isinstance(text, Message) else text
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(shown))))


@pass_context
def _sentence(context: Context, text: str) -> Markup:
    """Gives a text a capital at its beginning and a full stop at its end."""
    shown = _translator(context).line(text)
    end = "" if shown.endswith(_ENDS) else _translator(context)("site.stop")
    return _inline(context, f"{shown[:1].upper()}{shown[1:]}{end}")


@pass_context
def _decision(context: Context, name: str) -> str:
    """Returns the words for a decision of the gate, or of a round that has none yet."""
    translate, key = _translator(context), f"decision.{name}"
    return translate(key) if translate.has(key) else DECISION_NAMES.get(name, name)


@pass_context
def _held(context: Context, holds: bool) -> str:
    return _translator(context)("rounds.holds" if holds else "rounds.fails")


def _translator(context: Context) -> Translator:
    translator: Translator = context["_"]
    return translator


def _package_file(name: str) -> str:
    return files("posttrain.web").joinpath(*name.split("/")).read_text("utf-8")


def _hashes(texts: Sequence[str]) -> str:
    """Returns the sources of a content security policy that allow just these inline texts."""
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
