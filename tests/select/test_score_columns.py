"""Records that were embedded and not asked: what is taken from their neighbours, and how they are chosen."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.spatial.distance import cdist

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
        "source": np.array([f"file {row}" for row in range(rows)], dtype=object),
        "cost": generator.random(rows),
        "embeddings": points(rows),
    }


@pytest.mark.parametrize("known", [1, 3, 40])
def test_neighbours_speak_for_those_that_were_not_asked(known: int) -> None:
    given, where = columns(60), points(60)
    asked = np.zeros(60, bool)
    asked[np.random.default_rng(2).permutation(60)[:known]] = True
    result = knn_impute(given, asked, where)
    rows = np.flatnonzero(asked)
    for row in range(60):
        order = rows[np.argsort(cdist(where[[row]], where[rows], "cosine")[0])][:KNN_NEIGHBOURS]
        if asked[row]:
            order = np.array([row])
        assert result["entropy"][row] == pytest.approx(given["entropy"][order].mean())
        assert result["probabilities"][row] == pytest.approx(given["probabilities"][order].mean(axis=0))
        assert result["predicted"][row] == given["predicted"][order[0]]
        assert (result["source"][row], result["cost"][row]) == (given["source"][row], given["cost"][row])


def test_a_neighbour_without_a_number_is_left_out_of_the_mean() -> None:
    given = columns(8)
    given["entropy"] = np.array([0.2, np.nan, 0.6, np.nan, 0.1, 0.1, np.nan, np.nan])
    where = np.array([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [1, 0], [0, 1], [1, 0]], np.float32)
    imputed = knn_impute(given, np.arange(8) < 5, where)
    assert imputed["entropy"][6] == pytest.approx(0.3)
    given["entropy"][:5] = np.nan
    assert np.isnan(knn_impute(given, np.arange(8) < 5, where)["entropy"][6])


def test_many_are_compared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given, asked = columns(90), np.arange(90) % 3 == 0
    whole = knn_impute(given, asked, points(90))
    monkeypatch.setattr(score_columns, "_PAIRS_PER_BLOCK", 100)
    parts = knn_impute(given, asked, points(90))
    assert all((whole[name] == parts[name]).all() for name in whole)


def table(ids: list[str], where: np.ndarray, doubt: np.ndarray | None) -> pa.Table:
    """Records of two labels, asked where there is a doubt of each."""
    p = np.full((len(ids), 2), np.nan) if doubt is None else np.column_stack([1 - doubt, doubt])
    words: Any = [None] * len(ids) if doubt is None else ["a"] * len(ids)
    return pa.table(
        {
            "id": ids,
            "source": ["pool.csv"] * len(ids),
            "cost": [1.0] * len(ids),
            "entropy": p[:, 1],
            "least_confidence": p[:, 1],
            "margin": p[:, 0] - p[:, 1],
            "predicted": words,
            "runner_up": words,
            "confidence": p[:, 0],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(where.ravel()), WIDTH),
            "probabilities": pa.FixedSizeListArray.from_arrays(pa.array(p.ravel(), pa.float32()), 2),
        },
        schema=score_schema(WIDTH, 2).with_metadata({"sampled": str(len(ids)), "pool": "400"}),
    )


def apart() -> np.ndarray:
    """Two heaps on both sides of the first axis."""
    result = points(200)
    result[:, 0] += 2 * np.sign(result[:, 0])
    return result


@pytest.fixture
def halves() -> tuple[pa.Table, pa.Table]:
    """40 asked records of a pool of 400, and 160 that were not; the champion doubts the one heap."""
    where = apart()
    doubt = np.where(where[:, 0] > 0, 0.4, 0.01)
    ids = [f"{row:04d}" for row in range(200)]
    return table(ids[:40], where[:40], doubt[:40]), table(ids[40:], where[40:], None)


def test_what_was_not_asked_is_chosen_where_its_neighbours_are_doubted(halves: tuple[pa.Table, pa.Table]) -> None:
    asked, unasked = halves
    config = SelectConfig(strategy="facility_location", options={"by": "least_confidence"}, explore=0.25)
    batch = choose_batch(config, asked, 40, 3, unscored=unasked, cold=False).to_pylist()
    known = set(asked["id"].to_pylist())
    drawn = [row for row in batch if row["reason"] == "explore"]
    chosen = [row for row in batch if row["reason"] == "strategy"]
    assert len(drawn) == 10
    assert {row["id"] for row in drawn} <= known
    assert {row["inclusion"] for row in drawn} == {10 / 400}
    beyond = [row for row in chosen if row["id"] not in known]
    assert len(beyond) > len(chosen) / 2
    assert all(row["predicted"] is None and "least_confidence about 0." in row["why"] for row in beyond)
    assert np.mean([apart()[int(row["id"]), 0] > 0 for row in beyond]) > 0.75


def test_no_more_is_drawn_than_was_asked(halves: tuple[pa.Table, pa.Table]) -> None:
    asked, unasked = halves
    config = SelectConfig(strategy="facility_location", explore=0.5)
    batch = choose_batch(config, asked.slice(0, 5), 60, 3, unscored=unasked, cold=False).to_pylist()
    assert [row["inclusion"] for row in batch if row["reason"] == "explore"] == [5 / 400] * 5


def test_what_the_neighbours_say_is_told_as_theirs(halves: tuple[pa.Table, pa.Table]) -> None:
    asked, unasked = halves
    config = SelectConfig(strategy="facility_location", explore=0, focus=1)
    known = set(asked["id"].to_pylist())
    for row in choose_batch(
        config, asked, 40, 3, unscored=unasked, targets=FocusTargets(["a"]), cold=False
    ).to_pylist():
        assert row["why"].startswith("may be `a`" if row["id"] in known else "like its neighbours may be `a`")


def test_nothing_beside_changes_nothing(halves: tuple[pa.Table, pa.Table]) -> None:
    asked, unasked = halves
    config = SelectConfig().of_round(2)
    alone = choose_batch(config, asked, 12, 3, cold=False)
    assert choose_batch(config, asked, 12, 3, unscored=unasked.slice(0, 0), cold=False).equals(alone)


def test_a_round_that_does_not_cover_the_pool_embeds_no_more_than_it_asks() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    assert [config.embedded_in(1, cold) for cold in (True, False)] == [500, 500]
    for strategy in ("entropy", "badge", "mmr", "composite", "uncertain_diverse"):
        ranked = SelectConfig(pool_sample=30, pool_embedded=500, strategy=strategy)
        assert [ranked.embedded_in(1, cold) for cold in (True, False)] == [500, 30]
    drawn = SelectConfig(pool_sample=30, pool_embedded=500, strategy="random", cold_start="random")
    assert [drawn.embedded_in(1, cold) for cold in (True, False)] == [30, 30]
    assert SelectConfig(pool_sample=30, pool_embedded=0).embedded_in(1, True) == 30
