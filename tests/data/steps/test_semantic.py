"""Semantic duplicates, and the clusters of vectors behind them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.similarity.cosine import cosine_clusters, cosines
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.duplicates import Semantic
from posttrain.data.steps.step import DataStep
from posttrain.models.embedder import Embedder
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, table_of

pytestmark = pytest.mark.slow

CARD = "The card that I ordered has not arrived yet."


class TestSemantic(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Semantic()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            {"prompt": CARD, "completion": "card"},
            {"prompt": "The card which I ordered has not arrived yet!", "completion": "card"},
            {"prompt": "The card which I ordered has not arrived yet!", "completion": "delivery"},
            {"prompt": "How do I change my PIN?", "completion": "pin"},
            CARD.replace("ordered", "have ordered"),
            CARD,
        )

    def test_the_first_of_each_answer_stays(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [1, 3, 4, 5]
        rejected_rows = outcome.rejected.to_pylist()
        assert [(row["line"], row["reason"]) for row in rejected_rows] == [
            (2, "semantic duplicate"),
            (6, "semantic duplicate"),
        ]
        ids = table["id"].to_pylist()
        assert [(row["cluster"], row["kept"]) for row in rejected_rows] == [(ids[0], ids[0]), (ids[0], ids[4])]
        embeddings = Embedder.load("minilm").embed([CARD, "The card which I ordered has not arrived yet!"])
        assert rejected_rows[0]["score"] == pytest.approx(float(embeddings[0] @ embeddings[1]), abs=1e-3)
        assert rejected_rows[0]["detail"] == f"cosine {rejected_rows[0]['score']:.3f} to f:1"

    def test_the_key_holds_a_digest_of_the_weights(self, step: DataStep) -> None:
        assert len(step.key()["model"]) == 64

    def test_a_folder_is_found_from_the_workspace(self, tmp_path: Path) -> None:
        (tmp_path / "encoder").mkdir()
        assert Semantic(model="encoder").located(tmp_path).model == str(tmp_path / "encoder")
        with pytest.raises(UserError, match=r"no config\.json"):
            Semantic(model="encoder").located(tmp_path).check()


def exhaustive(vectors: np.ndarray, threshold: float) -> np.ndarray:
    """Connected components of all pairs, by passing the smallest index on until nothing changes."""
    length = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    unit = vectors / np.where(length > 0, length, 1)
    near = (unit @ unit.T >= threshold) | np.eye(len(vectors), dtype=bool)
    cluster = np.arange(len(vectors))
    while True:
        smallest = np.array([cluster[row].min() for row in near])
        if np.array_equal(smallest, cluster):
            return cluster
        cluster = smallest


def clouds(seed: int, rows: int, width: int = 16) -> np.ndarray:
    """Vectors around centres, some of them equal."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(rows // 8, width))
    vectors = centres[rng.integers(0, len(centres), rows)] + 0.12 * rng.normal(size=(rows, width))
    vectors[rows // 2] = vectors[0]
    vectors[1] = vectors[rows - 1] = 0
    return vectors.astype(np.float16)


@pytest.mark.parametrize("threshold", [0.9, 0.98, 1.0])
def test_clusters_equal_those_of_all_pairs(threshold: float) -> None:
    for seed in range(5):
        vectors = clouds(seed, 400)
        assert np.array_equal(cosine_clusters(vectors, threshold), exhaustive(vectors.astype(np.float64), threshold))


def test_cells_find_nearly_all_pairs_and_no_others() -> None:
    vectors = clouds(3, 6000)
    exact, cells = cosine_clusters(vectors, 0.98), cosine_clusters(vectors, 0.98, exact_rows=1000)
    assert np.array_equal(cells, cosine_clusters(vectors, 0.98, exact_rows=1000))
    members = np.flatnonzero(cells != np.arange(len(cells)))
    assert np.array_equal(exact[members], exact[cells[members]])
    assert len(np.unique(cells)) - len(np.unique(exact)) <= 0.01 * len(members)


def test_cosines_are_computed_in_double_precision() -> None:
    vectors = clouds(0, 100)[2:90]
    i, j = np.triu_indices(len(vectors))
    wide = vectors.astype(np.float64)
    expected = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(wide[i], wide[j], strict=True)]
    np.testing.assert_allclose(cosines(vectors, i, j), expected, rtol=1e-14)


def test_no_vectors_make_no_clusters() -> None:
    assert len(cosine_clusters(np.empty((0, 4), np.float16), 0.9)) == 0
