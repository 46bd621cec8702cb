"""Builds a round's batch from exploration, focus and the strategy, with near duplicates last."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select import reasons as why
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import FocusTargets, in_weak_classes, nearest_hard_case
from posttrain.select.pool_sample import sample_sizes
from posttrain.select.reasons import hard_case_reasons as why_near
from posttrain.select.score_columns import Columns, knn_impute, score_columns, with_labelled
from posttrain.select.scores.registry import UNCERTAINTY_SIGN
from posttrain.select.selectors.registry import select
from posttrain.select.selectors.similarity import Floats, Rows, whiten
from posttrain.store.errors import suggest

log = logging.getLogger("posttrain")

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

_MAX_ATTEMPTS = 10  # times that others are chosen in the place of near duplicates


def choose_batch(
    config: SelectConfig,
    scores: pa.Table,
    n: int,
    seed: int,
    *,
    unasked: pa.Table | None = None,
    weakness: FocusTargets = FocusTargets(),
    labelled: np.ndarray | None = None,
    cold: bool,
    because: str = "",
) -> pa.Table:
    """Choose the next records to label.

    Of a pool that a trained champion has answered, ``config.explore`` of the batch is drawn uniformly (so that a model
    that is wrong about what it knows is still corrected, and the drawn part is an unbiased sample of the pool). Cold,
    all the rest covers the pool by ``config.cold_start``. Warm, ``config.focus`` is chosen by the strategy among
    records near what evaluation found weakest, and the rest by the strategy among all others. What one part cannot fill
    goes to the strategy. Budgets and quotas are of the whole batch; what is drawn counts, and is not refused. Near
    duplicates come last; those that are drawn stay, or the sample would be none.

    Args:
        config: the config section ``select``, with the strategy of one round (see ``SelectConfig.of_round``).
        scores: the table of ``score_pool``; its row order does not matter.
        n: records wanted; all when the table has fewer.
        seed: fixes every draw.
        unasked: the table of ``unscored_table``: records to be covered and chosen too, of which the champion's answers
            are not known. What it would say is taken from the nearest that were asked.
        weakness: what ``config.focus`` goes by.
        labelled: float [L, D] embeddings, by the scoring model, of records that have a label; what lies near them is
            covered already for strategies that ask.
        cold: whether the champion's answers say nothing yet.
        because: why records are drawn at random where they are.

    Returns:
        Table with the schema ``BATCH``, best first within each reason: focus, strategy, explore.
    """
    table = (scores if unasked is None else pa.concat_tables([scores, unasked])).sort_by("id")
    columns = score_columns(table)
    count = table.num_rows
    wanted = min(n, count)
    asked = table["predicted"].is_valid().to_numpy(zero_copy_only=False)
    places = columns["embeddings"]
    points = whiten(places if labelled is None else np.concatenate([places, labelled.astype(places.dtype)]))
    if asked.any() and not asked.all():
        columns = knn_impute(columns, asked, points[:count])
    making = BatchBuilder(
        config, columns if labelled is None else with_labelled(columns, labelled), points, count, seed
    )
    near = np.full(count, -1, np.int64)
    explored = min(config.explore * wanted, int(asked.sum()))
    _warn_of_quotas(config.options, columns)
    if asked.any():
        # Exploration is drawn first, from everything, or it would only sample what the others left. Those that were
        # asked are a draw of the pool themselves, and the champion's answers are known of them.
        making.draw(_round_at_random(explored, seed), asked)
    if cold:
        making.take("cold_start", config.cold_start, wanted - making.chosen)
    else:
        if weakness.embeddings is not None:
            near = nearest_hard_case(columns["embeddings"], weakness.embeddings)
        weak = in_weak_classes(columns["predicted"], columns["runner_up"], weakness.classes) | (near >= 0)
        focused = min(round(config.focus * wanted), wanted - making.chosen)
        making.take("focus", str(config.strategy), focused, weak)
        making.take("strategy", str(config.strategy), wanted - making.chosen)
    parts = {reason: making.parts[reason] for reason in _ORDER if reason in making.parts}
    rows = np.concatenate([np.empty(0, np.int64), *parts.values()])
    reasons = [reason for reason, part in parts.items() for _ in part]
    share = explored / max(sample_sizes(scores).get("pool", count), 1)
    chosen = table.take(pa.array(rows))
    return pa.table(
        {
            "id": chosen["id"],
            "reason": reasons,
            "why": _why(config, weakness, making, rows, reasons, near, asked, because),
            "rank": np.arange(1, len(rows) + 1, dtype=np.int32),
            "inclusion": [share if reason == "explore" else None for reason in reasons],
            "uncertainty": chosen["entropy"],
            "predicted": chosen["predicted"],
        },
        schema=BATCH_SCHEMA,
    )


def with_predictions(batch: pa.Table, said: pa.Table) -> pa.Table:
    """A batch with what the champion has said since of some of its records.

    Args:
        batch: of `choose`.
        said: score table of those records.
    """
    known = said.select(["id", "entropy", "predicted"]).rename_columns(["id", "uncertainty", "predicted"]).to_pylist()
    by_id = {row["id"]: row for row in known}
    return pa.Table.from_pylist([row | by_id.get(row["id"], {}) for row in batch.to_pylist()], schema=batch.schema)


def _round_at_random(expected: float, seed: int) -> int:
    """A whole number of records that is ``expected`` on average, so that small batches explore now and then too."""
    whole = math.floor(expected + 1e-9)
    return whole + int(np.random.default_rng(seed).random() < expected - whole - 1e-9)


@dataclass
class BatchBuilder:
    """A batch as it is put together.

    Attributes:
        columns: of the score table, with rows for labelled records below.
        points: their whitened embeddings.
        count: rows of the score table.
        parts: rows by reason, best first.
    """

    config: SelectConfig
    columns: Columns
    points: Floats
    count: int
    seed: int
    parts: dict[str, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._taken = np.arange(len(self.columns["embeddings"])) >= self.count

    @property
    def chosen(self) -> int:
        """How many rows are chosen."""
        return sum(len(rows) for rows in self.parts.values())

    def draw(self, count: int, allowed: Mask) -> None:
        """Take rows at random, among those that are allowed."""
        among = ~self._taken
        among[: self.count] &= allowed
        self._add("explore", self._select("random", count, among, {}))

    def take(self, reason: str, strategy: str, count: int, allowed: Mask | None = None) -> None:
        """Take rows by a strategy, among those that are allowed (None: all); near duplicates last."""
        among = ~self._taken
        if allowed is not None:
            among[: self.count] &= allowed
        options = _cold_options(self.config) if reason == "cold_start" else self.config.options
        self._add(reason, np.empty(0, np.int64))
        left = among.copy()
        for _ in range(_MAX_ATTEMPTS if self.config.near_duplicate else 0):
            found = self._select(strategy, count - len(self.parts[reason]), left, options)
            repeats = self._repeats(found)
            self._add(reason, found[~repeats])
            left[found] = False
            if not repeats.any():
                break
        self._add(reason, self._select(strategy, count - len(self.parts[reason]), among & ~self._taken, options))

    def _repeats(self, found: Rows) -> Mask:
        return near_duplicates(self.points, found, np.flatnonzero(self._taken), self.config.near_duplicate or 1.0)

    def _select(self, strategy: str, count: int, free: Mask, options: dict[str, Any]) -> Rows:
        rows = np.flatnonzero(self._taken | free)
        some = {name: values[rows] for name, values in self.columns.items()}
        if isinstance(quotas := options.get("quotas"), dict):
            there = set(some["source"].tolist())
            options = {**options, "quotas": {name: share for name, share in quotas.items() if name in there}}
        batch = np.flatnonzero(np.isin(rows, np.concatenate([np.empty(0, np.int64), *self.parts.values()])))
        found: Rows = rows[select(strategy, some, count, self.seed, self._taken[rows], batch, **options)]
        return found

    def _add(self, reason: str, rows: Rows) -> None:
        self.parts[reason] = np.append(self.parts.get(reason, np.empty(0, np.int64)), rows)
        self._taken[rows] = True


def _cold_options(config: SelectConfig) -> dict[str, Any]:
    """A strategy's options hold in a cold start too, but for the doubt that it goes by, which nobody has yet."""
    same = config.cold_start == config.strategy
    return {name: value for name, value in config.options.items() if name != "by"} if same else {}


def _warn_of_quotas(options: dict[str, Any], columns: Columns) -> None:
    sources = sorted(set(columns["source"].tolist()))
    for name in sorted(set(options.get("quotas") or ()) - set(sources)):
        log.warning("  the quota of `%s` bounds nothing: no record is of it; %s", name, suggest(name, sources))


def _why(
    config: SelectConfig,
    weakness: FocusTargets,
    making: BatchBuilder,
    rows: Rows,
    reasons: list[str],
    near: Rows,
    asked: Mask,
    because: str,
) -> list[str]:
    """A line for each row."""
    columns = making.columns
    by = next(str(name) for name in (config.options.get("by"), config.strategy, "entropy") if name in UNCERTAINTY_SIGN)
    known = columns[by][: making.count] if by in columns else np.full(making.count, np.nan)
    doubts = why.uncertainty_reasons(by, known, rows, asked)
    covers = why.coverage_reasons(making.points, rows, making.count) if len(rows) else []
    cases = why_near(near, weakness.cases) if weakness.cases else [None] * making.count
    classes = frozenset(weakness.classes)
    found = []
    for row, reason, doubt, cover in zip(rows.tolist(), reasons, doubts, covers, strict=True):
        if reason == "explore":
            found.append("drawn at random from the whole pool")
            continue
        weak = why.weak_class_reason(
            columns["predicted"][row], columns["runner_up"][row], classes, asked=bool(asked[row])
        )
        facts = (weak, cases[row]) if reason == "focus" else ()
        if (config.cold_start if reason == "cold_start" else config.strategy) == "random":
            found.append(why.join_reasons(*facts, f"drawn at random, as {because}" if because else "drawn at random"))
            continue
        found.append(why.join_reasons(*facts, None if reason == "cold_start" else doubt, cover))
    return found


def near_duplicates(points: Floats, rows: Rows, beside: Rows, cosine: float) -> npt.NDArray[np.bool_]:
    """Which of some rows lie as near as ``cosine`` to one of ``beside``, or to an earlier one that does not.

    Args:
        points: float32 [N, d], rows of length 1 (see `whiten`).
        rows: int64 [M], in the order in which they count.
        beside: int64 [B], rows that are taken already.
        cosine: from 0 to 1. Of Banking77 and of the demo's messages, four in five pairs above 0.9 share most of their
            words in order, and the others put the same question in other words.

    Returns:
        bool [M].
    """
    repeats = np.zeros(len(rows), bool)
    if len(beside):
        repeats = (points[rows] @ points[beside].T).max(axis=1) >= cosine
    among = points[rows] @ points[rows].T >= cosine
    for place in range(len(rows)):
        repeats[place] |= bool((among[place, :place] & ~repeats[:place]).any())
    return repeats
