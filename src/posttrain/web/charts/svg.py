"""SVG elements as strings, the legend, and the two widths that every chart is drawn at."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files

from markupsafe import Markup

FONT_SIZE = 13

LETTER = 8.0
"""Pixels reserved for one letter; generous, because the browser's font is unknown and text must never run over."""

Formatter = Callable[[float], str]
"""Formats a value for people."""

Scale = Callable[[float], float]
"""Maps a value to pixels."""

Symbol = Callable[[float, float], str]
"""Draws a symbol of about 12 pixels around a point."""

_LEGEND_ROW = 22

WIDE, NARROW = 760, 340
"""In pixels, for the desk and for the phone."""


def element(tag: str, *content: str, **attributes: object) -> str:
    """Builds one SVG element. Content is markup, attributes are escaped: ``class_="a"``, ``text_anchor="end"``."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(content)}</{tag}>"


def text(label: str, x: float, y: float, class_: str = "", anchor: str = "start", **attributes: object) -> str:
    """Draws text with its baseline at ``y``."""
    return element("text", escape(label), x=x, y=y, class_=class_ or None, text_anchor=anchor, **attributes)


def tooltip(label: str) -> str:
    return element("title", escape(label))


def figure(width: float, height: float, title: str, *content: str) -> str:
    """Builds a whole chart with a title for screen readers."""
    return element(
        "svg",
        # With role="img" a screen reader reads the first title and skips the rest.
        tooltip(title),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role="img",
        class_="chart",
    )


def standalone(svg: str) -> str:
    """Turns a chart into a file of its own, with its colours and a background."""
    start = svg.index(">") + 1
    # Viewers show a bare SVG on black or white: the chart brings its own paper.
    background = element("rect", width="100%", height="100%", rx=8, class_="paper")
    return f"{svg[:start]}<style>{chart_style()}</style>{background}{svg[start:]}\n"


def chart_style() -> str:
    """Reads the style sheet of all charts, for light and dark."""
    return files("posttrain.web").joinpath("templates", "charts.css").read_text("utf-8")


def level_lines(
    levels: Iterable[float], left: float, right: float, y: Scale, show: Formatter, *, gap: float = 7
) -> list[str]:
    """Draws a line at each level of a vertical axis, with the level's label ``gap`` pixels to the left."""
    return [
        element("line", x1=left, x2=right, y1=y(level), y2=y(level), class_="grid")
        + text(show(level), left - gap, y(level) + 4, "soft", "end")
        for level in levels
    ]


def level_words(values: Iterable[float], x: Scale, show: Formatter, left: float, right: float, y: float) -> list[str]:
    """Draws labels on a horizontal axis, at most 14 pixels over its ends; drops those that would overlap."""
    marks, free = [], left - 12.0
    for value in values:
        label, at = show(value), x(value)
        half = len(label) * LETTER / 2
        if at - half >= free and at + half <= right + 14:
            marks.append(text(label, at, y, "soft", "middle"))
            free = at + half + 6
    return marks


def truncate(label: str, width: float, letter: float = LETTER) -> str:
    """Cuts a label with an ellipsis if it needs more than ``width`` pixels."""
    # At least a letter and the ellipsis, whatever the width.
    room = max(int(width / letter), 2)
    return label if len(label) <= room else label[: room - 1] + "…"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    step = (high - low) / max(count, 1) or 1.0
    size = 10 ** math.floor(math.log10(step))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step * (1 - 1e-9))
    # Without the tolerance, 0.3 / 0.1 = 2.9999999999999996 would start one level too low.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded, or labels would read 0.30000000000000004.
    return [round(step * at, 10) for at in range(first, last + 1)]


def _number(value: object) -> str:
    # A tenth of a pixel is enough, and more digits would double the page.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


class Legend:
    """Lays symbols and their names out side by side, in as many rows as they need.

    Args:
        entries: name and sign.
        width: that a row may take, in pixels.

    Attributes:
        height: in pixels.
    """

    def __init__(self, entries: Sequence[tuple[str, Symbol]], width: float) -> None:
        self._rows: list[list[tuple[float, str, Symbol]]] = [[]]
        x = 0.0
        for name, sign in entries:
            room = 34 + LETTER * len(name)
            if x and x + room > width:
                self._rows.append([])
                x = 0.0
            self._rows[-1].append((x, name, sign))
            x += room
        self.height = _LEGEND_ROW * len(self._rows)

    def at(self, left: float, top: float) -> str:
        """Draws the legend with the middle of its first row at ``top``."""
        return "".join(
            sign(left + x + 6, top + _LEGEND_ROW * row) + text(name, left + x + 20, top + _LEGEND_ROW * row + 4, "soft")
            for row, entries in enumerate(self._rows)
            for x, name, sign in entries
        )


def swatch(class_: str) -> Symbol:
    """Draws a small box in the colour of a class."""
    return lambda x, y: element("rect", x=x - 6, y=y - 6, width=12, height=12, rx=2, class_=class_)


def responsive(draw: Callable[..., str], *arguments: object, **options: object) -> Markup:
    """Draws the chart ``draw(*arguments, width=..., **options)`` once at each width.

    The style sheet shows the one that fits; an empty chart stays empty.
    """
    # Two drawings and no script: a single one that scales would have letters of a few pixels on a phone.
    wide, narrow = (draw(*arguments, width=width, **options) for width in (WIDE, NARROW))
    return Markup(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>' if wide else "")


def without_step(name: str, width: int) -> str:
    """Shortens ``gopher: word count`` to ``word count`` in a narrow chart."""
    return name if width >= 500 else name.split(": ", 1)[-1]
