"""Curves of a training: nothing of note is lost when they are thinned, and places tell the numbers."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from posttrain.web.charts.curve import Annotation, CurveStyle, curve, downsample, smooth, smoothing_window
from posttrain.web.charts.heat_map import strips

SVG = "{http://www.w3.org/2000/svg}"
Shapes = Callable[[str, str, str], list[ElementTree.Element]]
Words = Callable[[str], list[str]]
PLAIN = CurveStyle(lambda value: f"{value:.4g}")
values_of = some.lists(
    some.one_of(some.just(float("nan")), some.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=400
)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


@given(values_of, some.integers(1, 60))
def test_thinning_keeps_every_spike_and_the_order(values: list[float], buckets: int) -> None:
    steps, held = np.arange(len(values), dtype=np.float64), np.array(values)
    thin_steps, thin_values = downsample(steps, held, buckets)
    assert len(thin_values) <= 2 * buckets
    assert list(thin_steps) == sorted(set(thin_steps))
    assert np.array_equal(thin_values, held[thin_steps.astype(int)], equal_nan=True)
    known = held[~np.isnan(held)]
    if known.size:
        assert (np.nanmin(thin_values), np.nanmax(thin_values)) == (known.min(), known.max())
    else:
        assert np.isnan(thin_values).all()


@given(values_of, some.integers(0, 20))
def test_a_mean_is_a_mean_of_what_is_around(values: list[float], half: int) -> None:
    held = np.array(values)
    result = smooth(held, 2 * half + 1)
    assert np.array_equal(np.isnan(result), np.isnan(held))
    for at in np.flatnonzero(~np.isnan(held)):
        reach = min(half, at, len(held) - 1 - at)
        around = held[at - reach : at + reach + 1]
        assert result[at] == pytest.approx(np.nanmean(around), abs=1e-3)


def test_smoothing_leaves_a_straight_line_as_it_is() -> None:
    line = np.linspace(3.0, -2.0, 101)
    assert smooth(line, 21) == pytest.approx(line)
    assert smoothing_window(29) == 1
    assert smoothing_window(3000) == 101


def test_a_curve_rises_where_its_values_do(shapes: Shapes) -> None:
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


def test_noisy_steps_get_a_mean_and_single_steps_a_dot(shapes: Shapes) -> None:
    steps = np.arange(200, dtype=np.float64)
    noisy = curve(steps, np.random.default_rng(0).random(200), "loss", PLAIN)
    assert len(shapes(noisy, "path", "step-line")) == len(shapes(noisy, "path", "mean-line")) == 1
    smooth_one = curve(steps, steps, "learning rate", CurveStyle(str, mean=False))
    assert not shapes(smooth_one, "path", "step-line")
    (dot,) = shapes(curve(np.array([7.0]), np.array([2.5]), "loss", PLAIN), "path", "mean-line")
    assert dot.attrib["d"].endswith("h0")


def test_what_is_no_number_breaks_the_line_and_nothing_at_all_is_no_chart(shapes: Shapes) -> None:
    steps = np.arange(5, dtype=np.float64)
    svg = curve(steps, np.array([1.0, 2.0, np.nan, 4.0, 5.0]), "loss", PLAIN)
    (path,) = shapes(svg, "path", "mean-line")
    assert path.attrib["d"].count("M") == 2
    assert "nan" not in svg
    assert curve(steps, np.full(5, np.nan), "mfu", PLAIN) == ""


def test_a_spike_does_not_flatten_the_rest_and_is_counted(shapes: Shapes, words: Words) -> None:
    steps = np.arange(300, dtype=np.float64)
    values = 1 + 0.1 * np.sin(steps)
    values[150] = 1000.0
    svg = curve(steps, values, "gradient norm", PLAIN)
    assert "1 above" in words(svg)
    ys = [y for _, y in points(shapes(svg, "path", "step-line")[0].attrib["d"])]
    assert np.ptp(ys[:100]) > 10, "the sine can still be seen"
    assert "highest 1000 at step 150" in svg
    assert "above" not in " ".join(words(curve(steps, steps, "lr", PLAIN)))


@pytest.mark.parametrize("value", [0.0, 1e-4, 5.0, -3.0])
def test_a_constant_has_an_axis(shapes: Shapes, words: Words, value: float) -> None:
    svg = curve(np.arange(4.0), np.full(4, value), "learning rate", PLAIN)
    (path,) = shapes(svg, "path", "mean-line")
    assert len({y for _, y in points(path.attrib["d"])}) == 1
    assert f"lowest {value:.4g} at" in svg
    low, *_ = (float(word) for word in words(svg) if re.fullmatch(r"-?[\d.e-]+", word))
    assert low <= value


def test_decisions_are_marked_at_their_steps(shapes: Shapes, words: Words) -> None:
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
    assert len(lines) == 2, "those of one step are one line"
    assert {"1", "3"} <= set(words(svg))
    assert "1: too large: left out; 2: again" in svg
    assert "<b>" not in svg


def test_a_hundred_thousand_steps_stay_small() -> None:
    steps = np.arange(100_000, dtype=np.float64)
    svg = curve(steps, np.random.default_rng(0).random(100_000), "loss", PLAIN)
    assert len(svg) < 40_000


def test_strips_darken_with_the_norm(shapes: Shapes, words: Words) -> None:
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
    assert sum(len(result) for result in runs.values()) == 3, "what is dead stays empty"
    assert {"layers.0", "layers.1", "dead", "0.001", "1"} <= set(words(svg))
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
