"""A training as the report shows it, read from the files that it leaves."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.loop.config import read_yaml
from posttrain.store.errors import UserError
from posttrain.store.records import Run
from posttrain.store.workspace import Workspace
from posttrain.train.alone import CONFIG, METRICS, SUMMARY
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.phases import PHASES
from posttrain.train.watch.sinks.jsonl import read_steps
from posttrain.web.charts.thin import Numbers
from posttrain.web.training_data import Training, TrainingDecision

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


def training_of_folder(folder: Path) -> Training:
    """What ``posttrain train --out`` has left in a folder, done or not.

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
    decided = _decisions_in(folder / SUMMARY) + _decisions_in(folder / ".training" / "scratch" / "notes.json")
    return training(folder.resolve().name, lines, decided, _settings(folder / CONFIG))


def training_of_round(workspace: Workspace, run: Run, name: str) -> Training | None:
    """What a round's training measured: with its times where the workspace has them, None where it has nothing.

    The model's files are not verified or downloaded for it.
    """
    home, output = workspace.home, str(run.output)
    timed = home / "metrics" / f"{run.key}.jsonl"
    kept = [folder / output / "training.json" for folder in (home / "artifacts", home / "cache")]
    if timed.is_file():
        lines = read_steps(timed)
    elif found := [file for file in kept if file.is_file()]:
        lines = json.loads(found[0].read_bytes())
    else:
        return None
    row = workspace.metadata.artifact(output)
    return training(name, lines, row.meta.get("decisions", []) if row else [])


def training(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    decided: Iterable[Mapping[str, Any]] = (),
    settings: Mapping[str, str] | None = None,
) -> Training:
    """A training from its lines, one a step, as the metrics file has them.

    Args:
        decided: decisions as JSON; those that training went back from stand in no line that is left.
    """
    ordered = sorted(lines, key=lambda line: int(line["step"]))
    written = [one for line in ordered for one in line.get("decisions", [])]
    return Training(
        name=name,
        steps=np.array([line["step"] for line in ordered], dtype=np.float64),
        values={key: _column(ordered, key) for key in _NUMBERS},
        groups=_columns(ordered, "group_norms"),
        objective=_columns(ordered, "metrics"),
        phases=_phases(ordered),
        decisions=_decisions([*decided, *written]),
        settings=settings or {},
    )


def _decisions(found: Iterable[Mapping[str, Any]]) -> tuple[TrainingDecision, ...]:
    once = {json.dumps(one, sort_keys=True): Decision.from_json(dict(one)) for one in found}
    rows = [
        TrainingDecision(one.finding.step, one.finding.kind, one.finding.what, one.action, one.why)
        for one in once.values()
    ]
    return tuple(sorted(rows, key=lambda row: row.step))


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Numbers:
    found = (line.get(key) for line in lines)
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def _columns(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, Numbers]:
    parts = [line.get(key) or {} for line in lines]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _column(parts, name) for name in names}


def _phases(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all steps by phase, in words, and what lies between."""
    found = dict.fromkeys(PHASES.values(), 0.0)
    timed = [line for line in lines if line.get("phases")]
    for line in timed:
        for name, seconds in line["phases"].items():
            words = PHASES.get(name, name)
            found[words] = found.get(words, 0.0) + seconds
    rest = sum(line.get("seconds") or 0.0 for line in timed) - sum(found.values())
    return {name: seconds for name, seconds in (found | {"everything else": rest}).items() if seconds > 0}


def _decisions_in(file: Path) -> list[dict[str, Any]]:
    """The list ``decisions`` of a JSON file; empty where there is none."""
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_bytes())
    except ValueError:
        raise UserError("damaged: it is no JSON", where=str(file), fix="remove it") from None
    return list(found.get("ended") or found.get("decisions", []))


def _settings(file: Path) -> dict[str, str]:
    """The settings that a reader asks for first, from ``config.yaml``; empty where there is none."""
    if not file.is_file():
        return {}
    config = read_yaml(file)
    train = config.get("train", {})
    schedule, optimizer = train.get("schedule", {}), train.get("optimizer", {})
    wanted = {
        "model": config.get("model"),
        "data": config.get("data"),
        "objective": train.get("objective"),
        "method": train.get("method"),
        "precision": train.get("precision"),
        "optimiser": optimizer.get("name") if isinstance(optimizer, dict) else None,
        "learning rate": train.get("learning_rate"),
        "schedule": schedule.get("name") if isinstance(schedule, dict) else None,
        "examples a step": train.get("batch_size"),
        "epochs": train.get("epochs"),
    }
    return {name: str(value) for name, value in wanted.items() if value is not None}
