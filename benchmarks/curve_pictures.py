"""Draws the learning curves of several strategies as one SVG picture, and saves a chart of a page as a file."""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from posttrain.report.charts.chart import Chart, series_colour, ticks, value_axis


def draw(
    path: Path,
    title: str,
    counts: Sequence[int],
    curves: Mapping[str, np.ndarray],
    peers: Sequence[str],
    target: float,
) -> None:
    """Draw the curves into an SVG file.

    Args:
        path: the SVG file.
        title: the description for screen readers.
        counts: number of labels at each point.
        curves: float64 [seeds, counts] by strategy, drawn as their mean with a band of one standard error.
        peers: the strategies that are not ours; their lines are dashed.
        target: the accuracy at which a horizontal line is drawn.
    """
    save_chart(curves_chart(title, counts, curves, peers, target), path, 860)


def curves_chart(
    title: str, counts: Sequence[int], curves: Mapping[str, np.ndarray], peers: Sequence[str], target: float
) -> Chart:
    """Build the chart of `draw`; its table has the means."""
    means = {name: values.mean(axis=0) for name, values in curves.items()}
    errors = {name: values.std(axis=0, ddof=1) / len(values) ** 0.5 for name, values in curves.items()}
    all_means = np.concatenate(list(means.values()))
    names = sorted(means, key=lambda name: -means[name].mean())
    series: list[dict[str, object]] = []
    for rank, name in enumerate(names):
        colour = "$gray" if name == "random" else series_colour(rank)
        style = {"color": colour, "width": 2, "type": [6, 4] if name in peers else "solid"}
        data = list(zip(counts, means[name], strict=True))
        series.append(
            {"type": "line", "name": name, "data": data, "symbol": "none", "lineStyle": style, "color": colour}
        )
        # A band is the difference between two stacked lines that are not drawn themselves.
        lower, width = means[name] - errors[name], 2 * errors[name]
        for values, opacity in ((lower, 0), (width, 0.12)):
            series.append(
                {
                    **{"type": "line", "name": "", "stack": name, "symbol": "none", "silent": True},
                    **{"data": list(zip(counts, values, strict=True)), "lineStyle": {"opacity": 0}},
                    **{"areaStyle": {"color": colour, "opacity": opacity}, "stackStrategy": "all"},
                }
            )
    line = {"color": "$soft", "type": [2, 3]}
    marks = {"symbol": "none", "silent": True, "lineStyle": line, "label": {"show": False}, "data": [{"yAxis": target}]}
    series[0]["markLine"] = marks
    levels = ticks(float(all_means.min()), float(all_means.max()), 6)
    option = {
        "xAxis": {"type": "value", "min": counts[0], "max": counts[-1], "name": "labels", "nameLocation": "middle"},
        "yAxis": value_axis(levels, "{:.0%}".format),
        "tooltip": {"trigger": "axis"},
        "legend": {"data": names},
        "series": series,
    }
    rows = [(name, *(f"{value:.3f}" for value in means[name])) for name in names]
    return Chart(title, option, 400, ("strategy", *map(str, counts)), rows)


def save_chart(chart: Chart, path: Path, width: int = 760) -> None:
    """Save a chart as an SVG file for light and dark, drawn by Chromium as on a page."""
    from playwright.sync_api import sync_playwright

    static = files("posttrain.web").joinpath("static")
    style = static.joinpath("charts.css").read_text("utf-8")
    scripts = [static.joinpath(*name).read_text("utf-8") for name in (("echarts", "echarts.min.js"), ("charts.js",))]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "chart.html"
        tags = "".join(f"<script>{script}</script>" for script in scripts)
        body = f"<style>{style} body {{ margin: 0 }}</style>{chart.__html__()}{tags}"
        page.write_text(f'<!doctype html><meta charset="utf-8">{body}', encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light", reduced_motion="reduce")
        view.goto(page.as_uri())
        view.locator(".plot svg").wait_for()
        svg = view.evaluate("posttrainCharts.drawn.values().next().value.chart.renderToSVGString()")
        browser.close()
    path.write_text(_follow_scheme(svg, style), encoding="utf-8")


def _follow_scheme(svg: str, style: str) -> str:
    """Replace the colours of the light palette by its custom properties, which differ in the dark."""
    for name, colour in re.findall(r"--([\w-]+): (#\w{6})", style.split("@media")[0]):
        svg = svg.replace(colour, f"var(--{name})")
    palettes = re.findall(r"\.chart \{\s*((?:--[\w-]+: #\w+;\s*)+)", style)
    rules = f"svg {{ {palettes[0]} }} @media (prefers-color-scheme: dark) {{ svg {{ {palettes[1]} }} }}"
    start = svg.index(">") + 1
    # Viewers show a bare SVG on black or white: the chart brings its own paper.
    paper = '<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>'
    return f"{svg[:start]}<style>{rules}</style>{paper}{svg[start:]}\n"
