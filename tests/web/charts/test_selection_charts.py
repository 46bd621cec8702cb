"""Charts of a round's selection: positions and lengths show the numbers."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import numpy as np
import pytest

from posttrain.web.charts.bars import bars
from posttrain.web.charts.histogram import histogram
from posttrain.web.charts.rounds import Expectation, expectations
from posttrain.web.charts.scatter import ScatterLayer, scatter

Shapes = Callable[[str, str, str], list[ElementTree.Element]]
Texts = Callable[[str], list[str]]


def _starts(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M(-?[\d.]+) (-?[\d.]+)", path)]


def test_a_scatter_has_one_scale_and_labels_its_points(shapes: Shapes, texts: Texts) -> None:
    square = np.array([[0, 0], [4, 0], [4, 2], [0, 2]])
    layers = [
        ScatterLayer("pool", square, "pool", "dot"),
        ScatterLayer("chosen: a & b", np.array([[2.0, 1.0], [4.0, 2.0]]), "chosen series-0", "diamond", ["1, <first>"]),
        ScatterLayer("none", np.zeros((0, 2)), "labelled", "cross"),
    ]
    svg = scatter(layers, "map")
    pool, _ = shapes(svg, "path", "pool")  # and one in the legend
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = _starts(pool.attrib["d"])
    assert (ay, bx, cy, dx) == (by, cx, dy, ax)
    assert bx - ax == pytest.approx(2 * (by - cy), abs=1.1), "one scale, and the second axis points up"
    first, second, _ = shapes(svg, "path", "chosen series-0")
    assert "".join(first.itertext()) == "1, <first>"
    assert "".join(second.itertext()) == ""
    (x, y), (far_x, far_y) = _starts(first.attrib["d"])[0], _starts(second.attrib["d"])[0]
    assert (x, y + 6) == pytest.approx(((ax + bx) / 2, (ay + cy) / 2), abs=1.1)
    assert (far_x, far_y + 6) == pytest.approx((cx, cy), abs=1.1)
    assert texts(svg) == ["pool", "chosen: a & b"], "a layer without points is not in the legend"


def test_a_scatter_of_equal_points_is_in_the_middle(shapes: Shapes) -> None:
    for count in (1, 3):
        svg = scatter([ScatterLayer("pool", np.full((count, 2), 7.0), "pool", "dot")], "map", width=340)
        path = shapes(svg, "path", "pool")[0].attrib["d"]
        assert _starts(path) == [(170, 170)] * count
    assert scatter([ScatterLayer("pool", np.zeros((0, 2)), "pool", "dot")], "map") == ""


def test_a_histogram_draws_the_part_over_the_whole(shapes: Shapes, texts: Texts) -> None:
    svg = histogram([0, 1, 2], [8, 4], "entropy", str, part=[2, 0], names=("scored", "chosen"))
    whole = [float(bar.attrib["height"]) for bar in shapes(svg, "rect", "bar-old") if "rx" not in bar.attrib]
    part = [float(bar.attrib["height"]) for bar in shapes(svg, "rect", "bar-a") if "rx" not in bar.attrib]
    assert whole[0] == pytest.approx(2 * whole[1], abs=0.2)
    assert part == pytest.approx([whole[0] / 4], abs=0.2)
    assert {"scored", "chosen"} <= set(texts(svg))
    assert svg.index("bar-old") < svg.index("bar-a")


def test_expectations_are_drawn_with_their_intervals_and_a_zero_line(shapes: Shapes, texts: Texts) -> None:
    rows = [Expectation("round 1", 4.0, 2.0, 6.0, 8.0), Expectation("round 2", 1.0, -2.0, 2.0)]
    svg = expectations(rows, "gains", "{:+g}".format)
    ranges = shapes(svg, "rect", "range")
    ends = [(float(entry.attrib["x"]), float(entry.attrib["x"]) + float(entry.attrib["width"])) for entry in ranges]
    marks = [float(entry.attrib["x"]) + 1.5 for entry in shapes(svg, "rect", "expected")[:2]]
    achieved = [float(entry.attrib["cx"]) for entry in shapes(svg, "circle", "deploy")]
    assert len(achieved) == 2, "one is in the legend: the second round is open"
    assert marks[0] == pytest.approx(sum(ends[0]) / 2, abs=0.2)
    unit = (ends[0][1] - ends[0][0]) / 4
    assert ends[1][1] - ends[1][0] == pytest.approx(4 * unit, abs=0.2)
    assert achieved[0] - marks[0] == pytest.approx(4 * unit, abs=0.2)
    (zero,) = shapes(svg, "line", "zero")
    assert float(zero.attrib["x1"]) == pytest.approx(ends[1][0] + 2 * unit, abs=0.2)
    assert {"+4 → +8", "+1", "round 2", "-2", "+0", "+8"} <= set(texts(svg)), "the axis has both its ends"
    assert "round 1: expected +4, +2 to +6; achieved +8" in svg
    assert expectations([], "gains", str) == ""


def test_expectations_of_zero_can_be_drawn(texts: Texts) -> None:
    svg = expectations([Expectation("round 1", 0.0, 0.0, 0.0, 0.0)], "gains", "{:+g}".format, width=340)
    assert "nan" not in svg
    assert "+0 → +0" in texts(svg)


def test_bars_may_each_have_a_colour(shapes: Shapes) -> None:
    svg = bars([("a", 2, "2"), ("b", 1, "1")], "reasons", classes=["series-0", "series-1"])
    (first,), (second,) = shapes(svg, "rect", "series-0"), shapes(svg, "rect", "series-1")
    assert float(first.attrib["width"]) == pytest.approx(2 * float(second.attrib["width"]), abs=0.2)
