"""Charts as inline SVG: pure functions, no scripts, nothing loaded, one style sheet for light and dark."""

from posttrain.web.charts.bars import bars, count_rows, format_seconds, series_class, stacked_bars
from posttrain.web.charts.curve import Annotation, CurveStyle, curve
from posttrain.web.charts.expectations import Expectation, expectations
from posttrain.web.charts.funnel import funnel
from posttrain.web.charts.heat_map import heat_map
from posttrain.web.charts.histogram import histogram
from posttrain.web.charts.lineage import LineageNode, lineage
from posttrain.web.charts.paired_bars import paired_bars
from posttrain.web.charts.rounds import DECISION_NAMES, CurvePoint, learning_curve_chart
from posttrain.web.charts.scatter import ScatterLayer, scatter
from posttrain.web.charts.strips import strips
from posttrain.web.charts.svg import chart_style, standalone

__all__ = [
    "DECISION_NAMES",
    "Annotation",
    "CurvePoint",
    "CurveStyle",
    "Expectation",
    "LineageNode",
    "ScatterLayer",
    "bars",
    "chart_style",
    "count_rows",
    "curve",
    "expectations",
    "format_seconds",
    "funnel",
    "heat_map",
    "histogram",
    "learning_curve_chart",
    "lineage",
    "paired_bars",
    "scatter",
    "series_class",
    "stacked_bars",
    "standalone",
    "strips",
]
