"""Charts of a dataset's page: items and tables show the numbers."""

from collections.abc import Callable
from typing import Any

from posttrain.report.charts.bars import bars, funnel, paired_bars
from posttrain.report.charts.histogram import histogram

Items = Callable[..., list[dict[str, Any]]]


def test_bars_of_a_histogram_reach_from_edge_to_edge(items: Items) -> None:
    chart = histogram([0, 10, 20, 30], [4, 0, 1], "length", str, above=7)
    assert chart is not None
    assert [item["value"] for item in items(chart)] == [(0, 10, 4), (20, 30, 1)]
    assert [item["tip"] for item in items(chart)] == ["0 to 10: 4 records", "20 to 30: 1 record"]
    assert (chart.heading, chart.note) == ("length", "7 above 30.0")
    assert "12 records from 0.0 to 30.0, 7 above 30.0" in chart.title
    assert list(chart.rows) == [("0", "10", "4"), ("20", "30", "1")]
    assert histogram([0, 1], [0], "nothing", str) is None


def test_counts_have_whole_levels() -> None:
    chart = histogram([0, 1], [1], "length", str)
    assert chart is not None
    assert all(level == int(level) for level, _ in chart.option["yAxis"]["texts"])


def test_a_funnel_shows_added_records(items: Items) -> None:
    chart = funnel(100, [("short", 20), ("augmented", -50), ("duplicate", 10)], "records")
    assert chart.option["yAxis"][1]["data"] == ["100", "−20", "+50", "−10", "120"]
    assert [item["value"] for item in items(chart, "before")] == [0, 80, 80, 120, 0]
    added = items(chart, "records")[2]
    assert (added["value"], added["itemStyle"]) == (50, {"color": "$blue"})
    assert added["tip"] == "augmented: 50 records added, 50.0% of what came in"
    assert chart.option["xAxis"]["max"] == 130


def test_paired_bars_share_one_scale(items: Items) -> None:
    chart = paired_bars([("a <b>", 0.2, 0.4), ("c", 0.0, 0.1)], "shares", lambda share: f"{share:.0%}")
    assert chart is not None
    assert [item["value"] for item in items(chart, "before")] == [0.2, 0.0]
    assert [item["value"] for item in items(chart, "after")] == [0.4, 0.1]
    assert chart.option["xAxis"]["max"] == 0.4
    assert list(chart.rows) == [("a <b>", "20%", "40%"), ("c", "0%", "10%")]
    assert paired_bars([], "shares", str) is None


def test_marks_are_at_their_values() -> None:
    chart = bars([("a", 0.5, "0.5")], "index", full=1.0, marks=((0.5, "half"), (0.75, "more")))
    assert chart is not None
    marks = chart.option["series"][0]["markLine"]["data"]
    assert [(mark["xAxis"], mark["label"]["formatter"]) for mark in marks] == [(0.5, "half"), (0.75, "more")]
