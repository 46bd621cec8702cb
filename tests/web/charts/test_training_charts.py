"""Curves of a training: downsampling keeps every spike, and items show the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.report.charts.curve import Annotation, CurveStyle, curve, downsample, smooth, smoothing_window
from posttrain.report.charts.heat_map import strips

Items = Callable[..., list[dict[str, Any]]]
PLAIN = CurveStyle(lambda value: f"{value:.4g}")
values_with_nan = st.lists(
    st.one_of(st.just(float("nan")), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=400
)


@given(values_with_nan, st.integers(1, 60))
def test_downsampling_keeps_every_spike_and_the_order(values: list[float], buckets: int) -> None:
    steps, array = np.arange(len(values), dtype=np.float64), np.array(values)
    thin_steps, thin_values = downsample(steps, array, buckets)
    assert len(thin_values) <= 2 * buckets
    assert list(thin_steps) == sorted(set(thin_steps))
    assert np.array_equal(thin_values, array[thin_steps.astype(int)], equal_nan=True)
    numbers = array[~np.isnan(array)]
    if numbers.size:
        assert (np.nanmin(thin_values), np.nanmax(thin_values)) == (numbers.min(), numbers.max())
    else:
        assert np.isnan(thin_values).all()


@given(values_with_nan, st.integers(0, 20))
def test_smoothing_is_a_centred_mean(values: list[float], half: int) -> None:
    array = np.array(values)
    result = smooth(array, 2 * half + 1)
    assert np.array_equal(np.isnan(result), np.isnan(array))
    for index in np.flatnonzero(~np.isnan(array)):
        reach = min(half, index, len(array) - 1 - index)
        window = array[index - reach : index + reach + 1]
        assert result[index] == pytest.approx(np.nanmean(window), abs=1e-3)


def test_smoothing_keeps_a_straight_line() -> None:
    line = np.linspace(3.0, -2.0, 101)
    assert smooth(line, 21) == pytest.approx(line)
    assert smoothing_window(29) == 1
    assert smoothing_window(3000) == 101


def test_a_curve_has_its_values_and_describes_them(items: Items) -> None:
    steps = np.arange(10, 20, dtype=np.float64)
    values = [4.0, 3, 2, 1, 0, 1, 2, 3, 4, 5]
    chart = curve(steps, np.array(values), "loss", PLAIN)
    assert chart is not None
    assert [item["value"] for item in items(chart)] == list(zip(range(10, 20), values, strict=True))
    assert chart.title == "loss by step: 4 at step 10, 5 at step 19; lowest 0 at step 14, highest 5 at step 19"
    axis = chart.option["xAxis"]
    assert (axis["name"], axis["min"], axis["max"]) == ("step", 10, 19)
    table = [("first", "10", "4"), ("lowest", "14", "0"), ("highest", "19", "5"), ("last", "19", "5")]
    assert (chart.heading, list(chart.rows)) == ("loss", table)


def test_noisy_values_have_a_mean_line_and_a_single_value_is_a_dot(items: Items) -> None:
    steps = np.arange(200, dtype=np.float64)
    noise = np.random.default_rng(0).random(200)
    noisy = curve(steps, noise, "loss", PLAIN)
    assert noisy is not None
    assert len(noisy.option["series"]) == 2
    window = smoothing_window(200)
    mean = dict(item["value"] for item in items(noisy, f"mean of {window}"))
    assert mean[100] == pytest.approx(noise[100 - window // 2 : 101 + window // 2].mean())
    smooth_line = curve(steps, steps, "learning rate", CurveStyle(str, mean=False))
    assert smooth_line is not None
    assert [entry["showSymbol"] for entry in smooth_line.option["series"]] == [False]
    dot = curve(np.array([7.0]), np.array([2.5]), "loss", PLAIN)
    assert dot is not None
    assert [entry["showSymbol"] for entry in dot.option["series"]] == [True]
    assert dot.option["xAxis"]["min"] < 7 < dot.option["xAxis"]["max"]


def test_nan_breaks_the_line_and_only_nan_gives_no_chart(items: Items) -> None:
    steps = np.arange(5, dtype=np.float64)
    chart = curve(steps, np.array([1.0, 2.0, np.nan, 4.0, 5.0]), "loss", PLAIN)
    assert np.isnan([item["value"][1] for item in items(chart)]).tolist() == [False, False, True, False, False]
    assert chart is not None
    html = chart.__html__()
    assert "[2,null]" in html
    assert "NaN" not in html
    assert curve(steps, np.full(5, np.nan), "mfu", PLAIN) is None


def test_a_spike_is_cut_off_and_counted(items: Items) -> None:
    steps = np.arange(300, dtype=np.float64)
    values = 1 + 0.1 * np.sin(steps)
    values[150] = 1000.0
    chart = curve(steps, values, "gradient norm", PLAIN)
    assert chart is not None
    assert chart.note == "1 above"
    assert chart.option["yAxis"]["max"] < 3, "the sine can still be seen"
    assert (150, 1000.0) in [item["value"] for item in items(chart, "each step")]
    assert "highest 1000 at step 150" in chart.title
    plain = curve(steps, steps, "lr", PLAIN)
    assert plain is not None
    assert plain.note == ""


@pytest.mark.parametrize("value", [0.0, -0.5, 3.25, 1e-9])
def test_a_constant_curve_has_an_axis(value: float) -> None:
    chart = curve(np.arange(3, dtype=np.float64), np.full(3, value), "margin", CurveStyle(PLAIN.show, zero=False))
    assert chart is not None
    axis = chart.option["yAxis"]
    assert axis["min"] <= value <= axis["max"]
    assert axis["min"] < axis["max"]
    assert f"lowest {value:.4g} at" in chart.title


def test_decisions_are_marked_at_their_steps() -> None:
    steps = np.arange(101, dtype=np.float64)
    marks = [
        Annotation(50, 1, "too large: left out"),
        Annotation(50, 2, "again"),
        Annotation(75, 3, "<b>"),
        Annotation(77, 4, "near"),
        Annotation(999, 5, "elsewhere"),
    ]
    chart = curve(steps, steps, "loss", PLAIN, marks=marks)
    assert chart is not None
    lines = chart.option["series"][-1]["markLine"]["data"]
    assert [line["xAxis"] for line in lines] == [50, 75, 77], "marks of the same step share one line"
    assert [line["label"] for line in lines] == [
        {"show": True, "formatter": "1"},
        {"show": True, "formatter": "3"},
        {"show": False, "formatter": "4"},
    ]
    assert lines[0]["tip"] == "1: too large: left out; 2: again"
    assert "<b>" not in chart.__html__()


def test_many_steps_have_a_slider_and_small_charts_zoom_without() -> None:
    steps = np.arange(500, dtype=np.float64)
    large, small = curve(steps, steps, "loss", PLAIN), curve(steps, steps, "loss", PLAIN, small=True)
    assert large is not None
    assert small is not None
    assert [zoom["type"] for zoom in large.option["dataZoom"]] == ["inside", "slider"]
    assert [zoom["type"] for zoom in small.option["dataZoom"]] == ["inside"]


def test_a_hundred_thousand_steps_stay_small() -> None:
    steps = np.arange(100_000, dtype=np.float64)
    chart = curve(steps, np.random.default_rng(0).random(100_000), "loss", PLAIN)
    assert chart is not None
    assert len(chart.__html__()) < 25_000


def test_strips_darken_with_the_norm(items: Items) -> None:
    steps = np.arange(96, dtype=np.float64)
    series = {"layers.0": np.full(96, 1e-3), "layers.1": np.full(96, 1.0), "dead": np.zeros(96)}
    series["layers.1"][48:] = 1e-3
    chart = strips(steps, series, "gradient norm by layer")
    assert chart is not None
    cells = {item["value"][:2]: item["value"][2] for item in items(chart)}
    assert cells == {(at, 0): 1e-3 for at in range(48)} | {(at, 1): 1.0 if at < 24 else 1e-3 for at in range(48)}, (
        "rows of zeros stay empty"
    )
    pieces = chart.option["visualMap"]["pieces"]

    def shade(value: float) -> str:
        (colour,) = [piece["color"] for piece in pieces if piece.get("gte", -np.inf) <= value < piece.get("lt", np.inf)]
        return str(colour)

    assert [shade(value) for value in (1e-3, 0.0316, 1.0)] == ["$heat-0", "$heat-2", "$heat-5"]
    assert chart.option["yAxis"]["data"] == ["layers.0", "layers.1", "dead"]
    assert chart.option["xAxis"]["data"][:2] == ["0", "2"]
    assert chart.rows[0] == ("layers.0", "0.001", "0.001", "0.001")


def test_strips_of_a_deep_model_and_of_nothing() -> None:
    steps = np.arange(2000, dtype=np.float64)
    rng = np.random.default_rng(0)
    deep = {f"layers.{number}": np.exp(rng.standard_normal(2000)) for number in range(80)}
    chart = strips(steps, deep, "gradient norm by layer", cells=2000)
    assert chart is not None
    assert len(chart.option["series"][0]["data"]) == 80 * 25
    assert len(chart.__html__()) < 60_000
    assert strips(steps, {}, "nothing") is None
    assert strips(steps, {"a": np.full(2000, np.nan)}, "nothing") is None
