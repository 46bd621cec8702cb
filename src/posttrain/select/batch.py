"""Builds a round's batch from exploration, focus and the strategy, with near duplicates last."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import NO_FOCUS, FocusTargets, in_weak_classes, nearest_hard_case
from posttrain.select.pool_sample import sample_sizes
from posttrain.select.reasons import BatchChoice, batch_reasons
from posttrain.select.score_columns import Columns, knn_impute, score_columns, with_labelled
from posttrain.select.selectors.registry import select
from posttrain.select.selectors.similarity import Floats, Rows, whiten
from posttrain.select.strategy import BatchStrategy

BATCH_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("reason", pa.string()),  # explore, focus, strategy or cold_start
        pa.field("why", pa.string()),
        pa.field("rank", pa.int32()),  # 1 is the first to label
        pa.field("inclusion", pa.float64()),  # probability with which exploration drew the record; null for the others
        pa.field("uncertainty", pa.float64()),  # entropy in nats
        pa.field("predicted", pa.string()),
    ]
)

Mask = npt.NDArray[np.bool_]

_ORDER = ("cold_start", "focus", "strategy", "explore")
_MAX_ATTEMPTS = 10  # times that near duplicates are replaced by other rows


def choose_batch(
    config: SelectConfig,
    strategy: BatchStrategy,
    scores: pa.Table,
    n: int,
    seed: int,
    *,
    unscored: pa.Table | None = None,
    targets: FocusTargets = NO_FOCUS,
    labelled: np.ndarray | None = None,
    random_reason: str = "",
) -> pa.Table:
    """Chooses the next records to label.

    Of a pool that a trained champion has scored, ``config.explore`` of the batch is drawn uniformly. A cold strategy
    chooses all the rest. Otherwise, ``config.focus`` is chosen by the strategy among records near the champion's weak
    points, and the rest by the strategy among all others. The strategy fills what one part cannot. Near duplicates come
    last, except random ones.

    Args:
        config: the config section ``select``.
        strategy: what the batch is chosen by.
        scores: the table of ``score_pool``; its row order does not matter.
        n: number of records; all when the table has fewer.
        seed: fixes every draw.
        unscored: the table of ``unscored_table``: further records to choose from, whose scores are imputed from their
            nearest scored neighbours.
        targets: the weak points that ``config.focus`` is for.
        labelled: float [L, D] embeddings, by the scoring model, of records that have a label; their neighbourhoods
            count as covered.
        random_reason: why a strategy of random draws is used; empty if it was named.

    Returns:
        Table with the schema ``BATCH_SCHEMA``, best first within each reason: focus, strategy, explore.
    """
    # By id: the caller's order of rows must not decide ties.
    table = (scores if unscored is None else pa.concat_tables([scores, unscored])).sort_by("id")
    columns = score_columns(table)
    count = table.num_rows
    n = min(n, count)
    is_scored = table["predicted"].is_valid().to_numpy(zero_copy_only=False)
    embeddings = columns["embeddings"]
    # Whitened together: the pool and the labelled records must have the same principal components to be compared.
    points = whiten(embeddings if labelled is None else np.concatenate([embeddings, labelled.astype(embeddings.dtype)]))
    if is_scored.any() and not is_scored.all():
        columns = knn_impute(columns, is_scored, points[:count])
    extended = columns if labelled is None else with_labelled(columns, labelled)
    builder = BatchBuilder(strategy, config.near_duplicate, extended, points, count, seed)
    nearest = np.full(count, -1, np.int64)
    explored = min(config.explore * n, int(is_scored.sum()))
    if is_scored.any():
        # Uniformly, so that a model that is confidently wrong is still corrected, and the random part is an unbiased
        # sample of the pool. First, from everything, or it would only sample the rows that the others did not take.
        # Scored records are a uniform sample of the pool themselves, and their answers are known.
        builder.draw(_round_at_random(explored, seed), is_scored)
    if strategy.cold:
        builder.take("cold_start", n - builder.size)
    else:
        if targets.embeddings is not None:
            nearest = nearest_hard_case(columns["embeddings"], targets.embeddings)
        weak = in_weak_classes(columns["predicted"], columns["runner_up"], targets.classes) | (nearest >= 0)
        weak |= np.isin(table["id"].to_pylist(), list(targets.records))
        focused = min(round(config.focus * n), n - builder.size)
        builder.take("focus", focused, weak)
        builder.take("strategy", n - builder.size)
    parts = {reason: builder.parts[reason] for reason in _ORDER if reason in builder.parts}
    rows = np.concatenate([np.empty(0, np.int64), *parts.values()])
    reasons = [reason for reason, part in parts.items() for _ in part]
    share = explored / max(sample_sizes(scores).get("pool", count), 1)
    chosen = table.take(pa.array(rows))
    hard = [targets.records.get(id) for id in chosen["id"].to_pylist()]
    choice = BatchChoice(builder.columns, points, count, rows, reasons, nearest, is_scored, hard)
    return pa.table(
        {
            "id": chosen["id"],
            "reason": reasons,
            "why": batch_reasons(choice, strategy, targets, random_reason),
            "rank": np.arange(1, len(rows) + 1, dtype=np.int32),
            "inclusion": [share if reason == "explore" else None for reason in reasons],
            "uncertainty": chosen["entropy"],
            "predicted": chosen["predicted"],
        },
        schema=BATCH_SCHEMA,
    )


def with_predictions(batch: pa.Table, scores: pa.Table) -> pa.Table:
    """Returns the batch with uncertainty and prediction of records that were scored after they were chosen.

    Args:
        batch: from `choose_batch`.
        scores: score table of those records.
    """
    columns = scores.select(["id", "entropy", "predicted"]).rename_columns(["id", "uncertainty", "predicted"])
    by_id = {row["id"]: row for row in columns.to_pylist()}
    return pa.Table.from_pylist([row | by_id.get(row["id"], {}) for row in batch.to_pylist()], schema=batch.schema)


def near_duplicates(points: Floats, rows: Rows, taken_rows: Rows, cosine: float) -> Mask:
    """Marks rows that are at least as similar as ``cosine`` to one of ``taken_rows``, or to an earlier unmarked row.

    Args:
        points: float32 [N, d], rows of length 1 (see `whiten`).
        rows: int64 [M], best first.
        taken_rows: int64 [B], rows that are in the batch or labelled already.
        cosine: threshold from 0 to 1. Of Banking77 and of the demo's messages, four in five pairs above 0.9 share most
            of their words in order, and the others put the same question in other words.

    Returns:
        bool [M].
    """
    repeats = np.zeros(len(rows), bool)
    if len(taken_rows):
        repeats = (points[rows] @ points[taken_rows].T).max(axis=1) >= cosine
    similar = points[rows] @ points[rows].T >= cosine
    # One after the other: a row that repeats a marked row only is not a repeat of the batch.
    for index in range(len(rows)):
        repeats[index] |= bool((similar[index, :index] & ~repeats[:index]).any())
    return repeats


def _round_at_random(expected: float, seed: int) -> int:
    """Rounds to a whole number whose mean is ``expected``, so that small batches explore now and then too."""
    # 1e-9: 0.29 * 100 is 28.999999999999996 in floating point, and must give 29 every time.
    whole = math.floor(expected + 1e-9)
    return whole + int(np.random.default_rng(seed).random() < expected - whole - 1e-9)


@dataclass
class BatchBuilder:
    """Collects the rows of a batch, part by part.

    Attributes:
        strategy: what rows are chosen by.
        near_duplicate: cosine from which a row is a near duplicate; None for none.
        columns: columns of the score table, with rows for labelled records below.
        points: their whitened embeddings.
        count: number of rows of the score table.
        seed: seed of the draws.
        parts: rows by reason, best first.
    """

    strategy: BatchStrategy
    near_duplicate: float | None
    columns: Columns
    points: Floats
    count: int
    seed: int
    parts: dict[str, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows below the score table are labelled records: taken from the start, so that their neighbourhoods count.
        self._is_taken = np.arange(len(self.columns["embeddings"])) >= self.count

    @property
    def size(self) -> int:
        """The number of rows so far."""
        return sum(len(rows) for rows in self.parts.values())

    def draw(self, count: int, allowed: Mask) -> None:
        """Takes rows at random, among those that are allowed."""
        among = ~self._is_taken
        among[: self.count] &= allowed
        self._add("explore", self._select(count, among, "random", {}))

    def take(self, reason: str, count: int, allowed: Mask | None = None) -> None:
        """Takes rows by the strategy, among those that are allowed (None: all); near duplicates last."""
        among = ~self._is_taken
        if allowed is not None:
            among[: self.count] &= allowed
        name, options = self.strategy.name, self.strategy.options
        self._add(reason, np.empty(0, np.int64))
        candidates = among.copy()
        # A near duplicate teaches little and costs a label all the same. The strategy chooses again in its stead, as it
        # must see what is covered by now.
        for _ in range(_MAX_ATTEMPTS if self.near_duplicate else 0):
            rows = self._select(count - len(self.parts[reason]), candidates, name, options)
            repeats = self._repeats(rows)
            self._add(reason, rows[~repeats])
            candidates[rows] = False
            if not repeats.any():
                break
        # Near duplicates after all, where there is nothing else: a batch is not smaller for them.
        self._add(reason, self._select(count - len(self.parts[reason]), among & ~self._is_taken, name, options))

    def _repeats(self, rows: Rows) -> Mask:
        return near_duplicates(self.points, rows, np.flatnonzero(self._is_taken), self.near_duplicate or 1.0)

    def _select(self, count: int, candidates: Mask, name: str, options: Mapping[str, Any]) -> Rows:
        # Other rows are removed, not marked as labelled: they cover nothing yet.
        rows = np.flatnonzero(self._is_taken | candidates)
        columns = {column: values[rows] for column, values in self.columns.items()}
        selected: Rows = rows[select(name, columns, count, self.seed, self._is_taken[rows], **options)]
        return selected

    def _add(self, reason: str, rows: Rows) -> None:
        self.parts[reason] = np.append(self.parts.get(reason, np.empty(0, np.int64)), rows)
        self._is_taken[rows] = True
