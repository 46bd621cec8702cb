"""Writes a model's card: its data, metrics, gate and lineage as Markdown, without the text of any record."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from posttrain.data.records.provenance import RECORD_KINDS, record_kinds
from posttrain.data.versions.version import Version
from posttrain.evaluate.config import BootstrapConfig
from posttrain.evaluate.paired_interval import paired_interval
from posttrain.evaluate.suite import read_evaluation
from posttrain.inspect.show import ancestors
from posttrain.loop.config import Config
from posttrain.loop.state import RoundState
from posttrain.models.binomial import clopper_pearson
from posttrain.models.bounded_mean import is_binary
from posttrain.models.sources import DEMO_MODEL, TINY_MODEL
from posttrain.store.message import counted
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace

CARD = "README.md"

_DEMO_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
_LICENCE = "unknown"

_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
```

Prompt it as it was trained: with its chat template, and the system message of the task."""


def model_card(workspace: Workspace, config: Config, model: str, name: str | None = None) -> str:
    """Writes the card of a model.

    Args:
        workspace: The workspace.
        config: Its config.
        model: Id of the model.
        name: What the card calls it, such as ``OWNER/NAME``; None for the id.

    Returns:
        Markdown with a header of YAML as the Hub reads it: versions and kinds of the training records, metrics with
        their intervals, the gate's decision with every rule, base model, artifacts, seed and code version. Neither
        texts nor paths of this machine are in it.
    """
    rounds = [row for row in workspace.metadata.rounds() if row.candidate == model]
    state = RoundState.from_row(rounds[-1]) if rounds else RoundState()
    runs = [run for run in workspace.metadata.producers(model) if run.stage == "train"]
    base = _base_model(workspace, model)
    parts = [
        _header(base),
        f"# {name or model}",
        _summary(state, rounds[-1].number if rounds else None, bool(runs)),
        "## Use\n\n" + _USE.format(name=name or model),
        "## Data\n\n" + _data(workspace, runs, state),
        "## Metrics\n\n" + _metrics(workspace, config, state),
        "## Gate\n\n" + _gate(state.decision),
        "## Lineage\n\n" + _lineage(workspace, model, runs, base),
        "## Licence\n\nNot stated yet: replace `license: unknown` above by the licence of this model, as those of the "
        "base model and of the data allow.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(base: str | None) -> str:
    hub = base is not None and base.count("/") == 1 and not base.startswith((".", "/"))
    lines = ["library_name: transformers", "pipeline_tag: text-generation", f"license: {_LICENCE}", "tags: [posttrain]"]
    return "\n".join(["---", *lines, *([f"base_model: {json.dumps(base)}"] if hub else []), "---"])


def _base_model(workspace: Workspace, model: str) -> str | None:
    """Returns the public name of the base model; a path of this machine is none."""
    for relative in reversed(ancestors(workspace.metadata, model)):
        if relative.run is not None and relative.run.stage == "fetch":
            name = str(relative.artifact.meta.get("name", ""))
            if name == DEMO_MODEL:
                return _DEMO_BASE
            public = name == TINY_MODEL or (name.count("/") == 1 and not name.startswith(("/", ".", "~")))
            return name if public and not (workspace.root / name).exists() else None
    return None


def _summary(state: RoundState, number: int | None, trained: bool) -> str:
    if not trained:
        return "A base model, not trained here."
    where = "outside of a finished round" if number is None else f"in round {number}"
    return f"Trained {where} of a loop of posttrain, on {counted(state.labels or 0, 'record')}."


def _data(workspace: Workspace, runs: list[Run], state: RoundState) -> str:
    if not runs:
        return "None: it was not trained here."
    names = {entry.artifact_id: entry.text for entry in workspace.metadata.names()}
    rows = []
    for role, id in (("training", runs[-1].inputs.get("dataset")), ("test", state.test)):
        if id is not None:
            count = sum(table.num_rows for table in Version.open(workspace.artifacts, id).tables(columns=["id"]))
            rows.append([role, f"`{names.get(id, '')}`" if id in names else "", f"`{id}`", f"{count:,}"])
    tables = [_table(["set", "version", "artifact", "records"], rows)]
    kinds = _kinds(workspace, runs[-1].inputs["dataset"])
    tables.append(_table(["training records", "count"], [[kind, f"{count:,}"] for kind, count in kinds.items()]))
    return "\n\n".join(tables)


def _kinds(workspace: Workspace, dataset: str) -> Counter[str]:
    """Counts the training records by how they came about."""
    version = Version.open(workspace.artifacts, dataset)
    return Counter(
        RECORD_KINDS[kind]
        for table in version.tables(version.splits[0], ["meta"])
        for kind in record_kinds(table["meta"])
    )


def _metrics(workspace: Workspace, config: Config, state: RoundState) -> str:
    if state.evaluation is None:
        return "It was not measured in a round."
    rows = []
    for suite in read_evaluation(workspace.artifacts.path(state.evaluation)).values():
        scores = np.asarray(suite.predictions["score"].to_numpy(), np.float64)
        for metric, value in suite.metrics.items():
            interval = _interval(scores, config.evaluate.bootstrap) if metric == suite.paired else ""
            rows.append([suite.name, metric, f"{value:.4f}", interval, f"{len(scores):,}"])
    level = f"{config.evaluate.bootstrap.level:.0%} interval"
    return _table(["suite", "metric", "value", level, "records"], rows)


def _interval(scores: np.ndarray, config: BootstrapConfig) -> str:
    """Formats the interval of a mean: exact for right-or-wrong scores, else that of its difference from zero."""
    if is_binary(scores):
        low, high = clopper_pearson(int(scores.sum()), len(scores), config.level)
    else:
        interval = paired_interval(
            scores, np.zeros_like(scores), seed=0, resamples=config.resamples, level=config.level
        )
        low, high = interval.low, interval.high
    return f"{low:.4f} to {high:.4f}"


def _gate(decision: Mapping[str, Any] | None) -> str:
    if decision is None:
        return "No gate has decided about it."
    if decision["action"] == "baseline":
        return "None: it is the base model, which round 0 put in service."
    rules = [
        [rule["section"], f"`{rule['rule']}`", "holds" if rule["holds"] else "fails", rule["values"]]
        for rule in decision["rules"]
    ]
    gains = [
        [name, f"{gain['difference']:+.4f}", f"{gain['low']:+.4f} to {gain['high']:+.4f}", f"{gain['n']:,}"]
        for name, gain in decision["intervals"].items()
    ]
    return "\n\n".join(
        [
            f"Decision: **{decision['action']}**.",
            _table(["section", "rule", "outcome", "values"], rules),
            _table(["gain over the champion of before", "difference", "interval", "records"], gains),
        ]
    )


def _lineage(workspace: Workspace, model: str, runs: list[Run], base: str | None) -> str:
    rows = [["model", f"`{model}`"], ["base model", base or "not public"]]
    if runs:
        run = runs[-1]
        rows.append(["seed of the training", str(run.seed)])
        packages = ", ".join(f"{name} {text}" for name, text in run.environment.get("packages", {}).items() if text)
        rows += [["code version", f"posttrain {run.code_version}"], ["packages", packages]]
        rows += [["trained", f"{run.started_at:%Y-%m-%d %H:%M} UTC"]]
    made_from = [
        [str(relative.depth), f"`{relative.artifact.id}`", relative.run.stage if relative.run else ""]
        for relative in ancestors(workspace.metadata, model)
        if relative.depth
    ]
    tables = [_table(["", ""], rows)]
    if made_from:
        tables.append("It was made from:\n\n" + _table(["steps away", "artifact", "by"], made_from))
    return "\n\n".join(tables)


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(_lines(columns, rows))


def _lines(columns: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        # A name of the user's may hold what Markdown takes for a border.
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
