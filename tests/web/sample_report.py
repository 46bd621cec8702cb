"""A report like that of a real run, made of the sections that stages and pages report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np

from posttrain.inspect.status import stage_values
from posttrain.loop.batch_counts import BatchCounts
from posttrain.loop.config import Config
from posttrain.loop.record import LoopRecord, RoundRecord
from posttrain.loop.round import stage_reports
from posttrain.loop.selection_report import selection_section
from posttrain.loop.selections import ChosenRecord, PoolMap, RoundGain, Selection
from posttrain.loop.stages.collect import funnels_section
from posttrain.loop.stages.evaluate import classes_section, confusion_section
from posttrain.loop.stages.label import labels_section
from posttrain.loop.state import RoundState
from posttrain.report.charts.lineage import LineageNode, lineage
from posttrain.report.section import Cell, Page, Section
from posttrain.store.rows import Deployment, Round
from posttrain.train.curves import TrainingCurves, training_from_steps
from posttrain.train.report import trainings_section
from posttrain.web.loop_report import LoopReport, curve_section, decisions_section, headline, time_section

LABELS = {
    "order_status": 31,
    "refund_status": 27,
    "refund_request": 24,
    "late_delivery": 22,
    "return_request": 19,
    "damaged_item": 17,
    "cancel_order": 15,
    "missing_parcel": 14,
    "wrong_item": 13,
    "change_delivery_address": 12,
    "card_declined": 11,
    "reset_password": 11,
    "voucher_rejected": 10,
    "charged_twice": 9,
    "exchange_item": 9,
    "back_in_stock": 8,
    "unknown_charge": 8,
    "change_order": 7,
    "account_locked": 7,
    "invoice_request": 6,
    "missing_part": 6,
    "delivery_cost": 5,
    "warranty_claim": 5,
    "gift_card_balance": 5,
    "price_match": 4,
    "delivery_abroad": 4,
    "delete_account": 4,
    "cancel_membership": 3,
}

_CONFUSIONS = [
    ("refund_request", "refund_status", 7),
    ("late_delivery", "order_status", 6),
    ("refund_status", "refund_request", 4),
    ("return_request", "refund_request", 4),
    ("missing_part", "damaged_item", 3),
    ("unknown_charge", "charged_twice", 3),
    ("missing_parcel", "late_delivery", 3),
    ("account_locked", "reset_password", 2),
    ("order_status", "late_delivery", 2),
    ("cancel_membership", "delete_account", 2),
    ("exchange_item", "return_request", 2),
    ("change_order", "cancel_order", 1),
]


_DECISIONS = (
    {
        "kind": "explosion",
        "step": 70,
        "since": 70,
        "what": "gradient norm 90 is 100 times the median of the last 64 steps",
        "value": 90.0,
        "limit": 5.0,
        "action": "skip",
        "why": "",
    },
)


class _Metadata:
    """What the report asks the database: two deployments by the gate for each better model."""

    def __init__(self, deployments: Sequence[Deployment], level: float) -> None:
        self.rows, self.level = deployments, level

    def deployments(self) -> Sequence[Deployment]:
        return self.rows

    def producers(self, id: str) -> list[Any]:
        return [SimpleNamespace(config={"bootstrap": {"level": self.level}})]

    def artifact(self, id: str) -> None:
        return None

    def round(self, number: int) -> None:
        return None

    def runs(self, **filters: Any) -> list[Any]:
        return []

    def canaries(self) -> list[Any]:
        return []

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """The queue has no batch."""
        yield SimpleNamespace(execute=lambda query: SimpleNamespace(mappings=list))


def sample_round(
    number: int,
    labels: int,
    new: int,
    action: str,
    metrics: Mapping[str, float],
    gain: Mapping[str, Any] | None = None,
) -> RoundState:
    """A finished round: metrics by name, and the gain with its ``metric``."""
    decision: dict[str, Any] = {"action": action}
    accuracy = next(iter(metrics.values()))
    if gain:
        before = accuracy - gain["difference"]
        values = f"{accuracy:.3f} >= {before:.3f} * 1.02 = {before * 1.02:.3f}"
        rules = [
            {"rule": "accuracy >= champion.accuracy * 1.02", "values": values, "holds": accuracy >= before * 1.02},
            {
                "rule": "latency_p99 <= champion.latency_p99 * 1.1",
                "values": "0.0613 <= 0.0609 * 1.1 = 0.0670",
                "holds": True,
            },
        ]
        interval = {name: gain[name] for name in ("difference", "low", "high", "n", "differing")}
        decision |= {"id": "decision-1", "rules": rules, "intervals": {gain["metric"]: interval}}
    counts = BatchCounts(asked=new, answered=new, used=new).to_json()
    results = {"dataset": counts} if new else {}
    return RoundState(candidate=f"model-{number}", labels=labels, metrics=metrics, decision=decision, results=results)


def sample_loop(states: Sequence[RoundState], metric: str = "accuracy", level: float = 0.95) -> LoopReport:
    """A loop of these finished rounds."""
    at = datetime(2026, 3, 14, 9, tzinfo=UTC)
    deployed = [number for number, state in enumerate(states) if state.action in ("baseline", "deploy")]
    deployments = [Deployment(number, f"model-{number}", number, "promote", "", at, "none") for number in deployed]
    workspace: Any = SimpleNamespace(metadata=_Metadata(deployments, level))
    records = [
        RoundRecord(workspace, Round(number, "done", None, state.candidate, state.decision, {}, 60.0, at, at), state)
        for number, state in enumerate(states)
    ]
    seconds = {"score": 9.1, "select": 0.6, "label": 0.1, "train": 141.0, "evaluate": 14.2, "decide": 0.3}
    entries = [
        {
            "round": record.number,
            "status": "done",
            "seconds": 170.0,
            "stages": seconds if record.number else {"evaluate": 13.9},
            **stage_values(stage_reports(None, record)),
        }
        for record in records
    ]
    last = next((number for number in reversed(deployed)), None)
    champion = {"id": f"model-{last}", "round": last, "metrics": states[last].metrics, "damage": []} if last else None
    final = {"metrics": states[last].metrics} if last else None
    state = {"rounds": entries, "champion": champion, "final": final, "rollback": None, "rounds_wanted": 4}
    config: Any = Config.read({"model": "tiny", "data": {"pool": "pool.csv", "test": "test.csv"}}, "posttrain.yaml")
    return LoopReport(config, LoopRecord(workspace, records), state, metric)


def _gain(difference: float, low: float, high: float) -> dict[str, Any]:
    return {"difference": difference, "low": low, "high": high, "n": 300, "differing": 40, "metric": "accuracy"}


def _metrics(accuracy: float) -> dict[str, float]:
    return {
        "accuracy": accuracy,
        "macro_f1": accuracy - 0.06,
        "invalid_rate": 0.0,
        "latency_p99": 0.0613,
        "champion.accuracy": 0.5,
    }


ROUNDS = (
    sample_round(0, 0, 0, "baseline", _metrics(0.113)),
    sample_round(1, 96, 96, "deploy", _metrics(0.547), _gain(0.434, 0.371, 0.497)),
    sample_round(2, 192, 96, "deploy", _metrics(0.763), _gain(0.216, 0.163, 0.270)),
    sample_round(3, 288, 96, "refuse", _metrics(0.641), _gain(-0.122, -0.171, -0.073)),
    sample_round(4, 348, 60, "deploy", _metrics(0.853), _gain(0.090, 0.053, 0.127)),
)


def sample_lines(steps: int, seed: int = 0, groups: int = 6, metrics: bool = True) -> list[dict[str, Any]]:
    """The lines of a training's metrics file."""
    rng = np.random.default_rng(seed)
    result = []
    for step in range(steps):
        norm = float(np.exp(0.3 * rng.standard_normal()))
        result.append(
            {
                "step": step,
                "epoch": 0,
                "loss": 1 + 2 * math.exp(-5 * step / steps) + 0.1 * float(rng.standard_normal()),
                "grad_norm": 90.0 if step == 40 else norm,
                "lr": 1e-4 * min(1, (step + 1) / 20) * (1 - step / steps),
                "tokens": 4000,
                "supervised_tokens": 900,
                "seconds": 2.0,
                "tokens_per_second": 2000 + 100 * float(rng.standard_normal()),
                "memory_bytes": 2_900_000_000,
                "update_ratio": 1e-3 * norm,
                "data_wait": 0.004,
                "mfu": 0.41,
                "loss_scale": None,
                "group_norms": {f"layers.{layer}": norm * (layer + 1) / 10 for layer in range(groups)},
                "metrics": {"rewards/margins": step / steps, "rewards/accuracies": 0.5} if metrics else {},
                "phases": {"forward": 0.6, "head": 0.2, "backward": 1.0, "optimizer": 0.1},
            }
        )
    return result


_REASONS = {"strategy": 60, "focus": 26, "explore": 10}


def sample_selection(number: int, gain: RoundGain | None = None) -> Selection:
    """A batch of 96 of 300 records; the first round's is a cold start."""
    rng = np.random.default_rng(number)
    cold = number == 1
    centres = rng.standard_normal((28, 2)) * 20
    points = centres[rng.integers(28, size=300 + 96 * (number - 1))] + rng.standard_normal((300 + 96 * (number - 1), 2))
    scores = np.full(300, np.nan) if cold else rng.gamma(2.0, 0.5, 300)
    counts = {"cold_start": 96} if cold else _REASONS
    reasons = [reason for reason, count in counts.items() for _ in range(count)]
    labels = list(LABELS)
    chosen = [
        ChosenRecord(
            id=f"{rank:020x}",
            rank=rank,
            reason=reason,
            score=None if cold else float(scores[rank - 1]),
            predicted=None if cold else labels[rank % 28],
            label=labels[rank % 27],
            input="Where is my parcel? It should have come on Tuesday, and nobody answers. " * (3 + rank % 4),
            why="" if cold else "entropy 1.2, more than 90% of the pool",
            inclusion=10 / 300 if reason == "explore" else None,
        )
        for rank, reason in enumerate(reasons, 1)
    ]
    return Selection(
        round=number,
        strategy="diverse" if cold else "uncertain_diverse",
        records=96,
        scored=0 if cold else 300,
        embedded=300 if cold else 900,
        pool=1313 - 96 * (number - 1),
        reasons=counts,
        worst_classes=() if cold else tuple(labels[-6:]),
        chosen=tuple(chosen),
        map=PoolMap(
            {entry.id: (float(x), float(y)) for entry, (x, y) in zip(chosen, points[:96].tolist(), strict=True)},
            points[96:300],
            points[300:],
        ),
        scores=scores,
        scored_since=np.zeros(0) if cold else rng.gamma(2.0, 0.5, 40),
        gain=gain,
        stop_reason="the last 3 champions answer the pool alike (kappa 0.992)" if number == 4 else "",
        calibration={} if cold else {"temperature": 1.31, "ece_before": 0.112, "ece_after": 0.034},
        missing=("There are no scores: no model had been trained yet.",) if cold else (),
    )


SELECTIONS = (
    sample_selection(1),
    sample_selection(2),
    sample_selection(3, RoundGain(3, "accuracy", 0.081, 0.012, 0.168, -0.122)),
    sample_selection(4, RoundGain(4, "accuracy", 0.064, 0.008, 0.131, 0.09)),
)

TRAININGS = {
    number: training_from_steps(
        f"round {number}", sample_lines(30 * number, seed=number), _DECISIONS if number == 4 else ()
    )
    for number in range(1, 5)
}

FUNNEL: tuple[tuple[str, str | None, int], ...] = (
    ("pool", None, 1500),
    ("pool", "exact duplicate", 82),
    ("pool", "near duplicate", 61),
    ("pool", "leaked from test", 44),
    ("test", None, 300),
    ("test", "exact duplicate", 0),
)

CONFUSIONS = [
    {"expected": expected, "predicted": predicted, "count": count} for expected, predicted, count in _CONFUSIONS
]


def sample_lineage() -> Section:
    nodes = [LineageNode(name, name, "file", True) for name in ("pool.csv", "answers.csv")]
    nodes += [LineageNode("dataset-0a41be77c1d2e3f4", "pool@v1", "dataset", True)]
    edges = [("pool.csv", "dataset-0a41be77c1d2e3f4")]
    before = None
    for number in range(1, 5):
        mark = number != 3
        data, model = f"dataset-{number}f83c2d7a90b41e6", f"model-{number}c1d2e3f4a5b6c7d"
        nodes += [
            LineageNode(data, f"train@v{number}", "dataset", mark),
            LineageNode(model, f"round {number}", "model", number == 4),
        ]
        edges += [("answers.csv", data), (data, model)]
        edges += [(before, data)] if before else []
        before = data if mark else before
        if mark:
            nodes.append(LineageNode(f"deployment-{number}", f"round {number}", "deployment", number == 4))
            edges.append((model, f"deployment-{number}"))
    return Section.of("Lineage", "Which artifact was built from which.", lineage(nodes, edges, "lineage"))


def sample_page(
    *,
    rounds: Sequence[RoundState] = ROUNDS,
    selections: Sequence[Selection] = SELECTIONS,
    trainings: Mapping[int, TrainingCurves] = TRAININGS,
    labels: Mapping[str, int] = LABELS,
    confusions: Sequence[Mapping[str, Any]] = CONFUSIONS,
    funnel: Sequence[tuple[str, str | None, int]] = FUNNEL,
    heading: str = "Support messages, sorted by intent",
    detail: float = 1.0,
) -> Page:
    """A report like that of a real run."""
    loop = sample_loop(rounds)
    wrong = {label: sum(n for expected, _, n in _CONFUSIONS if expected == label) for label in LABELS}
    per_class = [
        {
            "label": label,
            "support": n,
            "precision": 0.9,
            "recall": (n - min(wrong[label], n)) / n,
            "f1": 0.86 - 0.01 * wrong[label],
        }
        for label, n in LABELS.items()
    ]
    ids = [Cell(code=f"dataset-{number}f83c2d7a90b41e6") for number in (1, 2, 4)]
    versions = [
        (f"train@v{number}", "96 records", id, parent)
        for number, id, parent in zip((1, 2, 4), ids, ("–", *ids[:2]), strict=True)
    ]
    sections = [
        curve_section(loop),
        decisions_section(loop),
        selection_section(selections, detail),
        trainings_section(trainings, detail),
        labels_section(labels),
        classes_section(per_class),
        confusion_section(confusions, per_class),
        funnels_section(funnel, versions),
        sample_lineage(),
        time_section(loop),
    ]
    task = "Name the intent of a customer's message to an online shop: one of 28, such as refund_status."
    return Page(heading, "demo", task, headline(loop), sections, "Champion `model-4`.")


def empty_page() -> Page:
    """A report on a workspace in which nothing has run."""
    loop = sample_loop(())
    sections = [
        curve_section(loop),
        decisions_section(loop),
        selection_section(()),
        trainings_section({}),
        labels_section({}),
        classes_section([]),
        confusion_section([], []),
        funnels_section((), ()),
        Section("Lineage", [], "Nothing has been made yet."),
        time_section(loop),
    ]
    return Page("Nothing yet", "new", "", headline(loop), sections)
