"""Near duplicates within a batch, and the records that replace them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select.batch import choose_batch, near_duplicates
from posttrain.select.config import SelectConfig
from posttrain.select.scores.table import score_schema


def _circle_points(*degrees: float) -> np.ndarray:
    radians = np.radians(degrees)
    return np.column_stack([np.cos(radians), np.sin(radians)]).astype(np.float32)


def test_the_first_of_each_group_stays() -> None:
    points = _circle_points(0, 5, 10, 90, 91, 180)
    repeats = near_duplicates(points, np.arange(6), np.empty(0, np.int64), float(np.cos(np.radians(6))))
    # 10 degrees is near 5, which is a repeat itself and so covers nothing.
    assert repeats.tolist() == [False, True, False, False, True, False]


def test_chosen_rows_count_and_the_first_in_order_stays() -> None:
    points = _circle_points(0, 5, 90, 95)
    near = float(np.cos(np.radians(6)))
    assert near_duplicates(points, np.array([1, 3, 2]), np.array([0]), near).tolist() == [True, False, True]
    assert near_duplicates(points, np.array([2, 3]), np.array([0]), near).tolist() == [False, True]


def _table(vectors: np.ndarray, entropy: np.ndarray) -> pa.Table:
    rows = len(vectors)
    nulls = [None] * rows
    return pa.table(
        {
            "id": [f"{row:04d}" for row in range(rows)],
            "entropy": entropy,
            "least_confidence": entropy,
            "margin": -entropy,
            "predicted": nulls,
            "runner_up": nulls,
            "confidence": 1 - entropy,
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel(), pa.float32()), vectors.shape[1]),
        },
        schema=score_schema(vectors.shape[1]),
    )


@pytest.fixture(scope="module")
def twins() -> pa.Table:
    """Forty records, each twice with almost the same embedding; twins have the same entropy."""
    generator = np.random.default_rng(0)
    vectors = np.repeat(generator.normal(size=(40, 8)), 2, axis=0) + generator.normal(size=(80, 8)) * 1e-3
    return _table(vectors, np.repeat(np.linspace(0.9, 0.1, 40), 2))


def _choose(config: SelectConfig, scores: pa.Table, n: int, seed: int, **options: Any) -> pa.Table:
    return choose_batch(config, config.batch_strategy(cold=False), scores, n, seed, **options)


def _pairs(batch: pa.Table) -> list[int]:
    return [int(id) // 2 for id in batch["id"].to_pylist()]


def test_a_batch_holds_no_twins(twins: pa.Table) -> None:
    config = SelectConfig(strategy="entropy", explore=0.0, focus=0.0)
    assert _pairs(_choose(config, twins, 20, 0)) == list(range(20))
    with_twins = _choose(config.model_copy(update={"near_duplicate": None}), twins, 20, 0)
    assert _pairs(with_twins) == [pair for pair in range(10) for _ in range(2)]


def test_twins_of_labelled_records_come_last(twins: pa.Table) -> None:
    labelled = np.array(twins["embedding"].to_pylist(), np.float32)[:20]
    config = SelectConfig(strategy="entropy", explore=0.0, focus=0.0)
    assert _pairs(_choose(config, twins, 20, 0, labelled=labelled)) == list(range(10, 30))


def test_twins_are_chosen_once_nothing_else_is_available(twins: pa.Table) -> None:
    config = SelectConfig(strategy="entropy", explore=0.0, focus=0.0)
    chosen = _pairs(_choose(config, twins, 50, 0))
    assert chosen[:40] == list(range(40))
    assert len(chosen) == 50
    assert _choose(config, twins, 500, 0).num_rows == 80


def test_the_exploration_sample_keeps_its_twins(twins: pa.Table) -> None:
    predictions = pa.array(["a"] * twins.num_rows, pa.string())
    scores = twins.set_column(twins.column_names.index("predicted"), "predicted", predictions)
    batch = _choose(SelectConfig(explore=1.0, focus=0.0), scores, 40, 0)
    assert len(set(_pairs(batch))) < 40, "an unbiased sample of twins holds some"
    assert batch["inclusion"].to_pylist() == [0.5] * 40
