"""Curves of a training: downsampling keeps every spike, and positions show the numbers."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.web.charts.curve import Annotation, CurveStyle, curve, downsample, smooth, smoothing_window
from posttrain.web.charts.heat_map import strips

SVG = "{http://www.w3.org/2000/svg}"
Shapes = Callable[[str, str, str], list[ElementTree.Element]]
Texts = Callable[[str], list[str]]
PLAIN = CurveStyle(lambda value: f"{value:.4g}")
values_with_nan = st.lists(
    st.one_of(st.just(float("nan")), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=400
)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


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


def test_a_curve_follows_its_values(shapes: Shapes) -> None:
    steps = np.arange(10, 20, dtype=np.float64)
    svg = curve(steps, np.array([4.0, 3, 2, 1, 0, 1, 2, 3, 4, 5]), "loss", PLAIN)
    (path,) = shapes(svg, "path", "mean-line")
    result = points(path.attrib["d"])
    xs, ys = [x for x, _ in result], [y for _, y in result]
    assert np.diff(xs) == pytest.approx(np.full(9, (xs[-1] - xs[0]) / 9), abs=0.2)
    assert ys[4] == max(ys)
    assert ys[0] == ys[8]
    assert ys[9] - ys[8] == pytest.approx(ys[3] - ys[4], abs=0.2)
    title = ElementTree.fromstring(svg).findtext(f"{SVG}title")
    assert title == "loss by step: 4 at step 10, 5 at step 19; lowest 0 at step 14, highest 5 at step 19"


def test_noisy_values_have_a_mean_line_and_a_single_value_is_a_dot(shapes: Shapes) -> None:
    steps = np.arange(200, dtype=np.float64)
    noisy_line = curve(steps, np.random.default_rng(0).random(200), "loss", PLAIN)
    assert len(shapes(noisy_line, "path", "step-line")) == len(shapes(noisy_line, "path", "mean-line")) == 1
    smooth_line = curve(steps, steps, "learning rate", CurveStyle(str, mean=False))
    assert not shapes(smooth_line, "path", "step-line")
    (dot,) = shapes(curve(np.array([7.0]), np.array([2.5]), "loss", PLAIN), "path", "mean-line")
    assert dot.attrib["d"].endswith("h0")


def test_nan_breaks_the_line_and_only_nan_gives_no_chart(shapes: Shapes) -> None:
    steps = np.arange(5, dtype=np.float64)
    svg = curve(steps, np.array([1.0, 2.0, np.nan, 4.0, 5.0]), "loss", PLAIN)
    (path,) = shapes(svg, "path", "mean-line")
    assert path.attrib["d"].count("M") == 2
    assert "nan" not in svg
    assert curve(steps, np.full(5, np.nan), "mfu", PLAIN) == ""


def test_a_spike_is_cut_off_and_counted(shapes: Shapes, texts: Texts) -> None:
    steps = np.arange(300, dtype=np.float64)
    values = 1 + 0.1 * np.sin(steps)
    values[150] = 1000.0
    svg = curve(steps, values, "gradient norm", PLAIN)
    assert "1 above" in texts(svg)
    ys = [y for _, y in points(shapes(svg, "path", "step-line")[0].attrib["d"])]
    assert np.ptp(ys[:100]) > 10, "the sine can still be seen"
    assert "highest 1000 at step 150" in svg
    assert "above" not in " ".join(texts(curve(steps, steps, "lr", PLAIN)))


@pytest.mark.parametrize("value", [0.0, 1e-4, 5.0, -3.0])
def test_a_constant_has_an_axis(shapes: Shapes, texts: Texts, value: float) -> None:
    svg = curve(np.arange(4.0), np.full(4, value), "learning rate", PLAIN)
    (path,) = shapes(svg, "path", "mean-line")
    assert len({y for _, y in points(path.attrib["d"])}) == 1
    assert f"lowest {value:.4g} at" in svg
    lowest_tick, *_ = (float(text) for text in texts(svg) if re.fullmatch(r"-?[\d.e-]+", text))
    assert lowest_tick <= value


def test_decisions_are_marked_at_their_steps(shapes: Shapes, texts: Texts) -> None:
    steps = np.arange(101, dtype=np.float64)
    marks = [
        Annotation(50, 1, "too large: left out"),
        Annotation(50, 2, "again"),
        Annotation(75, 3, "<b>"),
        Annotation(999, 4, "elsewhere"),
    ]
    svg = curve(steps, steps, "loss", PLAIN, marks=marks)
    lines = shapes(svg, "line", "mark-line")
    (path,) = shapes(svg, "path", "step-line")
    ends = points(path.attrib["d"])
    middle = (ends[0][0] + ends[-1][0]) / 2
    assert float(lines[0].attrib["x1"]) == pytest.approx(middle, abs=0.2)
    assert len(lines) == 2, "marks of the same step share one line"
    assert {"1", "3"} <= set(texts(svg))
    assert "1: too large: left out; 2: again" in svg
    assert "<b>" not in svg


def test_a_hundred_thousand_steps_stay_small() -> None:
    steps = np.arange(100_000, dtype=np.float64)
    svg = curve(steps, np.random.default_rng(0).random(100_000), "loss", PLAIN)
    assert len(svg) < 40_000


def test_strips_darken_with_the_norm(shapes: Shapes, texts: Texts) -> None:
    steps = np.arange(96, dtype=np.float64)
    series = {"layers.0": np.full(96, 1e-3), "layers.1": np.full(96, 1.0), "dead": np.zeros(96)}
    series["layers.1"][48:] = 1e-3
    svg = strips(steps, series, "gradient norm by layer")
    fills = {shape.attrib["fill-opacity"]: shape.attrib["d"] for shape in shapes(svg, "path", "heat")}
    runs = {opacity: re.findall(r"M([\d.]+) (\d+)h([\d.]+)", path) for opacity, path in fills.items()}
    (dark,) = runs["1.00"]
    light = runs["0.08"]
    assert len(light) == 2
    assert float(dark[2]) == pytest.approx(float(light[0][2]) / 2, rel=0.01), "half of the steps"
    assert dark[1] == light[1][1], "in the second row"
    assert sum(len(result) for result in runs.values()) == 3, "rows of zeros stay empty"
    assert {"layers.0", "layers.1", "dead", "0.001", "1"} <= set(texts(svg))
    assert "layers.0: median 0.001, from 0.001 to 0.001" in svg


def test_strips_of_a_deep_model_and_of_nothing() -> None:
    steps = np.arange(2000, dtype=np.float64)
    rng = np.random.default_rng(0)
    deep = {f"layers.{number}": np.exp(rng.standard_normal(2000)) for number in range(80)}
    svg = strips(steps, deep, "gradient norm by layer", width=340)
    assert len(svg) < 120_000
    ElementTree.fromstring(svg)
    assert strips(steps, {}, "nothing") == ""
    assert strips(steps, {"a": np.full(2000, np.nan)}, "nothing") == ""
