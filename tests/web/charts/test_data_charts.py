"""Charts of a dataset's page: lengths and positions show the numbers."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from posttrain.web.charts.bars import bars, funnel, paired_bars
from posttrain.web.charts.histogram import histogram

Shapes = Callable[[str, str, str], list[ElementTree.Element]]


def test_bars_of_a_histogram_are_as_tall_as_their_counts(shapes: Shapes) -> None:
    svg = histogram([0, 10, 20, 30], [4, 0, 1], "length", str, above=7, mark=(40.0, "here"))
    tall, low = (float(shape.attrib["height"]) for shape in shapes(svg, "rect", "bar-a"))
    assert tall == pytest.approx(4 * low, rel=0.02)
    first, last = (float(shape.attrib["x"]) for shape in shapes(svg, "rect", "bar-a"))
    (mark,) = shapes(svg, "line", "mark-line")
    assert float(mark.attrib["x1"]) > last > first
    assert "7 above 30.0" in svg
    assert histogram([0, 1], [0], "nothing", str) == ""


def test_a_funnel_shows_added_records(shapes: Shapes) -> None:
    svg = funnel(100, [("short", 20), ("augmented", -50), ("duplicate", 10)], "records")
    assert "+50" in svg
    assert "−20" in svg
    (kept_bar,) = shapes(svg, "rect", "bar-kept")
    input_width, added_width = (float(shape.attrib["width"]) for shape in shapes(svg, "rect", "bar-a"))
    assert input_width == pytest.approx(2 * added_width, abs=0.2)
    assert float(kept_bar.attrib["width"]) == pytest.approx(1.2 * input_width, abs=0.2)


def test_paired_bars_share_one_scale(shapes: Shapes) -> None:
    svg = paired_bars([("a <b>", 0.2, 0.4), ("c", 0.0, 0.1)], "shares", lambda share: f"{share:.0%}")
    (before, _), (after, later) = (
        [float(shape.attrib["width"]) for shape in shapes(svg, "rect", kind) if "rx" in shape.attrib][-2:]
        for kind in ("bar-old", "bar-a")
    )
    assert after == pytest.approx(2 * before, rel=0.01)
    assert after == pytest.approx(4 * later, rel=0.01)
    assert paired_bars([], "shares", str) == ""


def test_marks_are_at_their_values(shapes: Shapes) -> None:
    svg = bars([("a", 0.5, "0.5")], "index", full=1.0, marks=((0.5, "half"), (0.75, "more")))
    (bar,) = shapes(svg, "rect", "bar-a")
    half, more = (float(shape.attrib["x1"]) for shape in shapes(svg, "line", "mark-line"))
    assert half == pytest.approx(float(bar.attrib["x"]) + float(bar.attrib["width"]), abs=0.2)
    assert more > half
