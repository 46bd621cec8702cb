"""Charts are well-formed SVG; lengths and positions show the numbers."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from posttrain.web.charts.bars import bars, format_seconds, funnel, stacked_bars
from posttrain.web.charts.heat_map import heat_map
from posttrain.web.charts.lineage import LineageNode, lineage
from posttrain.web.charts.rounds import CurvePoint, learning_curve_chart
from posttrain.web.charts.svg import ticks
from posttrain.web.formatting import metric_text, points_text
from posttrain.web.report import learning_curve_svg, render_report
from posttrain.web.report_data import GainRow, Report

pytestmark = pytest.mark.slow

Shapes = Callable[[str, str, str], list[ElementTree.Element]]
Texts = Callable[[str], list[str]]


def _numbers(elements: list[ElementTree.Element], name: str) -> list[float]:
    return [float(shape.attrib[name]) for shape in elements]


def test_bars_are_as_long_as_their_values(shapes: Shapes, texts: Texts) -> None:
    svg = bars([("a & b", 4, "4"), ("c", 1, "1"), ("none", 0, "0")], "counts")
    first, second, third = _numbers(shapes(svg, "rect", "bar-a"), "width")
    assert first == pytest.approx(4 * second, rel=1e-2)
    assert third == 0
    assert "a & b" in texts(svg)
    (width,) = _numbers(shapes(bars([("x", 0.5, "")], "share", full=1.0), "rect", "bar-a"), "width")
    (track_width,) = _numbers(shapes(bars([("x", 0.5, "")], "share", full=1.0), "rect", "track"), "width")
    assert width == pytest.approx(track_width / 2, abs=0.1)


def test_the_curve_marks_decisions_and_the_champions_line_moves_only_at_deployments(
    shapes: Shapes, texts: Texts
) -> None:
    points = [
        CurvePoint("round 0", "", 0.1, (0.1,), "baseline"),
        CurvePoint("round 1", "", 0.8, (0.8,), "deploy", "better", (0.7, 0.9)),
        CurvePoint("round 2", "", 0.5, (0.8,), "refuse"),
        CurvePoint("round 3", "", 0.85, (0.8,), "refuse"),
        CurvePoint("round 4", "", 0.3, (0.1,), "rollback"),
    ]
    svg = learning_curve_chart(points, "accuracy")
    marks = (("rect", "baseline", 1), ("circle", "deploy", 1), ("path", "refuse", 2), ("path", "rollback", 1))
    for tag, class_, count in marks:
        assert len(shapes(svg, tag, class_)) == count + 1, class_  # and one in the legend
    (step,) = shapes(svg, "path", "champion")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)H", step.attrib["d"])]
    assert heights[1] == heights[2] == heights[3] < heights[0] == heights[4]
    (mark, _) = shapes(svg, "circle", "deploy")
    assert float(mark.attrib["cy"]) == pytest.approx(heights[1], abs=0.1)
    bar = shapes(svg, "line", "error")[0]
    low, high = float(bar.attrib["y1"]), float(bar.attrib["y2"])
    assert high < float(mark.attrib["cy"]) < low
    assert {"10.0%", "80.0%", "50.0%", "85.0%", "30.0%", "refused", "rolled back"} <= set(texts(svg))


def test_the_champions_line_moves_between_rounds_and_has_a_gap_where_the_value_is_unknown(shapes: Shapes) -> None:
    points = [
        CurvePoint("round 0", "", 0.1, (0.1,), "baseline"),
        CurvePoint("round 1", "", 0.8, (0.8, 0.1), "deploy"),
        CurvePoint("round 2", "", 0.5, (0.1, None), "refuse"),
        CurvePoint("round 3", "", 0.5, (), "refuse"),
        CurvePoint("round 4", "", 0.9, (0.9,), "deploy"),
    ]
    (step,) = shapes(learning_curve_chart(points, "accuracy"), "path", "champion")
    segments = re.findall(r"([ML])([\d.]+) ([\d.]+)H([\d.]+)", step.attrib["d"])
    assert [pen for pen, *_ in segments] == ["M", "L", "L", "L", "M"]
    starts, heights, ends = ([float(segment[column]) for segment in segments] for column in (1, 2, 3))
    assert heights[0] == heights[2] == heights[3] > heights[1] > heights[4]
    spacing = starts[1] - starts[0]
    widths = [end - start for start, end in zip(starts, ends, strict=True)]
    assert widths == pytest.approx([spacing, spacing / 2, spacing / 2, spacing / 2, spacing / 2], abs=0.2)
    assert starts[4] == pytest.approx(starts[0] + 4 * spacing, abs=0.2)


@pytest.mark.parametrize(
    ("plotted", "paired", "text", "has_interval"),
    [
        ("accuracy", "accuracy", "accuracy over the champion: +43.4 points (90% interval +37.1 to +49.7", True),
        ("token_f1", "token_f1", "token F1 over the champion: +43.4 points (90% interval +37.1 to +49.7", True),
        ("score", "score", "score over the champion: +0.434 (90% interval +0.371 to +0.497", True),
        ("perplexity", "log_likelihood", "log likelihood over the champion: +0.434 (90% interval +0.371", False),
    ],
)
def test_a_gain_is_shown_in_its_own_unit_and_drawn_only_over_its_own_metric(
    shapes: Shapes, report: Report, plotted: str, paired: str, text: str, has_interval: bool
) -> None:
    gain = GainRow(0.434, 0.371, 0.497, 300, paired, 0.9)
    before, after = (
        dataclasses.replace(row, metrics={plotted: value}, interval=interval)
        for row, value, interval in zip(report.rounds, (0.113, 0.547), (None, gain), strict=False)
    )
    gain_report = dataclasses.replace(report, metric=plotted, rounds=(before, after))
    curve = learning_curve_svg(gain_report)
    assert f"deployed, gain in {text}" in curve
    assert len(shapes(curve, "line", "error")) == (3 if has_interval else 0)
    page = render_report(gain_report)
    assert page.count(f"gain in {text}") == 3, "at both widths of the curve, and in the list of decisions"
    assert ("90% paired bootstrap interval" in page) is has_interval
    assert "95% interval" not in page


def test_the_curve_handles_one_round_and_no_round(texts: Texts) -> None:
    svg = learning_curve_chart(
        [CurvePoint("round 0", "", 3.0, (3.0,), "baseline")], "perplexity", percent=False, width=340
    )
    assert "3" in texts(svg)
    assert "nan" not in svg
    assert learning_curve_chart([], "nothing") == ""


def test_a_funnel_shows_rejected_and_kept_records(shapes: Shapes, texts: Texts) -> None:
    svg = funnel(200, [("twice", 50), ("leaked", 30), ("empty", 0)], "pool")
    (kept_bar,) = shapes(svg, "rect", "bar-kept")
    (input_bar,) = shapes(svg, "rect", "bar-a")
    start, whole = float(input_bar.attrib["x"]), float(input_bar.attrib["width"])
    assert float(kept_bar.attrib["width"]) == pytest.approx(0.6 * whole, rel=1e-2)
    cuts = shapes(svg, "rect", "cut")
    ends = [x + width for x, width in zip(_numbers(cuts, "x"), _numbers(cuts, "width"), strict=True)]
    assert ends[0] == pytest.approx(start + whole, abs=0.2)
    assert float(cuts[1].attrib["x"]) == pytest.approx(start + 0.6 * whole, abs=0.2)
    assert {"200", "−50", "−30", "0", "120"} <= set(texts(svg))
    assert "120" not in texts(funnel(0, [], "nothing"))


def test_stacked_bars_add_up_to_their_total(shapes: Shapes, texts: Texts) -> None:
    svg = stacked_bars([("r0", {"train": 30.0}), ("r1", {"score": 20.0, "train": 40.0})], ["score", "train"], "time")
    score = _numbers(shapes(svg, "rect", "series-0"), "width")
    train = _numbers(shapes(svg, "rect", "series-1"), "width")
    assert train[1] == pytest.approx(2 * score[0], rel=1e-2)
    assert train[1] == pytest.approx(train[0] * 4 / 3, rel=1e-2)
    assert {"30 s", "1 min 00 s", "score", "train"} <= set(texts(svg))


def test_a_heat_map_shows_every_count_and_darkens_with_it(shapes: Shapes, texts: Texts) -> None:
    counts = {("a", "b"): 8, ("b", "a"): 2, ("a", "a"): 90}
    svg = heat_map(counts, ["a", "b"], ["a", "b"], "confusion")
    assert [cell.attrib["fill-opacity"] for cell in shapes(svg, "rect", "heat")] == ["1.00", "0.25"]
    assert len(shapes(svg, "rect", "same")) == 2
    assert {"8", "2", "90"} <= set(texts(svg))
    assert heat_map({}, [], [], "nothing") == ""


def test_lineage_puts_parents_left_of_their_children(shapes: Shapes) -> None:
    nodes = [
        LineageNode("m", "round 1", "model", True),
        LineageNode("d", "train@v1", "dataset"),
        LineageNode("f", "f.csv", "file"),
    ]
    svg = lineage(nodes, [("f", "d"), ("d", "m")], "lineage")
    boxes = {kind: shapes(svg, "rect", f"node {kind}")[0] for kind in ("file", "dataset", "model marked")}
    left_edges = _numbers(list(boxes.values()), "x")
    assert left_edges == sorted(left_edges)
    assert len(shapes(svg, "path", "edge")) == 1
    assert len(shapes(svg, "path", "edge marked")) == 1
    with pytest.raises(ValueError, match="no node"):
        lineage(nodes, [("f", "missing")], "lineage")
    with pytest.raises(ValueError, match="no known kind"):
        lineage([LineageNode("x", "x", "planet")], [], "lineage")


def test_a_browser_shows_the_curve_as_an_image(report: Report, browser: Browser, tmp_path: Path) -> None:
    svg = learning_curve_svg(report)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    (tmp_path / "curve.svg").write_text(svg, encoding="utf-8")
    (tmp_path / "page.html").write_text('<img src="curve.svg">', encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("[document.images[0].naturalWidth, document.images[0].complete]") == [760, True]
    page.close()


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 0.85, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 0.1, [0, 0.02, 0.04, 0.06, 0.08, 0.1]), (3, 3, [3])],
)
def test_ticks_are_round_numbers_that_enclose_the_range(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high, 5) == marks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (312, "5 min 12 s"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations_are_written_in_readable_units(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_metrics_are_written_in_their_units() -> None:
    assert metric_text("accuracy", 0.853) == "85.3%"
    assert metric_text("safety.invalid_rate", 0.02) == "2.0%"
    assert metric_text("latency_p99", 0.0613) == "61 ms"
    assert metric_text("perplexity", 12.345) == "12.35"
    assert points_text(-0.122) == "−12.2"


def test_the_random_baseline_is_a_separate_line(shapes: Shapes) -> None:
    points = [
        CurvePoint(f"round {number}", "", value, (value,), "deploy", random_baseline=random)
        for number, (value, random) in enumerate([(0.2, 0.2), (0.6, 0.4), (0.8, None)])
    ]
    svg = learning_curve_chart(points, "accuracy")
    (line,) = shapes(svg, "path", "random-line")
    assert line.get("d", "").count("L") == 1, "two rounds, as the third has none yet"
    assert "round 1, drawn at random: 40.0%" in svg
    assert "drawn at random" not in learning_curve_chart(
        [CurvePoint("round 0", "", 0.2, (0.2,), "baseline")], "accuracy"
    )
