"""Charts of a round's selection: positions and items show the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain.report.charts.bars import bars
from posttrain.report.charts.histogram import histogram
from posttrain.report.charts.rounds import Expectation, expectations, intervals
from posttrain.report.charts.scatter import ScatterLayer, scatter

Items = Callable[..., list[dict[str, Any]]]


def test_a_scatter_has_one_scale_and_labels_its_points(items: Items) -> None:
    square = np.array([[0, 0], [4, 0], [4, 2], [0, 2]])
    layers = [
        ScatterLayer("pool", square, "$gray", "dot"),
        ScatterLayer("chosen: a & b", np.array([[2.0, 1.0], [4.0, 2.0]]), "$s0", "diamond", ["1, <first>"]),
        ScatterLayer("none", np.zeros((0, 2)), "$soft", "cross"),
    ]
    chart = scatter(layers, "map")
    assert chart is not None
    assert chart.equal
    assert [item["value"] for item in items(chart, "pool")] == [[0, 0], [1000, 0], [1000, 500], [0, 500]]
    assert (chart.option["xAxis"]["max"], chart.option["yAxis"]["max"]) == (1000, 500)
    first, second = items(chart, "chosen: a & b")
    assert first == {"value": [500, 250], "tip": "1, <first>"}
    assert second == {"value": [1000, 500]}
    assert chart.option["legend"]["data"] == ["pool", "chosen: a & b"], "a layer without points is not in the legend"
    assert list(chart.rows) == [("pool", "4"), ("chosen: a & b", "2")]


@pytest.mark.parametrize("count", [1, 3])
def test_a_scatter_of_equal_points_has_axes_of_some_length(items: Items, count: int) -> None:
    chart = scatter([ScatterLayer("pool", np.full((count, 2), 7.0), "$gray", "dot")], "map")
    assert chart is not None
    assert [item["value"] for item in items(chart)] == [[0, 0]] * count
    assert chart.option["xAxis"]["max"] > chart.option["xAxis"]["min"]
    assert scatter([ScatterLayer("pool", np.zeros((0, 2)), "$gray", "dot")], "map") is None


def test_a_histogram_draws_the_part_over_the_whole(items: Items) -> None:
    chart = histogram([0, 1, 2], [8, 4], "entropy", str, part=[2, 0], names=("scored", "chosen"))
    assert chart is not None
    assert [entry["name"] for entry in chart.option["series"]] == ["scored", "chosen"], "later series are in front"
    assert [item["value"] for item in items(chart, "scored")] == [(0, 1, 8), (1, 2, 4)]
    assert [item["value"] for item in items(chart, "chosen")] == [(0, 1, 2)]
    assert chart.option["legend"]["data"] == ["scored", "chosen"]
    assert list(chart.rows) == [("0", "1", "8", "2"), ("1", "2", "4", "0")]


def test_expectations_are_drawn_with_their_intervals_on_an_axis_with_zero(items: Items) -> None:
    rows = [Expectation("round 1", 4.0, 2.0, 6.0, 8.0), Expectation("round 2", 1.0, -2.0, 2.0)]
    chart = expectations(rows, "gains", "{:+g}".format)
    assert chart is not None
    ranges = [item["value"] for item in items(chart, 0)]
    assert ranges == [(2.0, 0), (6.0, 0), (None, 0), (-2.0, 1), (2.0, 1), (None, 1)]
    expected, achieved = items(chart, "expected, with its interval"), items(chart, "achieved")
    assert [item["value"] for item in expected] == [(4.0, 0), (1.0, 1)]
    assert [item["value"] for item in achieved] == [(8.0, 0)], "the second round is open"
    assert expected[0]["tip"] == "round 1: expected +4, +2 to +6; achieved +8"
    assert expected[1]["tip"].endswith("not achieved yet")
    assert chart.option["yAxis"][1]["data"] == ["+4 → +8", "+1"]
    axis = chart.option["xAxis"]
    assert [text for _, text in axis["texts"]] == ["-2", "+0", "+2", "+4", "+6", "+8"]
    assert (axis["min"], axis["max"], axis["interval"]) == (-2, 8, 2)
    assert list(chart.rows) == [("round 1", "+4", "+2 to +6", "+8"), ("round 2", "+1", "-2 to +2", "–")]
    assert expectations([], "gains", str) is None


def test_measured_intervals_speak_of_no_expectation(items: Items) -> None:
    rows = [Expectation("anna", 0.9, 0.8, 0.95), Expectation("ben", 0.5, 0.4, 0.6)]
    chart = intervals(rows, "gold accuracy", ("person", "value", "interval"), "{:.0%}".format)
    assert chart is not None
    assert [item["tip"] for item in items(chart, "value")] == ["anna: 90%, 80% to 95%", "ben: 50%, 40% to 60%"]
    assert chart.option["yAxis"][1]["data"] == ["90%", "50%"]
    assert chart.columns == ("person", "value", "interval")
    assert list(chart.rows) == [("anna", "90%", "80% to 95%"), ("ben", "50%", "40% to 60%")]
    assert "achieved" not in chart.__html__()
    assert intervals([], "nothing", ("", "", ""), str) is None


def test_expectations_of_zero_can_be_drawn() -> None:
    chart = expectations([Expectation("round 1", 0.0, 0.0, 0.0, 0.0)], "gains", "{:+g}".format)
    assert chart is not None
    assert chart.option["xAxis"]["min"] < chart.option["xAxis"]["max"]
    assert chart.option["yAxis"][1]["data"] == ["+0 → +0"]


def test_bars_may_each_have_a_colour(items: Items) -> None:
    chart = bars([("a", 2, "2"), ("b", 1, "1")], "reasons", colours=["$s0", "$s1"])
    assert [item["itemStyle"] for item in items(chart)] == [{"color": "$s0"}, {"color": "$s1"}]
