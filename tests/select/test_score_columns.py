"""Embedded but unscored records: scores imputed from their neighbours, and the choice among them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select import score_columns
from posttrain.select.batch import choose_batch
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import FocusTargets
from posttrain.select.score_columns import KNN_NEIGHBOURS, knn_impute
from posttrain.select.scores.table import score_schema

WIDTH = 6


def points(rows: int, seed: int = 0) -> np.ndarray:
    result = np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32)
    return result / np.linalg.norm(result, axis=1, keepdims=True)


def columns(rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        "entropy": generator.random(rows),
        "probabilities": generator.dirichlet(np.ones(3), rows).astype(np.float32),
        "predicted": np.array([f"answer {row}" for row in range(rows)], dtype=object),
        "embeddings": points(rows),
    }


@pytest.mark.parametrize("scored_count", [1, 3, 40])
def test_scores_of_unscored_records_are_means_of_their_nearest_scored_neighbours(scored_count: int) -> None:
    from scipy.spatial.distance import cdist

    scores, embeddings = columns(60), points(60)
    scored = np.zeros(60, bool)
    scored[np.random.default_rng(2).permutation(60)[:scored_count]] = True
    result = knn_impute(scores, scored, embeddings)
    scored_rows = np.flatnonzero(scored)
    for row in range(60):
        order = scored_rows[np.argsort(cdist(embeddings[[row]], embeddings[scored_rows], "cosine")[0])][:KNN_NEIGHBOURS]
        if scored[row]:
            order = np.array([row])
        assert result["entropy"][row] == pytest.approx(scores["entropy"][order].mean())
        assert result["probabilities"][row] == pytest.approx(scores["probabilities"][order].mean(axis=0))
        assert result["predicted"][row] == scores["predicted"][order[0]]


def test_the_mean_skips_neighbours_without_a_value() -> None:
    scores = columns(8)
    scores["entropy"] = np.array([0.2, np.nan, 0.6, np.nan, 0.1, 0.1, np.nan, np.nan])
    embeddings = np.array([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [1, 0], [0, 1], [1, 0]], np.float32)
    imputed = knn_impute(scores, np.arange(8) < 5, embeddings)
    assert imputed["entropy"][6] == pytest.approx(0.3)
    scores["entropy"][:5] = np.nan
    assert np.isnan(knn_impute(scores, np.arange(8) < 5, embeddings)["entropy"][6])


def test_the_block_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, scored = columns(90), np.arange(90) % 3 == 0
    whole = knn_impute(scores, scored, points(90))
    monkeypatch.setattr(score_columns, "_PAIRS_PER_BLOCK", 100)
    in_blocks = knn_impute(scores, scored, points(90))
    assert all((whole[name] == in_blocks[name]).all() for name in whole)


def table(ids: list[str], embeddings: np.ndarray, uncertainty: np.ndarray | None) -> pa.Table:
    """Records of two labels; scored if each has an uncertainty."""
    p = np.full((len(ids), 2), np.nan) if uncertainty is None else np.column_stack([1 - uncertainty, uncertainty])
    labels: Any = [None] * len(ids) if uncertainty is None else ["a"] * len(ids)
    return pa.table(
        {
            "id": ids,
            "entropy": p[:, 1],
            "least_confidence": p[:, 1],
            "margin": p[:, 0] - p[:, 1],
            "predicted": labels,
            "runner_up": labels,
            "confidence": p[:, 0],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), WIDTH),
            "probabilities": pa.FixedSizeListArray.from_arrays(pa.array(p.ravel(), pa.float32()), 2),
        },
        schema=score_schema(WIDTH, 2).with_metadata({"sampled": str(len(ids)), "pool": "400"}),
    )


def choose(config: SelectConfig, scores: pa.Table, n: int, seed: int, **options: Any) -> pa.Table:
    return choose_batch(config, config.batch_strategy(cold=False), scores, n, seed, **options)


def two_clusters() -> np.ndarray:
    """Two clusters, one on each side of the first axis."""
    result = points(200)
    result[:, 0] += 2 * np.sign(result[:, 0])
    return result


@pytest.fixture
def halves() -> tuple[pa.Table, pa.Table]:
    """40 scored and 160 unscored records of a pool of 400; the champion is uncertain about one cluster."""
    embeddings = two_clusters()
    uncertainty = np.where(embeddings[:, 0] > 0, 0.4, 0.01)
    ids = [f"{row:04d}" for row in range(200)]
    return table(ids[:40], embeddings[:40], uncertainty[:40]), table(ids[40:], embeddings[40:], None)


def test_unscored_records_are_chosen_where_their_neighbours_are_uncertain(halves: tuple[pa.Table, pa.Table]) -> None:
    scored, unscored = halves
    config = SelectConfig(strategy="facility_location", options={"by": "least_confidence"}, explore=0.25)
    batch = choose(config, scored, 40, 3, unscored=unscored).to_pylist()
    scored_ids = set(scored["id"].to_pylist())
    explored = [row for row in batch if row["reason"] == "explore"]
    chosen = [row for row in batch if row["reason"] == "strategy"]
    assert len(explored) == 10
    assert {row["id"] for row in explored} <= scored_ids
    assert {row["inclusion"] for row in explored} == {10 / 400}
    imputed = [row for row in chosen if row["id"] not in scored_ids]
    assert len(imputed) > len(chosen) / 2
    assert all(row["predicted"] is None and "least_confidence about 0." in row["why"] for row in imputed)
    assert np.mean([two_clusters()[int(row["id"]), 0] > 0 for row in imputed]) > 0.75


def test_exploration_samples_only_scored_records(halves: tuple[pa.Table, pa.Table]) -> None:
    scored, unscored = halves
    config = SelectConfig(strategy="facility_location", explore=0.5)
    batch = choose(config, scored.slice(0, 5), 60, 3, unscored=unscored).to_pylist()
    assert [row["inclusion"] for row in batch if row["reason"] == "explore"] == [5 / 400] * 5


def test_the_reason_says_where_a_prediction_comes_from_neighbours(halves: tuple[pa.Table, pa.Table]) -> None:
    scored, unscored = halves
    config = SelectConfig(strategy="facility_location", explore=0, focus=1)
    scored_ids = set(scored["id"].to_pylist())
    for row in choose(config, scored, 40, 3, unscored=unscored, targets=FocusTargets(["a"])).to_pylist():
        assert row["why"].startswith("may be `a`" if row["id"] in scored_ids else "like its neighbours may be `a`")


def test_an_empty_unscored_table_changes_nothing(halves: tuple[pa.Table, pa.Table]) -> None:
    scored, unscored = halves
    config = SelectConfig()
    expected = choose(config, scored, 12, 3)
    assert choose(config, scored, 12, 3, unscored=unscored.slice(0, 0)).equals(expected)


def test_a_round_that_does_not_cover_the_pool_embeds_only_what_it_scores() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    assert [config.embedding_limit(cold) for cold in (True, False)] == [500, 500]
    for strategy in ("entropy", "badge", "mmr", "uncertain_diverse"):
        ranked = SelectConfig(pool_sample=30, pool_embedded=500, strategy=strategy)
        assert [ranked.embedding_limit(cold) for cold in (True, False)] == [500, 30]
    random = SelectConfig(pool_sample=30, pool_embedded=500, strategy="random")
    assert [random.embedding_limit(cold) for cold in (True, False)] == [30, 30]
    assert SelectConfig(pool_sample=30, pool_embedded=0).embedding_limit(True) == 30
