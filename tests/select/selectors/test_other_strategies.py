"""Each strategy against a direct computation."""

import numpy as np
import pytest

from posttrain.select.selectors.clustering import typicality
from posttrain.select.selectors.registry import select

GENERATOR = np.random.default_rng(0)
PROBABILITIES = GENERATOR.dirichlet(np.ones(4), 80)
EMBEDDINGS = GENERATOR.normal(size=(80, 6)) + 1
UNIT = EMBEDDINGS / np.linalg.norm(EMBEDDINGS, axis=1, keepdims=True)
ENTROPY = -(PROBABILITIES * np.log(PROBABILITIES)).sum(axis=1)
SCORES = {"probabilities": PROBABILITIES, "embeddings": EMBEDDINGS}


def test_top_ranks_by_any_score() -> None:
    scores = {"perplexity": np.array([3.0, np.nan, 5.0, 1.0]), "confidence": np.array([0.3, 0.2, 0.9, 0.5])}
    assert select("top", scores, 3, by="perplexity").tolist() == [2, 0, 3]
    assert select("top", scores, 2, by="confidence").tolist() == [1, 0]


@pytest.mark.parametrize("labelled", [0, 5])
@pytest.mark.parametrize("relevance", [0.0, 0.3, 1.0])
def test_mmr_trades_uncertainty_against_similarity(relevance: float, labelled: int) -> None:
    taken = np.arange(80) < labelled
    result = select("mmr", SCORES, 8, 0, taken, relevance=relevance, dimensions=None)
    free = ENTROPY[labelled:]
    uncertainty, cosine = (ENTROPY - free.min()) / (free.max() - free.min()), UNIT @ UNIT.T
    chosen = list(range(labelled))
    for _ in range(8):
        similarity = cosine[:, chosen].max(axis=1) if chosen else np.zeros(80)
        values = relevance * uncertainty - (1 - relevance) * similarity
        values[chosen] = -np.inf
        chosen.append(int(values.argmax()))
    assert result.tolist() == chosen[labelled:]


def test_badge_chooses_large_and_different_gradients() -> None:
    probabilities = np.array([[0.98, 0.01, 0.01]] * 50 + [[0.4, 0.35, 0.25]] * 4)
    embeddings = np.concatenate([np.random.default_rng(0).normal(size=(50, 4)), np.eye(4) * 3])
    batches = [
        select("badge", {"probabilities": probabilities, "embeddings": embeddings}, 4, seed) for seed in range(50)
    ]
    # Gradients near zero are all similar: one of them represents all.
    assert np.mean([(rows >= 50).sum() for rows in batches]) > 2.8
    assert np.mean([rows[0] >= 50 for rows in batches]) > 0.9


def test_typicality_uses_only_neighbours_of_the_same_cluster() -> None:
    from sklearn.neighbors import NearestNeighbors

    points = np.random.default_rng(2).normal(size=(90, 3)).astype(np.float32)
    cluster = np.repeat([0, 1, 2], [50, 38, 2])
    result = typicality(points, cluster, np.random.default_rng(0))
    for number, neighbours in ((0, 20), (1, 20), (2, 1)):
        members = points[cluster == number]
        distances, _ = NearestNeighbors(n_neighbors=neighbours + 1).fit(members).kneighbors(members)
        np.testing.assert_allclose(result[cluster == number], 1 / distances[:, 1:].mean(axis=1), rtol=1e-3)


def test_typiclust_prefers_clusters_without_a_label() -> None:
    centres = np.eye(4) * 10
    group = np.repeat(np.arange(4), [40, 30, 20, 10])
    points = centres[group] + np.random.default_rng(1).normal(size=(100, 4)) * 0.1
    labelled = np.zeros(100, bool)
    labelled[[1, 75]] = True  # of the groups 0 and 2
    chosen = select("typiclust", {"embeddings": points}, 2, 0, labelled, dimensions=None)
    assert group[chosen].tolist() == [1, 3]
