"""A report like that of a real run, an empty report, and a real browser."""

import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright

from posttrain.loop.batch_counts import BatchCounts
from posttrain.report.charts.lineage import LineageNode
from posttrain.web.report_data import (
    Champion,
    ClassRow,
    Confusion,
    DatasetRow,
    FunnelRow,
    GainRow,
    Report,
    RoundRow,
    RuleRow,
)
from posttrain.web.selection_reader import ChosenRecord, PoolMap, RoundGain, Selection
from posttrain.web.training_reader import training_from_steps

_LABELS = {
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


def _gain(difference: float, low: float, high: float) -> GainRow:
    return GainRow(difference, low, high, 300, "accuracy", 0.95)


def _round(
    number: int, labels: int, new: int, decision: str, accuracy: float, champion: float, gain: GainRow | None
) -> RoundRow:
    rules: tuple[RuleRow, ...] = ()
    if gain:
        before = accuracy - gain.difference
        values = f"{accuracy:.3f} >= {before:.3f} * 1.02 = {before * 1.02:.3f}"
        rules = (
            RuleRow("accuracy >= champion.accuracy * 1.02", values, accuracy >= before * 1.02),
            RuleRow("latency_p99 <= champion.latency_p99 * 1.1", "0.0613 <= 0.0609 * 1.1 = 0.0670", True),
        )
    seconds = {
        "score": 9.1,
        "select": 0.6,
        "label": 0.1,
        "train": 41.0 + labels / 3,
        "evaluate": 14.2,
        "decide": 0.3,
    }
    return RoundRow(
        number=number,
        labels=labels,
        batch=BatchCounts(asked=new, answered=new, learned=new),
        decision=decision,
        metrics={
            "accuracy": accuracy,
            "macro_f1": accuracy - 0.06,
            "invalid_rate": 0.0,
            "latency_p99": 0.0613,
            "champion.accuracy": 0.5,
        },
        champions=(champion,),
        interval=gain,
        rules=rules,
        seconds={"evaluate": 13.9} if number == 0 else seconds,
        reasons={"uncertain": new // 2, "hard_case": new - new // 2} if new else {},
        note="Labels of this round came from the annotator “careless”." if decision == "refuse" else "",
    )


def _lines(steps: int, seed: int = 0, groups: int = 6, metrics: bool = True) -> list[dict[str, Any]]:
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


def _selection(number: int, gain: RoundGain | None = None) -> Selection:
    """A batch of 96 of 300 records; the first round's is a cold start."""
    rng = np.random.default_rng(number)
    cold = number == 1
    centres = rng.standard_normal((28, 2)) * 20
    points = centres[rng.integers(28, size=300 + 96 * (number - 1))] + rng.standard_normal((300 + 96 * (number - 1), 2))
    scores = np.full(300, np.nan) if cold else rng.gamma(2.0, 0.5, 300)
    counts = {"cold_start": 96} if cold else _REASONS
    reasons = [reason for reason, count in counts.items() for _ in range(count)]
    labels = list(_LABELS)
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


@pytest.fixture(scope="session")
def training_lines() -> Callable[..., list[dict[str, Any]]]:
    """``training_lines(steps, seed=..., groups=..., metrics=...)``: the lines of a training's metrics file."""
    return _lines


@pytest.fixture(scope="session")
def report() -> Report:
    rounds = (
        _round(0, 0, 0, "baseline", 0.113, 0.113, None),
        _round(1, 96, 96, "deploy", 0.547, 0.547, _gain(0.434, 0.371, 0.497)),
        _round(2, 192, 96, "deploy", 0.763, 0.763, _gain(0.216, 0.163, 0.270)),
        _round(3, 288, 96, "refuse", 0.641, 0.763, _gain(-0.122, -0.171, -0.073)),
        _round(4, 348, 60, "deploy", 0.853, 0.853, _gain(0.090, 0.053, 0.127)),
    )
    nodes = [LineageNode("pool.csv", "pool.csv", "file", True), LineageNode("answers.csv", "answers.csv", "file", True)]
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
    wrong = {label: sum(n for expected, _, n in _CONFUSIONS if expected == label) for label in _LABELS}
    return Report(
        title="Support messages, sorted by intent",
        workspace="demo",
        task="Name the intent of a customer's message to an online shop: one of 28, such as refund_status.",
        champion=Champion("model-4c1d2e3f4a5b6c7d", 4, rounds[-1].metrics),
        rounds=rounds,
        label_counts=_LABELS,
        per_class=tuple(
            ClassRow(label, n, 0.9, (n - min(wrong[label], n)) / n, 0.86 - 0.01 * wrong[label])
            for label, n in _LABELS.items()
        ),
        confusion=tuple(Confusion(*pair) for pair in _CONFUSIONS),
        funnel=(
            FunnelRow("pool", "in", "", 1500),
            FunnelRow("pool", "exact_duplicates", "exact_duplicate", 82),
            FunnelRow("pool", "near_duplicates", "near_duplicate", 61),
            FunnelRow("pool", "leaks", "leaked_from_test", 44),
            FunnelRow("test", "in", "", 300),
            FunnelRow("test", "exact_duplicates", "exact_duplicate", 0),
        ),
        datasets=(
            DatasetRow("pool", 1, "dataset-0a41be77c1d2e3f4", None, {"records": 1313, "rejected": 187}),
            DatasetRow("train", 1, "dataset-1f83c2d7a90b41e6", None, {"records": 96}),
            DatasetRow("train", 2, "dataset-2f83c2d7a90b41e6", "dataset-1f83c2d7a90b41e6", {"records": 192}),
            DatasetRow("train", 4, "dataset-4f83c2d7a90b41e6", "dataset-2f83c2d7a90b41e6", {"records": 252}),
        ),
        lineage_nodes=tuple(nodes),
        lineage_edges=tuple(edges),
        selections=(
            _selection(1),
            _selection(2),
            _selection(3, RoundGain(3, "accuracy", 0.081, 0.012, 0.168, -0.122)),
            _selection(4, RoundGain(4, "accuracy", 0.064, 0.008, 0.131, 0.09)),
        ),
        trainings=tuple(
            training_from_steps(f"round {number}", _lines(30 * number, seed=number), _DECISIONS if number == 4 else ())
            for number in range(1, 5)
        ),
        final={
            "accuracy": 0.853,
            "macro_f1": 0.793,
            "invalid_rate": 0.0,
            "latency_p50": 0.041,
            "latency_p99": 0.0613,
        },
        timings={"outside_model_compute": 7.4},
        created="2026-03-14 09:26 UTC",
    )


@pytest.fixture(scope="session")
def bare_report() -> Report:
    return Report(title="Nothing yet", workspace="new", task="", champion=None, rounds=())


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # The headless shell is Chromium without its windows, and takes half of its time.
    programs = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, programs)), None)
    assert executable, "these tests need Chromium: apt-get install chromium"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        yield browser
        browser.close()
