"""A batch that a simulated team has answered, with planted faults, for tests of the pages and their pictures."""

from datetime import timedelta

import numpy as np
from simulated_team import SimulatedAnnotator, TeamSettings, simulate_answers
from sqlalchemy import select

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.database import utc_now
from posttrain.store.label_tables import label_answers, label_items
from posttrain.store.workspace import Workspace

LABELS = ["card_declined", "charged_twice", "late_delivery", "order_status", "refund_request", "refund_status"]


def add_answers(store: Workspace, items: int = 300, name: str = "round-2") -> None:
    """Adds a batch with the answers of anna, ben, chloe and rosa: ben tires, and chloe accepts suggestions unread."""
    rng = np.random.default_rng(7)
    truth = [LABELS[at] for at in rng.integers(len(LABELS), size=items)]
    confusion = {"refund_request": ["refund_status"], "order_status": ["late_delivery"]}
    team = [
        SimulatedAnnotator("anna", 0.95, confusion, seconds=6.5),
        SimulatedAnnotator("ben", 0.92, confusion, seconds=9, drift_after=items // 3, drift_accuracy=0.5),
        SimulatedAnnotator("chloe", 0.88, confusion, seconds=4, suggestion_bias=0.75),
        SimulatedAnnotator("rosa", 0.9, confusion, seconds=11),
    ]
    settings = TeamSettings(overlap=2, gold_rate=0.15, suggestion_rate=0.6, planted_rate=0.2)
    answers = simulate_answers(team, truth, settings, started_at=utc_now() - timedelta(hours=3)).to_pylist()
    gold = {row["item"] for row in answers if row["expected"] is not None}
    queue = Queue(store.metadata)
    new = [NewItem(f"r{at}", {"text": f"message {at}"}, expected=right) for at, right in enumerate(truth)]
    queue.add_batch(
        name,
        "choice",
        [NewItem(item.record, item.content) for at, item in enumerate(new) if at not in gold],
        labels=LABELS,
        gold=[item for at, item in enumerate(new) if at in gold],
    )
    with store.metadata.transaction() as connection:
        query = select(label_items.c.record, label_items.c.id).where(label_items.c.batch == name)
        ids = dict(tuple(row) for row in connection.execute(query))
        store.metadata.insert_rows(label_answers, [_row(row, ids) for row in answers])
        for at in set(range(items)) - gold:
            given = [row for row in answers if row["item"] == at]
            # The last tenth is still open.
            if at < 0.9 * items:
                values = {
                    "answer": given[0]["resolution"],
                    "how": "majority",
                    "by": [row["annotator"] for row in given],
                }
                status = {"status": "done", "resolution": values, "answered": len(given), "wanted": len(given)}
                store.metadata.update_rows(label_items, label_items.c.id == ids[f"r{at}"], status)


def _row(row: dict, ids: dict[str, int]) -> dict:
    suggestion = None if row["suggestion"] is None else {"answer": row["suggestion"], "planted": row["planted"]}
    return {
        **{name: row[name] for name in ("annotator", "answer", "seconds", "guideline", "created_at")},
        **{"item": ids[row["record"]], "status": "answered", "suggestion": suggestion},
    }
