"""Lineage diagram: files, dataset versions, models and deployments in columns, joined by lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.report.charts.chart import Chart, Option
from posttrain.store.message import Message

COLUMNS = {
    "file": Message("files"),
    "dataset": Message("datasets"),
    "model": Message("models"),
    "deployment": Message("deployed"),
}
"""Kinds of nodes, with the titles of their columns."""

_ROW = 52


@dataclass(frozen=True)
class LineageNode:
    """A node of the diagram; ``marked`` if it is, or leads to, the present champion."""

    id: str
    label: str
    kind: str
    marked: bool = False


def lineage(nodes: Sequence[LineageNode], edges: Sequence[tuple[str, str]], title: str) -> Chart | None:
    """Draws boxes in the columns of their kinds, and a line from each parent to its child.

    Raises:
        ValueError: an edge names no node, or a node is of no known kind.
    """
    nodes_by_id = {node.id: node for node in nodes}
    for node in nodes:
        if node.kind not in COLUMNS:
            raise ValueError(f"node {node.id} is of no known kind: {node.kind}")
    for parent, child in edges:
        if parent not in nodes_by_id or child not in nodes_by_id:
            raise ValueError(f"edge {parent} → {child} names no node")
    kinds = [kind for kind in COLUMNS if any(node.kind == kind for node in nodes)]
    if not kinds:
        return None
    # Column by column from the left: a node is sorted by its parents, which have rows then.
    rows: dict[str, int] = {}
    for kind in kinds:
        column = _sorted_by_parents([node for node in nodes if node.kind == kind], edges, rows)
        rows |= {node.id: row for row, node in enumerate(column)}
    boxes = [_box(nodes_by_id[id_], kinds.index(nodes_by_id[id_].kind), row) for id_, row in rows.items()]
    count = max(rows.values()) + 1
    option: Option = {
        "grid": {"top": 4, "left": 0, "right": 0, "bottom": 0},
        "xAxis": {
            **{"type": "category", "position": "top", "data": [COLUMNS[kind] for kind in kinds]},
            "axisLine": {"show": False},
            "axisLabel": {"interval": 0},
        },
        "yAxis": {"type": "value", "show": False, "inverse": True, "min": -0.5, "max": count - 0.5},
        "tooltip": {"trigger": "item"},
        "series": [
            {
                **{"type": "graph", "coordinateSystem": "cartesian2d", "symbol": "rect", "data": boxes},
                "links": [_line(nodes_by_id[parent], nodes_by_id[child]) for parent, child in edges],
                "label": {"show": True, "fontWeight": 600, "color": "$ink", "borderRadius": 6},
                "emphasis": {"focus": "adjacency"},
            }
        ],
    }
    parents = {node.id: [nodes_by_id[parent].label for parent, child in edges if child == node.id] for node in nodes}
    table = [
        (Message(node.kind), node.label, node.id, Message.joined(", ", parents[node.id]))
        for node in map(nodes_by_id.__getitem__, rows)
    ]
    columns = (Message("kind"), Message("name"), Message("id"), Message("made from"))
    return Chart(title, option, 26 + _ROW * count, columns, table, boxes=True)


def _sorted_by_parents(
    nodes: Sequence[LineageNode], edges: Sequence[tuple[str, str]], rows: dict[str, int]
) -> list[LineageNode]:
    """Sorts a column's nodes by the mean row of their parents, so that few lines cross."""

    def height(node: LineageNode) -> float:
        above = [rows[parent] for parent, child in edges if child == node.id and parent in rows]
        return sum(above) / len(above) if above else 0.0

    return sorted(nodes, key=height)


def _box(node: LineageNode, column: int, row: int) -> Option:
    border = {"borderColor": "$blue", "borderWidth": 2} if node.marked else {"borderColor": "$edge", "borderWidth": 1}
    tip = node.label if node.label == node.id else Message("{label} ({id})", label=node.label, id=node.id)
    # The box is the label's: ECharts stretches a symbol with its border, which would be thick at the sides.
    return {
        **{"id": node.id, "name": node.id, "value": (column, row), "text": node.label, "tip": tip},
        "itemStyle": {"color": "$track"},
        "label": {"backgroundColor": "$track", **border},
    }


def _line(parent: LineageNode, child: LineageNode) -> Option:
    style = {"color": "$blue", "width": 2, "opacity": 0.9} if child.marked else {"color": "$gray", "opacity": 0.55}
    # A dataset version and its parent share a column: a straight line would run behind the boxes between them.
    curveness = 0.25 if parent.kind == child.kind else 0.0
    link = {"source": parent.id, "target": child.id, "lineStyle": {**style, "curveness": curveness}}
    return link | {"tip": Message("{parent} → {child}", parent=parent.label, child=child.label)}
