"""Charts show the numbers that they are given: in their items, on their axes, and in their tables."""

from collections.abc import Callable
from typing import Any

import pytest
from sample_report import sample_loop, sample_round

from posttrain.report.charts.bars import bars, format_seconds, funnel, stacked_bars
from posttrain.report.charts.chart import Chart, ticks, value_axis
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.charts.histogram import histogram
from posttrain.report.charts.lineage import LineageNode, lineage
from posttrain.report.charts.rounds import CurvePoint, learning_curve_chart
from posttrain.report.formatting import metric_text, number_text, points_text
from posttrain.report.section import Page
from posttrain.web.loop_report import curve_section, decisions_section, learning_curve
from posttrain.web.page import render_page

Items = Callable[..., list[dict[str, Any]]]


def _labels(chart: Chart | None) -> list[str]:
    """The labels in the column at the right of horizontal bars."""
    assert chart is not None
    labels: list[str] = chart.option["yAxis"][1]["data"]
    return labels


def test_bars_have_their_values_names_and_labels(items: Items) -> None:
    chart = bars([("a & b", 4, "4"), ("c", 1, "1"), ("none", 0, "0")], "counts", columns=("class", "labels"))
    assert chart is not None
    assert [item["value"] for item in items(chart)] == [4, 1, 0]
    assert chart.option["yAxis"][0]["data"] == ["a & b", "c", "none"]
    assert _labels(chart) == ["4", "1", "0"]
    assert chart.option["xAxis"]["max"] == 4
    assert (chart.columns, list(chart.rows)) == (("class", "labels"), [("a & b", "4"), ("c", "1"), ("none", "0")])
    share = bars([("x", 0.5, "")], "share", full=1.0)
    assert share is not None
    assert share.option["xAxis"]["max"] == 1.0
    assert bars([], "nothing") is None


def test_the_curve_marks_decisions_and_the_champions_line_moves_only_at_deployments(items: Items) -> None:
    points = [
        CurvePoint("round 0", "", 0.1, (0.1,), "baseline"),
        CurvePoint("round 1", "", 0.8, (0.8,), "deploy", "better", (0.7, 0.9)),
        CurvePoint("round 2", "", 0.5, (0.8,), "refuse"),
        CurvePoint("round 3", "", 0.85, (0.8,), "refuse"),
        CurvePoint("round 4", "", 0.3, (0.1,), "rollback"),
    ]
    chart = learning_curve_chart(points, "accuracy")
    assert chart is not None
    assert [item["value"] for item in items(chart, "refused")] == [(2, 0.5), (3, 0.85)]
    (deployed,) = items(chart, "deployed")
    assert (deployed["value"], deployed["text"], deployed["tip"]) == (
        (1, 0.8),
        "80.0%",
        "round 1: 80.0%, deployed, better",
    )
    for name in ("baseline", "rolled back"):
        assert len(items(chart, name)) == 1
    champion = [item["value"] for item in items(chart, "champion in use")]
    assert champion == [
        *((0.5, 0.1), (1.5, 0.1)),
        *((1.5, 0.8), (2.5, 0.8), (2.5, 0.8), (3.5, 0.8), (3.5, 0.8), (4.5, 0.8)),
        *((4.5, 0.1), (5.0, 0.1)),
    ]
    interval = next(entry for entry in chart.option["series"] if entry.get("symbolSize") == [10, 1.5])
    assert interval["data"] == [(1, 0.7), (1, 0.9), (1, None)]
    assert chart.option["yAxis"]["texts"][0] == (0, "0%")
    names = [entry["name"] for entry in chart.option["legend"]["data"]]
    assert names == ["champion in use", "baseline", "deployed", "refused", "rolled back"]
    shapes = {entry["symbol"] for entry in chart.option["series"] if entry["type"] == "scatter"}
    assert len(shapes) == 4, "decisions differ by shape, and not by colour alone"
    assert chart.rows[1] == ("round 1", "80.0%", "deployed", "better", "80.0%")


def test_the_champions_line_moves_between_rounds_and_has_a_gap_where_the_value_is_unknown(items: Items) -> None:
    points = [
        CurvePoint("round 0", "", 0.1, (0.1,), "baseline"),
        CurvePoint("round 1", "", 0.8, (0.8, 0.1), "deploy"),
        CurvePoint("round 2", "", 0.5, (0.1, None), "refuse"),
        CurvePoint("round 3", "", 0.5, (), "refuse"),
        CurvePoint("round 4", "", 0.9, (0.9,), "deploy"),
    ]
    chart = learning_curve_chart(points, "accuracy")
    assert [item["value"] for item in items(chart, "champion in use")] == [
        *((0.5, 0.1), (1.5, 0.1)),
        *((1.5, 0.8), (2.0, 0.8), (2.0, 0.1), (2.5, 0.1)),
        *((2.5, 0.1), (3.0, 0.1), (3.0, None)),
        (3.5, None),
        *((4.5, 0.9), (5.0, 0.9)),
    ]
    assert chart is not None
    assert [row[4] for row in chart.rows] == ["10.0%", "80.0%, then 10.0%", "10.0%, then unknown", "", "90.0%"]


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
    items: Items, plotted: str, paired: str, text: str, has_interval: bool
) -> None:
    gain = {"difference": 0.434, "low": 0.371, "high": 0.497, "n": 300, "differing": 40, "metric": paired}
    before = sample_round(0, 0, 0, "baseline", {plotted: 0.113})
    after = sample_round(1, 96, 96, "deploy", {plotted: 0.547}, gain)
    loop = sample_loop([before, after], plotted, level=0.9)
    curve = learning_curve(loop)
    assert curve is not None
    assert f"deployed, gain in {text}" in items(curve, "deployed")[0]["tip"]
    intervals = [entry for entry in curve.option["series"] if entry.get("symbolSize") == [10, 1.5]]
    assert len(intervals) == has_interval
    page = render_page(Page("", "", "", [], [curve_section(loop), decisions_section(loop)]))
    assert page.count(f"gain in {text}") == 3, "in the curve's tooltip, in its table, and in the list of decisions"
    assert ("90% paired interval" in page) is has_interval
    assert "95% interval" not in page


def test_the_curve_handles_one_round_and_no_round() -> None:
    chart = learning_curve_chart([CurvePoint("round 0", "", 3.0, (3.0,), "baseline")], "perplexity", percent=False)
    assert chart is not None
    axis = chart.option["yAxis"]
    assert axis["texts"] == [(3.0, "3")]
    assert axis["min"] < axis["max"]
    assert learning_curve_chart([], "nothing") is None


def test_a_funnel_shows_rejected_and_kept_records(items: Items) -> None:
    chart = funnel(200, [("twice", 50), ("leaked", 30), ("empty", 0)], "pool")
    assert [item["value"] for item in items(chart, "before")] == [0, 150, 120, 120, 0]
    assert [item["value"] for item in items(chart, "records")] == [200, 50, 30, None, 120]
    assert _labels(chart) == ["200", "−50", "−30", "0", "120"]
    assert "twice: 50 records, 25.0% of what came in" in [item["tip"] for item in items(chart, "records")]
    assert chart.rows[-1] == ("kept", "120", "60.0%")
    assert "120" not in _labels(funnel(0, [], "nothing"))


def test_stacked_bars_add_up_to_their_total(items: Items) -> None:
    rows = [("r0", {"train": 30.0}), ("r1", {"score": 20.0, "train": 40.0})]
    chart = stacked_bars(rows, ["score", "train"], "time")
    assert chart is not None
    assert [item["value"] for item in items(chart, "train")] == [30, 40]
    assert [item["value"] for item in items(chart, "score")] == [None, 20]
    assert len({entry["stack"] for entry in chart.option["series"]}) == 1
    assert chart.option["legend"]["data"] == ["score", "train"]
    assert chart.option["xAxis"]["max"] == 60
    assert _labels(chart) == ["30 s", "1 min 00 s"]
    assert list(chart.rows) == [("r0", "0 s", "30 s", "30 s"), ("r1", "20 s", "40 s", "1 min 00 s")]
    assert stacked_bars([], ["a"], "nothing") is None


def test_the_heat_map_is_scaled_by_the_mistakes_alone(items: Items) -> None:
    counts = {("a", "b"): 8, ("b", "a"): 2, ("a", "a"): 90}
    chart = heat_map(counts, ["a", "b"], ["a", "b"], "confusion")
    assert chart is not None
    assert chart.option["visualMap"]["max"] == 8
    cells = {item["value"][:2]: item for item in items(chart)}
    assert {place: item["value"][2] for place, item in cells.items()} == {(0, 0): 90, (1, 0): 8, (0, 1): 2, (1, 1): 0}
    assert cells[0, 0]["visualMap"] is cells[1, 1]["visualMap"] is False
    assert "visualMap" not in cells[1, 0]
    assert [cells[place]["text"] for place in ((0, 0), (1, 0), (1, 1))] == ["90", "8", ""]
    assert cells[1, 0]["tip"] == "a answered as b: 8"
    assert list(chart.rows) == [("a", "90", "8"), ("b", "2", "0")]
    assert heat_map({}, [], [], "nothing") is None


def test_lineage_puts_parents_left_of_their_children(items: Items) -> None:
    nodes = [
        LineageNode("m", "round 1", "model", True),
        LineageNode("d", "train@v1", "dataset"),
        LineageNode("e", "train@v2", "dataset"),
        LineageNode("f", "f.csv", "file"),
    ]
    chart = lineage(nodes, [("f", "d"), ("d", "m"), ("f", "e")], "lineage")
    assert chart is not None
    boxes = {item["id"]: item for item in items(chart)}
    assert {id_: box["value"] for id_, box in boxes.items()} == {"f": (0, 0), "d": (1, 0), "e": (1, 1), "m": (2, 0)}
    assert chart.option["xAxis"]["data"] == ["files", "datasets", "models"]
    (series,) = chart.option["series"]
    links = {(link["source"], link["target"]): link["lineStyle"]["color"] for link in series["links"]}
    assert links == {("f", "d"): "$gray", ("d", "m"): "$blue", ("f", "e"): "$gray"}
    assert ("model", "round 1", "m", "train@v1") in chart.rows
    # ECharts would stretch the border of a symbol that is wider than high.
    assert not any("borderWidth" in box["itemStyle"] for box in boxes.values())
    assert [boxes[id_]["label"]["borderColor"] for id_ in "dm"] == ["$edge", "$blue"]
    with pytest.raises(ValueError, match="no node"):
        lineage(nodes, [("f", "missing")], "lineage")
    with pytest.raises(ValueError, match="no known kind"):
        lineage([LineageNode("x", "x", "planet")], [], "lineage")
    assert lineage([], [], "nothing") is None


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


def test_the_random_baseline_is_a_separate_line(items: Items) -> None:
    points = [
        CurvePoint(f"round {number}", "", value, (value,), "deploy", random_baseline=random)
        for number, (value, random) in enumerate([(0.2, 0.2), (0.6, 0.4), (0.8, None)])
    ]
    chart = learning_curve_chart(points, "accuracy")
    drawn = items(chart, "drawn at random")
    assert [item["value"] for item in drawn] == [(0, 0.2), (1, 0.4)], "two rounds, as the third has none yet"
    assert drawn[1]["tip"] == "round 1, drawn at random: 40.0%"
    assert chart is not None
    assert [row[-1] for row in chart.rows] == ["20.0%", "40.0%", ""]
    alone = learning_curve_chart([CurvePoint("round 0", "", 0.2, (0.2,), "baseline")], "accuracy")
    assert alone is not None
    assert "drawn at random" not in str(alone.option) + str(alone.columns)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 12, 25, 99, 1_000, 123_456])
def test_counts_have_whole_levels_that_are_shown_exactly(most: int) -> None:
    chart = histogram([0, 1, 2], [most, 0], "n", lambda value: f"{value:g}")
    assert chart is not None
    axis = chart.option["yAxis"]
    levels = [level for level, _ in axis["texts"]]
    assert [float(text.replace(",", "")) for _, text in axis["texts"]] == levels
    assert all(level == int(level) for level in levels)
    assert levels[-1] >= most


@pytest.mark.parametrize(
    ("high", "show", "unit", "scale"),
    [
        (12.0, "{:,.0f}".format, "", 1),
        (0.1, lambda value: f"{100 * value:.0f}%", "%", 100),
        (0.004, lambda value: f"{100 * value:.0f}%", "%", 100),
        (0.011, lambda value: metric_text("latency_p50", value), " ms", 1000),
        (10_010.0, number_text, "", 1),
        (0.0009, number_text, "", 1),
        (7.3e9, lambda value: f"{value / 1e9:.0f} GB", " GB", 1e-9),
    ],
)
def test_an_axis_shows_its_levels_exactly_whatever_the_formatter_rounds(
    high: float, show: Any, unit: str, scale: float
) -> None:
    for low, count in ((0.0, 4), (0.0, 3), (0.97 * high, 4)):
        texts = value_axis(ticks(low, high, count), show)["texts"]
        for level, text in texts:
            assert text.endswith(unit)
            assert float(text.removesuffix(unit).replace(",", "")) == pytest.approx(scale * level, rel=1e-9, abs=1e-12)
        assert len({text for _, text in texts}) == len(texts)


def test_times_keep_their_words() -> None:
    assert [text for _, text in value_axis([0.0, 50.0, 100.0], format_seconds)["texts"]] == [
        format_seconds(level) for level in (0.0, 50.0, 100.0)
    ]
