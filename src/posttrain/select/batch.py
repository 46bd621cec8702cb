"""The batch that goes to the annotators: focus, strategy and exploration put together."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from posttrain.select.config import SelectConfig
from posttrain.select.focus import near_hard_cases, of_worst_classes
from posttrain.select.selection import select

BATCH = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("reason", pa.string()),  # explore, focus, strategy or cold_start
        pa.field("rank", pa.int32()),  # 1 is the first to label
        pa.field("uncertainty", pa.float64()),  # entropy in nats
        pa.field("predicted", pa.string()),
    ]
)


def choose(
    config: SelectConfig,
    scores: pa.Table,
    n: int,
    seed: int,
    *,
    worst_classes: Sequence[str] = (),
    hard_cases: np.ndarray | None = None,
    labelled: np.ndarray | None = None,
    cold: bool,
) -> pa.Table:
    """Choose the next records to label.

    Cold, the whole batch covers the pool by ``config.cold_start``. Warm, ``config.explore`` of it is drawn
    uniformly from the whole pool (so that a model that is wrong about what it knows is still corrected, and
    the drawn part is an unbiased sample of the pool), ``config.focus`` is chosen by the strategy among
    records near what evaluation found weakest, and the rest by the strategy among all others. What one part
    cannot fill goes to the strategy.

    Args:
        config: the config section ``select``.
        scores: the table of ``score_pool``; its row order does not matter.
        n: records wanted; all when the table has fewer.
        seed: fixes every draw.
        worst_classes: labels on which the champion is weakest.
        hard_cases: float [H, D] embeddings, by the scoring model, of records that it gets wrong.
        labelled: float [L, D] embeddings, by the scoring model, of records that have a label; what lies near them is
            covered already for strategies that ask.
        cold: whether no champion has been trained yet.

    Returns:
        Table with the schema ``BATCH``, best first within each reason: focus, strategy, explore.
    """
    table = scores.sort_by("id")
    columns = score_columns(table)
    wanted = min(n, table.num_rows)
    known = 0 if labelled is None else len(labelled)
    beside = columns if labelled is None else _beside(columns, labelled)
    taken = np.arange(table.num_rows + known) >= table.num_rows
    everything = np.ones(table.num_rows, bool)
    parts: dict[str, np.ndarray] = {}

    def take(reason: str, strategy: str, count: int, allowed: np.ndarray = everything) -> None:
        rows = np.flatnonzero(taken | np.append(allowed, np.zeros(known, bool)))
        some = {name: values[rows] for name, values in beside.items()}
        options = config.options if reason in ("focus", "strategy") else {}
        parts[reason] = rows[select(strategy, some, count, seed, taken[rows], **options)]
        taken[parts[reason]] = True

    if cold:
        take("cold_start", config.cold_start, wanted)
    else:
        # Exploration is drawn first, from everything, or it would only sample what the others left.
        take("explore", "random", round(config.explore * wanted))
        take(
            "focus",
            config.strategy,
            round(config.focus * wanted),
            _weak(table, columns, worst_classes, hard_cases),
        )
        take("strategy", config.strategy, wanted - int(taken.sum()) + known)
    return _batch(table, {reason: parts[reason] for reason in _ORDER if reason in parts})


_ORDER = ("cold_start", "focus", "strategy", "explore")


def score_columns(scores: pa.Table) -> dict[str, np.ndarray]:
    """The columns of a score table as ``select`` takes them."""
    columns = {name: scores[name].to_numpy() for name in _COLUMNS}
    columns["embeddings"] = _matrix(scores, "embedding")
    if "probabilities" in scores.column_names:
        columns["probabilities"] = _matrix(scores, "probabilities")
    return columns


def _beside(columns: dict[str, np.ndarray], labelled: np.ndarray) -> dict[str, np.ndarray]:
    """The columns with rows for labelled records below, of which nothing is known but where they lie."""
    count = len(labelled)
    found = {}
    for name, values in columns.items():
        if name == "embeddings":
            below = labelled
        elif name == "probabilities":
            below = np.full((count, values.shape[1]), 1 / values.shape[1])
        else:
            below = np.full(count, "" if values.dtype == object else np.nan, values.dtype)
        found[name] = np.concatenate([values, below.astype(values.dtype)])
    return found


_COLUMNS = ("entropy", "least_confidence", "margin", "confidence", "cost", "source", "predicted")


def _matrix(scores: pa.Table, name: str) -> np.ndarray:
    width = scores.schema.field(name).type.list_size
    values: np.ndarray = scores[name].combine_chunks().flatten().to_numpy().reshape(-1, width)
    return values


def _weak(
    table: pa.Table,
    columns: dict[str, np.ndarray],
    worst_classes: Sequence[str],
    hard_cases: np.ndarray | None,
) -> np.ndarray:
    predicted = np.array(table["predicted"].to_pylist(), dtype=object)
    runner_up = np.array(table["runner_up"].to_pylist(), dtype=object)
    weak = of_worst_classes(predicted, runner_up, worst_classes)
    if hard_cases is not None:
        weak |= near_hard_cases(columns["embeddings"], hard_cases)
    return weak


def _batch(table: pa.Table, parts: dict[str, np.ndarray]) -> pa.Table:
    rows = np.concatenate([np.empty(0, np.int64), *parts.values()])
    chosen = table.take(pa.array(rows))
    return pa.table(
        {
            "id": chosen["id"],
            "reason": [reason for reason, part in parts.items() for _ in part],
            "rank": np.arange(1, len(rows) + 1, dtype=np.int32),
            "uncertainty": chosen["entropy"],
            "predicted": chosen["predicted"],
        },
        schema=BATCH,
    )
