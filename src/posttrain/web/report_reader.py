"""Reads everything that the report shows from a workspace."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.evaluate.suite import SuiteResult, read_evaluation
from posttrain.inspect.champion import MEND, RollbackReport, last_rollback
from posttrain.inspect.random_baseline import Comparison, compare_with_random
from posttrain.inspect.status import model_seconds, models_beside, round_drift, stage_seconds, status
from posttrain.loop.batch_counts import BatchCounts, batch_counts
from posttrain.loop.canary import describe_canary
from posttrain.loop.config import Config
from posttrain.loop.history import finished_rounds
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stages.tune import Tune
from posttrain.loop.state import RoundState
from posttrain.report.charts.lineage import LineageNode
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.rows import Deployment, Round
from posttrain.store.workspace import Workspace
from posttrain.tune.transfer.past import PastStudy
from posttrain.web import report_data as page
from posttrain.web.page import now_text
from posttrain.web.selection_reader import read_selections
from posttrain.web.training_reader import TrainingCurves, read_round_training

log = logging.getLogger("posttrain")

_SETS = ("pool", "labelled", "test")
"""The sets whose funnels are shown, in this order."""


def read_report(workspace: Workspace, config: Config) -> page.Report:
    """Reads the report's content from the rounds so far."""
    rounds = finished_rounds(workspace)
    trainings = _trainings(workspace, rounds)
    lost = {number for number, training in trainings.items() if training is None}
    loop = read_loop(workspace, config)
    nodes, edges = read_lineage(workspace)
    return replace(
        loop,
        rounds=tuple(
            replace(row, note=f"{row.note} The record of its training is not at hand.".lstrip())
            if row.number in lost
            else row
            for row in loop.rounds
        ),
        label_counts=_label_counts(workspace, rounds),
        funnel=read_funnel(workspace),
        datasets=_datasets(workspace),
        lineage_nodes=tuple(nodes),
        lineage_edges=tuple(edges),
        baseline=_comparison(workspace, config),
        selections=read_selections(workspace),
        trainings=tuple(training for training in trainings.values() if training is not None),
        searches=_searches(workspace, rounds),
    )


def read_loop(workspace: Workspace, config: Config) -> page.Report:
    """Reads the part of the report that follows from the rounds' rows and the champion's evaluation."""
    state = status(workspace, config)
    rounds = finished_rounds(workspace)
    champion = state["champion"]
    damage = (
        [f"The champion is damaged: {'; '.join(champion['damage'])}; {MEND}."]
        if champion and champion["damage"]
        else []
    )
    main = _main_suite(workspace, rounds, champion["id"], damage) if champion else None
    # A model promoted by hand from an unfinished round was evaluated in none.
    judged = main or (_main_suite(workspace, rounds, rounds[-1].candidate, damage) if rounds else None)
    # A round's row has the main suite's metric first.
    first = next(iter(RoundState.from_row(rounds[0]).metrics or {}), "accuracy") if rounds else "accuracy"
    metric = judged.main if judged else first
    champions = _champion_metrics(workspace, rounds, metric)
    rollback = last_rollback(workspace)
    return page.Report(
        title=_title(workspace, rounds, rollback),
        workspace=workspace.root.name,
        task=_task(config),
        champion=page.Champion(champion["id"], champion["round"], champion["metrics"]) if champion else None,
        rounds=tuple(_round(workspace, entry, champions[entry.number]) for entry in rounds),
        metric=metric,
        per_class=tuple(
            page.ClassRow(row["label"], row["support"], row["precision"], row["recall"], row["f1"])
            for row in (main.per_class if main else [])
        ),
        confusion=tuple(
            page.Confusion(pair["expected"], pair["predicted"] or "(none of the labels)", pair["count"])
            for pair in (main.confusion if main else [])
            if pair["expected"] != pair["predicted"]
        ),
        final=state["final"]["metrics"] if state["final"] else {},
        timings=_timings(workspace, rounds),
        created=now_text(),
        head=next((entry["head_sentence"] for entry in reversed(state["rounds"]) if entry["head_sentence"]), ""),
        rollback=rollback,
        canary=describe_canary(canary) if (canary := ModelRegistry(workspace).last_canary) else "",
        damage=tuple(damage),
    )


def _title(workspace: Workspace, rounds: Sequence[Round], rollback: RollbackReport | None) -> str:
    done = sum(entry.number > 0 for entry in rounds)
    title = f"{workspace.root.name}: {done} round{'' if done == 1 else 's'}"
    return f"{title}, rolled back" if rollback else title


def _comparison(workspace: Workspace, config: Config) -> Comparison | None:
    try:
        return compare_with_random(workspace, config)
    # A report must be possible for a workspace that has lost something.
    except DamagedArtifactError as error:
        log.warning("%s; the comparison with random choice is left out", error)
        return None


def _task(config: Config) -> str:
    instruction = config.task.system or "Answer the prompt."
    labels = config.task.label_set
    return f"{instruction} {len(labels)} labels are allowed." if labels else instruction


def _round(workspace: Workspace, entry: Round, champions: tuple[float | None, ...]) -> page.RoundRow:
    state = RoundState.from_row(entry)
    decision, beside = state.decision or {}, models_beside(workspace, state)
    selection = workspace.metadata.artifact(state.selection or "")
    return page.RoundRow(
        number=entry.number,
        labels=state.labels or 0,
        decision=state.action,
        metrics=state.metrics or {},
        champions=champions,
        interval=_interval(workspace, decision),
        rules=(
            *(page.RuleRow(rule["rule"], rule["values"], rule["holds"]) for rule in decision.get("rules", [])),
            *(
                page.RuleRow(f"{fields['rule']}: {_change(fields)}", fields["values"], True)
                for fields in state.adjustments or ()
            ),
        ),
        seconds=stage_seconds(workspace, entry.number),
        reasons=selection.meta["reasons"] if selection else {},
        note=_note(workspace, state),
        head=beside["head_sentence"],
        tuning=tuple(beside["tuning_sentences"]),
        retention=tuple(beside["retention_sentences"]),
        batch=batch_counts(state) or BatchCounts(),
        drift=round_drift(workspace, state),
    )


def _change(fields: Mapping[str, Any]) -> str:
    return fields["problem"] or f"{fields['key']} {fields['before']} → {fields['after']}"


def _interval(workspace: Workspace, decision: Mapping[str, Any]) -> page.GainRow | None:
    """Reads the gain by the main suite's scores, with the confidence level in force when it was computed."""
    if not decision.get("intervals"):
        return None
    metric, interval = next(iter(decision["intervals"].items()))
    # The config may have changed since: the level is that of the run that computed the interval.
    run = workspace.metadata.producers(decision["id"])[-1]
    return page.GainRow(**interval, metric=metric, level=run.config["bootstrap"]["level"])


def _champion_metrics(workspace: Workspace, rounds: list[Round], metric: str) -> dict[int, tuple[float | None, ...]]:
    """Returns by round the metric of the models in use until the next decision; see `RoundRow.champions`."""
    values = {entry.candidate: (RoundState.from_row(entry).metrics or {}).get(metric) for entry in rounds}
    deployed: dict[int, list[Deployment]] = {}
    number = 0
    for row in workspace.metadata.deployments():
        # A deployment by hand has no round: it belongs to the last one that was finished then.
        number = row.round if row.round is not None else max(number, _last_finished_round(rounds, row.created_at))
        deployed.setdefault(number, []).append(row)
    metrics = {}
    in_use: list[str] = []
    for entry in rounds:
        changes = deployed.get(entry.number, [])
        decided = bool(changes) and changes[0].round == entry.number
        # The model in use before a decision stays in the list only if the round itself deployed nothing.
        in_use = [*([] if decided else in_use[-1:]), *(row.model_id for row in changes)]
        metrics[entry.number] = tuple(values.get(model) for model in in_use)
    return metrics


def _last_finished_round(rounds: list[Round], moment: datetime) -> int:
    """Returns the last round finished at a moment; 0 before the first."""
    return max((entry.number for entry in rounds if entry.finished_at and entry.finished_at <= moment), default=0)


def _note(workspace: Workspace, state: RoundState) -> str:
    notes = []
    scores = workspace.metadata.artifact(state.scores or "")
    if scores and scores.meta["sampled"] < scores.meta["pool"]:
        embedded_only = f", embedded {scores.meta['unscored']} more" if scores.meta["unscored"] else ""
        done = "Embedded" if scores.meta["cold"] else "Scored"
        notes.append(
            f"{done} a sample of {scores.meta['sampled']} of the pool's {scores.meta['pool']} free records"
            f"{embedded_only}."
        )
    beside = models_beside(workspace, state)
    notes += [f"{text[0].upper()}{text[1:]}." for text in (beside["models"] or {}).get("sentences", ())]
    if count := beside["pseudo_labels"]:
        notes.append(f"{count} pseudo-labels of a model joined its training.")
    if state.discards_labels:
        notes.append("Its model was refused, and its labels are set aside.")
    return " ".join(notes)


def _main_suite(workspace: Workspace, rounds: list[Round], model: str | None, damage: list[str]) -> SuiteResult | None:
    """Reads a model's results on the main suite in its own round; None if it had none, or they are damaged.

    Args:
        damage: Gets a sentence about damaged results.
    """
    # The latest first: a later round may train the same model again, by the same key.
    for entry in reversed(rounds):
        if entry.candidate == model:
            evaluation = RoundState.from_row(entry).id("evaluation")
            try:
                return next(iter(read_evaluation(workspace.artifacts.path(evaluation)).values()))
            except DamagedArtifactError as error:
                if (sentence := f"Classes and confusions are missing: {error}.") not in damage:
                    log.warning("%s; its classes and confusions are left out", error)
                    damage.append(sentence)
                return None
    return None


def _label_counts(workspace: Workspace, rounds: list[Round]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in map(RoundState.from_row, rounds):
        row = workspace.metadata.artifact(state.labelled or "")
        if row and not state.discards_labels:
            for label, count in row.meta["classes"].items():
                counts[label] = counts.get(label, 0) + count
    return counts


def read_funnel(workspace: Workspace) -> tuple[page.FunnelRow, ...]:
    """Reads how many records of each set came in, and why others were rejected."""
    rows = []
    for name in _SETS:
        row = workspace.metadata.artifact(workspace.metadata.named(name) or "")
        for entry in row.meta["funnel"] if row else []:
            if entry["step"] == "read" and entry["count"]:
                rows.append(page.FunnelRow(name, "in", entry["reason"], entry["count"]))
            elif entry["step"] not in ("read", "kept") and entry["count"]:
                rows.append(page.FunnelRow(name, entry["step"], entry["reason"], entry["count"]))
    return tuple(rows)


def _datasets(workspace: Workspace) -> tuple[page.DatasetRow, ...]:
    rows = []
    for named in workspace.metadata.names():
        artifact = workspace.metadata.artifact(named.artifact_id)
        if artifact:
            rows.append(
                page.DatasetRow(named.name, named.version, named.artifact_id, named.parent, artifact.meta["counts"])
            )
    return tuple(rows)


def read_lineage(workspace: Workspace) -> tuple[list[LineageNode], list[tuple[str, str]]]:
    """Reads the lineage files → training sets → models → deployments, and marks the path to the champion."""
    rounds = finished_rounds(workspace)
    deployments = workspace.metadata.deployments()
    champion = deployments[-1].model_id if deployments else None
    nodes: dict[str, LineageNode] = {}
    edges: list[tuple[str, str]] = []
    # Only training sets: pool and test versions lead to no model.
    for named in workspace.metadata.names("train"):
        nodes[named.artifact_id] = LineageNode(named.artifact_id, f"train@v{named.version}", "dataset")
        if named.parent in nodes:
            edges.append((str(named.parent), named.artifact_id))
    for entry in rounds:
        model, dataset = entry.candidate, RoundState.from_row(entry).dataset
        if model:
            nodes[model] = LineageNode(model, f"round {entry.number}", "model", marked=model == champion)
        if model and dataset and dataset in nodes:
            edges.append((dataset, model))
            for file in _files_of(workspace, dataset):
                nodes[file] = LineageNode(file, Path(file).name, "file")
                edges.append((file, dataset))
    for deployment in deployments:
        if deployment.model_id in nodes:
            name = f"deployment-{deployment.id}"
            nodes[name] = LineageNode(name, deployment.action, "deployment", marked=deployment == deployments[-1])
            edges.append((deployment.model_id, name))
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


def _files_of(workspace: Workspace, dataset: str) -> list[str]:
    row = workspace.metadata.artifact(dataset)
    return sorted(row.meta["increment"]) if row else []


def _trainings(workspace: Workspace, rounds: list[Round]) -> dict[int, TrainingCurves | None]:
    """Reads the training of each round; None if its record is missing."""
    runs = {run.output: run for run in workspace.metadata.runs(stage="train", status="done")}
    candidates = [(entry.number, runs.get(entry.candidate)) for entry in rounds]
    return {
        number: read_round_training(workspace, run, f"round {number}") for number, run in candidates if run is not None
    }


def _searches(workspace: Workspace, rounds: list[Round]) -> tuple[PastStudy, ...]:
    """Reads the rounds' searches of settings, without those that are damaged."""
    searches = []
    for state in map(RoundState.from_row, rounds):
        if state.tuning is not None and Tune.name in state.outputs:
            try:
                folder = workspace.artifacts.path(state.outputs[Tune.name])
                searches.append(PastStudy.read(folder, f"round {state.tuning['round']}"))
            except (DamagedArtifactError, UserError) as error:
                log.warning("%s; its search is left out", error)
    return tuple(searches)


def _timings(workspace: Workspace, rounds: list[Round]) -> dict[str, float]:
    total = sum(entry.seconds or 0.0 for entry in rounds)
    computing = sum(model_seconds(workspace, entry.number) for entry in rounds)
    return {"all rounds": total, "model compute": computing, "everything else": total - computing}
