"""Reads a training step by step from its files, as reports show it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.report.charts.curve import FloatArray
from posttrain.store.errors import UserError, shorten
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace
from posttrain.store.yaml_files import read_yaml
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.meter import PHASES
from posttrain.train.monitor.metrics import STEPS, read_steps
from posttrain.train.standalone import CONFIG, METRICS, SUMMARY

_NUMBERS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "supervised_tokens",
    "seconds",
    "tokens_per_second",
    "memory_bytes",
    "update_ratio",
    "loss_scale",
    "data_wait",
    "mfu",
)


@dataclass(frozen=True)
class TrainingDecision:
    """A problem that the monitor detected at a step and its action; ``why`` explains an unconfigured action.

    ``kind`` and ``action`` are the monitor's names, such as ``no_supervised`` and ``lower_rate``.
    """

    step: int
    kind: str
    what: str
    action: str
    why: str = ""


@dataclass(frozen=True)
class TrainingCurves:
    """One training, step by step.

    Args:
        name: of the round, or of the folder.
        steps: float64 [N], rising.
        values: float64 [N] each, by the name that the metrics file gives them; NaN where nothing was measured.
        groups: gradient norms by layer group, from the first layer to the last; likewise.
        objective: what the objective measured besides; likewise.
        evaluation: what was measured on held-out records; likewise.
        phases: seconds of the whole training by phase, in words.
        decisions: oldest first.
        settings: what decided it, by name, in words.
        config: all settings, by dotted key.
        result_steps: the steps after which the weights of the result were evaluated; None where they were not.
    """

    name: str
    steps: FloatArray
    values: Mapping[str, FloatArray]
    groups: Mapping[str, FloatArray] = field(default_factory=dict)
    objective: Mapping[str, FloatArray] = field(default_factory=dict)
    evaluation: Mapping[str, FloatArray] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    decisions: tuple[TrainingDecision, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    result_steps: int | None = None


def read_training_folder(folder: Path) -> TrainingCurves:
    """Reads a folder of ``posttrain train --out``, finished or not.

    Raises:
        UserError: there is no record of a training in it.
    """
    file = folder / METRICS
    if not file.is_file():
        fix = "name a folder that `posttrain train --out` wrote into"
        raise UserError(f"there is no {METRICS} in it", where=str(folder), fix=fix)
    lines = read_steps(file)
    if not lines:
        raise UserError("no step is done yet", where=str(file), fix="wait for the first one")
    # The summary exists once the training is done; before, a resumed one has its decisions in the notes.
    summary = _read_json(folder / SUMMARY)
    decided = _decided(summary) + _decided(_read_json(folder / ".training" / "scratch" / "notes.json"))
    config = read_yaml(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    curves = training_from_steps(folder.resolve().name, lines, decided, _main_settings(config))
    steps = (summary.get("evaluation") or {}).get("steps")
    return replace(curves, config=dict(flat_settings(config)), result_steps=steps)


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the values of a config as text, by dotted key."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", shorten(str(value), 200)


def read_round_training(workspace: Workspace, run: Run, name: str) -> TrainingCurves | None:
    """Reads a round's training, with times if the workspace has them; None if nothing was kept.

    The model's files are not verified or downloaded for it.
    """
    home, output = workspace.home, str(run.output)
    # Artifacts hold no times, because the same training must give the same bytes; the workspace keeps them apart.
    timed = home / "metrics" / f"{run.key}.jsonl"
    untimed = [folder / output / STEPS for folder in (home / "artifacts", home / "cache")]
    if timed.is_file():
        lines = read_steps(timed)
    elif files := [file for file in untimed if file.is_file()]:
        lines = json.loads(files[0].read_bytes())
    else:
        return None
    row = workspace.metadata.artifact(output)
    meta = row.meta if row else {}
    curves = training_from_steps(name, lines, meta.get("decisions", []))
    return replace(curves, result_steps=(meta.get("evaluation") or {}).get("steps"))


def training_from_steps(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    decided: Iterable[Mapping[str, Any]] = (),
    settings: Mapping[str, str] | None = None,
) -> TrainingCurves:
    """Builds a training from the lines of its metrics file, one per step.

    Args:
        decided: decisions as JSON; those of steps that were rolled back stand in no line of the file.
    """
    ordered = sorted(lines, key=lambda line: int(line["step"]))
    written = [decision for line in ordered for decision in line.get("decisions", [])]
    return TrainingCurves(
        name=name,
        steps=np.array([line["step"] for line in ordered], dtype=np.float64),
        values={key: _column(ordered, key) for key in _NUMBERS},
        groups=_columns(ordered, "group_norms"),
        objective=_columns(ordered, "metrics"),
        evaluation=_columns(ordered, "evaluation"),
        phases=_phases(ordered),
        decisions=_decisions([*decided, *written]),
        settings=settings or {},
    )


def _decisions(decisions: Iterable[Mapping[str, Any]]) -> tuple[TrainingDecision, ...]:
    # A decision may stand both in the summary and at its step.
    once = {json.dumps(decision, sort_keys=True): MonitorDecision.from_json(dict(decision)) for decision in decisions}
    rows = [
        TrainingDecision(
            decision.finding.step, decision.finding.kind, decision.finding.what, decision.action, decision.why
        )
        for decision in once.values()
    ]
    return tuple(sorted(rows, key=lambda row: row.step))


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> FloatArray:
    values = (line.get(key) for line in lines)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _columns(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, FloatArray]:
    parts = [line.get(key) or {} for line in lines]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _column(parts, name) for name in names}


def _phases(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums the seconds of all steps by phase, plus the time between phases."""
    totals = dict.fromkeys(PHASES.values(), 0.0)
    timed = [line for line in lines if line.get("phases")]
    for line in timed:
        for name, seconds in line["phases"].items():
            title = PHASES.get(name, name)
            totals[title] = totals.get(title, 0.0) + seconds
    # Phases do not cover the time between them, such as a checkpoint's copy.
    rest = sum(line.get("seconds") or 0.0 for line in timed) - sum(totals.values())
    return {name: seconds for name, seconds in (totals | {"everything else": rest}).items() if seconds > 0}


def _read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file; empty without one."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_bytes()))
    except ValueError:
        raise UserError("damaged: it is not JSON", where=str(file), fix="remove it") from None


def _decided(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(content.get("ended") or content.get("decisions", []))


def _main_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the main settings of a ``config.yaml``, in words."""
    train = config.get("train", {})
    schedule, optimizer = train.get("schedule", {}), train.get("optimizer", {})
    settings = {
        "model": config.get("model"),
        "data": config.get("data"),
        "objective": train.get("objective", {}).get("name"),
        "method": train.get("method"),
        "precision": train.get("precision"),
        "optimiser": optimizer.get("name") if isinstance(optimizer, dict) else None,
        "learning rate": train.get("learning_rate"),
        "schedule": schedule.get("name") if isinstance(schedule, dict) else None,
        "examples per step": train.get("batch_size"),
        "epochs": train.get("epochs"),
    }
    return {name: str(value) for name, value in settings.items() if value is not None}
