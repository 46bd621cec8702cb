"""The lineage of a workspace's models: files, training sets, models and deployments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.loop.record import read_rounds
from posttrain.report.charts.lineage import LineageNode, lineage
from posttrain.report.section import Section
from posttrain.store.message import Message
from posttrain.store.workspace import Workspace

_CAPTION = Message(
    "Which artifact was built from which. The path to the champion is blue; `posttrain show ID` shows the details of "
    "any box."
)


def lineage_section(workspace: Workspace) -> Section:
    """Draws the lineage."""
    title = Message("files, dataset versions, models and deployments, joined to what they were made from")
    chart = lineage(*read_lineage(workspace), title)
    return Section.of(Message("Lineage"), _CAPTION, chart, empty=Message("Nothing has been made yet."))


def read_lineage(workspace: Workspace) -> tuple[list[LineageNode], list[tuple[str, str]]]:
    """Reads the lineage, and marks the path to the champion."""
    deployments = workspace.metadata.deployments()
    champion = deployments[-1].model_id if deployments else None
    nodes: dict[str, LineageNode] = {}
    edges: list[tuple[str, str]] = []
    # Only training sets: pool and test versions lead to no model.
    for named in workspace.metadata.names("train"):
        nodes[named.artifact_id] = LineageNode(named.artifact_id, f"train@v{named.version}", "dataset")
        if named.parent in nodes:
            edges.append((str(named.parent), named.artifact_id))
    for record in read_rounds(workspace).done:
        model, dataset = record.state.candidate, record.state.dataset
        if model:
            name = Message("round {number}", number=record.number)
            nodes[model] = LineageNode(model, name, "model", marked=model == champion)
        if model and dataset and dataset in nodes:
            edges.append((dataset, model))
            row = record.artifact(dataset)
            for file in sorted(row.meta["increment"]) if row else []:
                nodes[file] = LineageNode(file, Path(file).name, "file")
                edges.append((file, dataset))
    for deployment in deployments:
        if deployment.model_id in nodes:
            id, label = f"deployment-{deployment.id}", Message(deployment.action)
            nodes[id] = LineageNode(id, label, "deployment", marked=deployment == deployments[-1])
            edges.append((deployment.model_id, id))
    # A file joins several versions through one increment: its edges appear once.
    edges = list(dict.fromkeys(edges))
    marked = _with_ancestors([node.id for node in nodes.values() if node.marked], edges)
    return [replace(node, marked=node.id in marked) for node in nodes.values()], edges


def _with_ancestors(ids: Sequence[str], edges: Sequence[tuple[str, str]]) -> set[str]:
    """Returns nodes and all that they were made from."""
    reached, waiting = set(ids), list(ids)
    while waiting:
        child = waiting.pop()
        parents = {parent for parent, of in edges if of == child} - reached
        reached |= parents
        waiting += parents
    return reached
