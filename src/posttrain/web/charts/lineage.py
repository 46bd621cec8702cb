"""Lineage diagram: files, dataset versions, models and deployments in columns, joined by lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.web.charts.svg import LETTER, element, figure, text, tooltip, truncate

COLUMNS = {
    "file": ("files", "files"),
    "dataset": ("dataset versions", "datasets"),
    "model": ("models", "models"),
    "deployment": ("deployments", "deployed"),
}
"""Kinds of nodes, with the titles of their columns in a wide and in a narrow diagram."""


@dataclass(frozen=True)
class LineageNode:
    """A node of the diagram; ``marked`` if it is, or leads to, the present champion."""

    id: str
    label: str
    kind: str
    marked: bool = False


def lineage(nodes: Sequence[LineageNode], edges: Sequence[tuple[str, str]], title: str, *, width: int = 760) -> str:
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
    columns = [kind for kind in COLUMNS if any(node.kind == kind for node in nodes)]
    if not columns:
        return ""
    wide = width >= 500
    gap, high, step = (54.0, 40, 54) if wide else (14.0, 30, 38)
    box = (width - 14 - gap * (len(columns) - 1)) / len(columns)
    positions: dict[str, tuple[float, float]] = {}
    marks = []
    for at, kind in enumerate(columns):
        x = 8 + at * (box + gap)
        marks.append(text(COLUMNS[kind][0 if wide else 1], x, 14, "soft"))
        # Column by column from the left: a node is sorted by its parents, which have positions then.
        for down, node in enumerate(_sorted_by_parents([n for n in nodes if n.kind == kind], edges, positions)):
            positions[node.id] = (x, 28.0 + down * step)
    lines = [
        _edge(positions[parent], positions[child], box, high, nodes_by_id[child].marked) for parent, child in edges
    ]
    boxes = [_box(nodes_by_id[id_], *position, box, high, wide) for id_, position in positions.items()]
    tall = max(y for _, y in positions.values()) + high + 6
    return figure(width, tall, title, *marks, *lines, *boxes)


def _sorted_by_parents(
    nodes: Sequence[LineageNode], edges: Sequence[tuple[str, str]], positions: dict[str, tuple[float, float]]
) -> list[LineageNode]:
    """Sorts a column's nodes by the mean height of their parents, so that few lines cross."""

    def height(node: LineageNode) -> float:
        above = [positions[parent][1] for parent, child in edges if child == node.id and parent in positions]
        return sum(above) / len(above) if above else 0.0

    return sorted(nodes, key=height)


def _edge(start: tuple[float, float], end: tuple[float, float], box: float, high: float, marked: bool) -> str:
    class_ = "edge marked" if marked else "edge"
    (x1, y1), (x2, y2) = start, end
    # A dataset version and its parent share a column: the line bends around the left side.
    if x1 == x2:
        side, y1, y2 = x1 - 1, y1 + high / 2 + 5, y2 + high / 2 - 5
        return element(
            "path",
            d=f"M{x1:.1f} {y1:.1f}C{side - 9:.1f} {y1:.1f} {side - 9:.1f} {y2:.1f} {x1:.1f} {y2:.1f}",
            class_=class_,
        )
    x1, y1, y2 = x1 + box, y1 + high / 2, y2 + high / 2
    middle = (x1 + x2) / 2
    return element(
        "path",
        d=f"M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}",
        class_=class_,
    )


def _box(node: LineageNode, x: float, y: float, width: float, high: float, wide: bool) -> str:
    inset, class_ = (10, "strong") if wide else (4, "strong small")
    letter = LETTER if wide else 7.4
    label = truncate(node.label, width - 2 * inset + 4, letter)
    middle = y + high / 2
    if wide and node.id != node.label:
        id_ = text(truncate(node.id, width - 2 * inset + 4, 6.6), x + inset, middle + 12, "soft small")
        lines = text(label, x + inset, middle - 3, class_) + id_
    else:
        lines = text(label, x + inset, middle + 4, class_)
    box_class = f"node {node.kind}" + (" marked" if node.marked else "")
    box = element("rect", x=x, y=y, width=width, height=high, rx=6, class_=box_class)
    return element("g", tooltip(f"{node.label} ({node.id})"), box, lines)
