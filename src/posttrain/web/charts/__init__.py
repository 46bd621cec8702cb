"""Charts as inline SVG: pure functions, no scripts, nothing loaded, one style sheet for light and dark."""

from posttrain.web.charts.bars import bars, count_rows, seconds, series_class, stacked_bars
from posttrain.web.charts.curve import Mark, Style, curve
from posttrain.web.charts.expectations import Expectation, expectations
from posttrain.web.charts.funnel import funnel
from posttrain.web.charts.heat_map import heat_map
from posttrain.web.charts.histogram import histogram
from posttrain.web.charts.line import DECISIONS, CurvePoint, line_chart
from posttrain.web.charts.lineage import Node, lineage
from posttrain.web.charts.paired_bars import paired_bars
from posttrain.web.charts.scatter import Layer, scatter
from posttrain.web.charts.strips import strips
from posttrain.web.charts.svg import chart_style, standalone

__all__ = [
    "DECISIONS",
    "CurvePoint",
    "Expectation",
    "Layer",
    "Mark",
    "Node",
    "Style",
    "bars",
    "chart_style",
    "count_rows",
    "curve",
    "expectations",
    "funnel",
    "heat_map",
    "histogram",
    "line_chart",
    "lineage",
    "paired_bars",
    "scatter",
    "seconds",
    "series_class",
    "stacked_bars",
    "standalone",
    "strips",
]
