"""The items of a chart's series."""

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.report.charts.chart import Chart


def _items(chart: Chart | None, name: str | int = 0) -> list[dict[str, Any]]:
    assert chart is not None
    series = chart.option["series"]
    (entry,) = [series[name]] if isinstance(name, int) else [entry for entry in series if entry["name"] == name]
    return [item if isinstance(item, dict) else {"value": item} for item in entry["data"]]


@pytest.fixture(scope="session")
def items() -> Callable[..., list[dict[str, Any]]]:
    """``items(chart, series)``: the items of a series, given by its name or its place."""
    return _items
