"""A chart as data: an option of Apache ECharts, its height, and its numbers as a table for readers without the picture.

Options are JSON: they hold no function and no markup, so that a text of a record stays a text. Besides the keys that
ECharts documents, ``static/charts.js`` reads these:

- ``$name`` as a colour: the custom property ``--name`` of ``charts.css``, which differs in light and dark;
- ``tip`` and ``text`` of an item: its tooltip and its label;
- ``texts`` of an axis: pairs of a value and its label;
- ``renderItem: "bin"``: a bar from one value of the x axis to another.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from posttrain.store.message import Message

Formatter = Callable[[float], str]
"""Formats a value for people."""

Option = dict[str, Any]
"""An option of ECharts, or a part of one."""

_SCRIPT_TEXTS = {
    "save": Message("Save the picture as SVG"),
    "zoom": Message("The keys + and - zoom, arrows move, and 0 shows everything."),
}
"""Texts of ``static/charts.js``, where they are not English."""

SERIES = 8
"""Colours that readers with any colour vision tell apart; later series share the last."""


@dataclass(frozen=True)
class Chart:
    """A chart, its description for screen readers, and its numbers.

    Args:
        title: describes the chart where it cannot be seen.
        option: the option of ECharts.
        height: in pixels, without the legend.
        columns, rows: the numbers as a table.
        heading: shown over the chart, at its left.
        note: shown over the chart, at its right.
        unit: factor and suffix of the values in tooltips that no item names.
        equal: draws both axes on one scale.
        boxes: draws the nodes of a graph as boxes as wide as their columns allow.
        line: translates a message.
    """

    kind: ClassVar[str] = "chart"
    title: str
    option: Option
    height: int
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    heading: str = ""
    note: str = ""
    unit: tuple[float, str] = (1.0, "")
    equal: bool = False
    boxes: bool = False
    line: Callable[[str], str] = str

    def translated(self, line: Callable[[str], str]) -> "Chart":
        """Returns the chart with its messages in another language; all other texts, such as a record's, stay."""
        return replace(self, option=_translate(self.option, line), line=line)

    def _say(self, text: str) -> str:
        return self.line(text) if isinstance(text, Message) else text

    def __html__(self) -> str:
        """Renders the place of the chart, its option and its table; the title and all texts are escaped."""
        note = Markup('<span class="soft">{}</span>').format(self._say(self.note)) if self.note else ""
        caption = Markup("<figcaption><strong>{}</strong> {}</figcaption>").format(self._say(self.heading), note)
        return Markup(
            '<figure class="chart">{}<div class="plot" role="img" aria-label="{}"></div>{}{}</figure>'
        ).format(caption if self.heading else "", self._say(self.title), self._script(), self._table())

    def _script(self) -> Markup:
        settings = {
            "height": self.height,
            "unit": self.unit,
            "equal": self.equal,
            "boxes": self.boxes,
            "option": self.option,
        }
        if self.line is not str:
            settings["texts"] = {key: self._say(text) for key, text in _SCRIPT_TEXTS.items()}
        # "<" appears in strings alone, so that no text of a record can end the element or begin a comment in it.
        text = json.dumps(compact(settings), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return Markup('<script type="application/json">{}</script>').format(Markup(text.replace("<", "\\u003c")))

    def _table(self) -> Markup:
        if not self.columns:
            return Markup()
        head = Markup().join(Markup('<th scope="col">{}</th>').format(self._say(name)) for name in self.columns)
        body = Markup().join(
            Markup("<tr>{}</tr>").format(Markup().join(Markup("<td>{}</td>").format(self._say(cell)) for cell in row))
            for row in self.rows
        )
        return Markup(
            '<details class="data"><summary>{}</summary>'
            '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table><thead><tr>{}</tr></thead>'
            "<tbody>{}</tbody></table></div></details>"
        ).format(self._say(Message("Data")), self._say(Message("Data: {title}", title=self.title)), head, body)


def _translate(value: Any, line: Callable[[str], str]) -> Any:
    """Translates the messages in a part of an option."""
    if isinstance(value, Message):
        return line(value)
    if isinstance(value, Mapping):
        return {name: _translate(entry, line) for name, entry in value.items()}
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], float | int)):
        return [_translate(entry, line) for entry in value]
    return value


def compact(value: Any) -> Any:
    """Makes a value ready for JSON: six digits a number, which no screen shows more of, and null for NaN."""
    if isinstance(value, Mapping):
        return {name: compact(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [compact(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")
    return value


def series_colour(number: int) -> str:
    """Returns the colour of a series."""
    return f"$s{min(number, SERIES - 1)}"


def value_axis(levels: Sequence[float], show: Formatter, **others: object) -> Option:
    """Builds an axis from the first to the last of evenly spaced levels, each with its label."""
    low, high = levels[0], levels[-1]
    # An axis of no height would divide by zero.
    high = high if high > low else low + 1.0
    interval = levels[1] - levels[0] if len(levels) > 1 else high - low
    texts = list(zip(levels, level_texts(levels, show), strict=True))
    return {"type": "value", "min": low, "max": high, "interval": interval, "texts": texts, **others}


def level_texts(levels: Sequence[float], show: Formatter) -> list[str]:
    """Returns the label of each level, with all its digits where the formatter would round one."""
    texts = [show(level) for level in levels]
    parts = [match.groups() for match in map(_LABEL.fullmatch, texts) if match]
    if len(parts) < len(texts) or len({unit for _, unit in parts}) > 1:
        return texts  # such as 1 min 30 s
    numbers, unit = [float(number.translate(_PLAIN)) for number, _ in parts], parts[0][1]
    largest = max(range(len(levels)), key=lambda at: abs(levels[at]))
    # The formatter's unit is a power of ten: percent, milliseconds, GB.
    ratio = numbers[largest] / levels[largest] if levels[largest] else 0.0
    scale = 10.0 ** round(math.log10(ratio)) if ratio > 0 else 100.0 if unit == "%" else 1.0
    pairs = zip(numbers, levels, strict=True)
    if all(math.isclose(number, scale * level, rel_tol=1e-9, abs_tol=1e-12) for number, level in pairs):
        return texts
    return [f"{scale * level:,.12g}{unit}" for level in levels]


_LABEL = re.compile(r"([+−-]?[\d,.]+(?:e[+-]?\d+)?)(\D*)")
_PLAIN = {ord(","): None, ord("−"): "-"}


def name_axis(names: Iterable[str], **others: object) -> Option:
    """Builds a vertical axis with a row for each name, the first at the top."""
    label = {"interval": 0}
    return {"type": "category", "inverse": True, "data": list(names), "axisLabel": label, **others}


def side_labels(labels: Iterable[str]) -> Option:
    """Builds the second vertical axis, at the right: a label for each row."""
    label = {"interval": 0, "color": "$ink", "fontWeight": 600}
    return name_axis(labels, position="right", axisLabel=label, axisLine={"show": False})


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Returns about ``count`` round numbers from at or below ``low`` to at or above ``high``.

    Args:
        whole: True for counts: half a record is not a level.
    """
    step = (high - low) / max(count, 1) or 1.0
    step = max(step, 1.0) if whole else step
    size = 10 ** math.floor(math.log10(step))
    step = next(
        size * factor
        for factor in (1, 2, 2.5, 5, 10)
        if size * factor >= step * (1 - 1e-9) and not (whole and size * factor % 1)
    )
    # Without the tolerance, 0.3 / 0.1 = 2.9999999999999996 would start one level too low.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded, or labels would read 0.30000000000000004.
    return [round(step * at, 10) for at in range(first, last + 1)]


def truncate(label: str, letters: int) -> str:
    """Cuts a label with an ellipsis if it has more than ``letters`` letters."""
    return label if len(label) <= letters else label[: letters - 1] + "…"
