"""Each strategy against a direct computation."""

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from posttrain.select.selectors.clustering import typicality
from posttrain.select.selectors.coverage import pure_radius
from posttrain.select.selectors.registry import select
from posttrain.store.errors import UserError

GENERATOR = np.random.default_rng(0)
PROBABILITIES = GENERATOR.dirichlet(np.ones(4), 80)
EMBEDDINGS = GENERATOR.normal(size=(80, 6)) + 1
UNIT = EMBEDDINGS / np.linalg.norm(EMBEDDINGS, axis=1, keepdims=True)
ENTROPY = -(PROBABILITIES * np.log(PROBABILITIES)).sum(axis=1)
SCORES = {"probabilities": PROBABILITIES, "embeddings": EMBEDDINGS}


def between_0_and_1(values: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = (values - values.min()) / (values.max() - values.min())
    return scaled


def test_top_ranks_by_any_column() -> None:
    scores = {"loss": np.array([3.0, np.nan, 5.0, 1.0])}
    assert select("top", scores, 3).tolist() == [2, 0, 3]
    assert select("top", scores, 2, by="loss", lowest=True).tolist() == [3, 0]


def test_k_center_takes_the_farthest_row_each_time() -> None:
    chosen = select("k_center", SCORES, 6, dimensions=None)
    distances = np.linalg.norm(EMBEDDINGS[:, None] - EMBEDDINGS, axis=-1)
    assert chosen[0] == np.linalg.norm(EMBEDDINGS - EMBEDDINGS.mean(axis=0), axis=1).argmin()
    for count in range(1, 6):
        assert chosen[count] == distances[:, chosen[:count]].min(axis=1).argmax()


def test_k_center_starts_from_the_labelled_rows() -> None:
    labelled = np.zeros(80, bool)
    labelled[[3, 40]] = True
    chosen = select("k_center", SCORES, 1, 0, labelled, dimensions=None)
    distances = np.linalg.norm(EMBEDDINGS[:, None] - EMBEDDINGS, axis=-1)
    assert chosen[0] == distances[:, labelled].min(axis=1).argmax()


@pytest.mark.parametrize("relevance", [0.0, 0.3, 1.0])
def test_mmr_trades_uncertainty_against_similarity(relevance: float) -> None:
    chosen = select("mmr", SCORES, 8, relevance=relevance, dimensions=None)
    uncertainty, cosine = between_0_and_1(ENTROPY), UNIT @ UNIT.T
    expected: list[int] = []
    for _ in range(8):
        similarity = cosine[:, expected].max(axis=1) if expected else np.zeros(80)
        values = relevance * uncertainty - (1 - relevance) * similarity
        values[expected] = -np.inf
        expected.append(int(values.argmax()))
    assert chosen.tolist() == expected


def test_composite_weighs_uncertainty_diversity_and_difficulty() -> None:
    difficulty = np.random.default_rng(5).random(80)
    scores = {**SCORES, "difficulty": difficulty}
    chosen = select("composite", scores, 8, uncertainty=0.5, diversity=0.8, difficulty=0.3, dimensions=None)
    worth = 0.5 * between_0_and_1(ENTROPY) + 0.3 * between_0_and_1(difficulty)
    expected = [int(worth.argmax())]
    while len(expected) < 8:
        values = worth + 0.8 * (1 - (UNIT @ UNIT[expected].T).max(axis=1)) / 2
        values[expected] = -np.inf
        expected.append(int(values.argmax()))
    assert chosen.tolist() == expected


def test_composite_needs_no_column_of_weight_zero() -> None:
    chosen = select("composite", {"entropy": ENTROPY}, 5, diversity=0)
    assert chosen.tolist() == select("entropy", {"entropy": ENTROPY}, 5).tolist()


def test_composite_keeps_to_quotas() -> None:
    source = np.where(np.arange(80) < 60, "web", "forum")
    entropy = np.where(np.arange(80) < 60, 1.0, 0.0) + np.arange(80) / 1000
    scores = {"entropy": entropy, "source": source}
    chosen = select("composite", scores, 10, diversity=0, quotas={"web": 0.3})
    assert (source[chosen] == "web").sum() == 3
    assert len(chosen) == 10
    assert len(select("composite", scores, 10, diversity=0, quotas={"web": 0.3, "forum": 0.2})) == 5
    with pytest.raises(UserError, match="no record is of source `wep`; did you mean `web`"):
        select("composite", scores, 3, diversity=0, quotas={"wep": 0.5})


def test_density_weighted_multiplies_uncertainty_by_density() -> None:
    density = (1 + (UNIT @ UNIT.T).mean(axis=1)) / 2
    expected = np.argsort(-between_0_and_1(ENTROPY) * density**2, kind="stable")[:9]
    assert select("density_weighted", SCORES, 9, weight=2.0, dimensions=None).tolist() == expected.tolist()


def test_badge_chooses_large_and_different_gradients() -> None:
    probabilities = np.array([[0.98, 0.01, 0.01]] * 50 + [[0.4, 0.35, 0.25]] * 4)
    embeddings = np.concatenate([np.random.default_rng(0).normal(size=(50, 4)), np.eye(4) * 3])
    batches = [
        select("badge", {"probabilities": probabilities, "embeddings": embeddings}, 4, seed) for seed in range(50)
    ]
    # Gradients near zero are all similar: one of them represents all.
    assert np.mean([(rows >= 50).sum() for rows in batches]) > 2.8
    assert np.mean([rows[0] >= 50 for rows in batches]) > 0.9


def test_prob_cover_takes_the_fullest_balls_first() -> None:
    sizes = [30, 20, 10, 5]
    centres = np.eye(4) * 10
    points = np.repeat(centres, sizes, axis=0) + np.random.default_rng(1).normal(size=(65, 4)) * 0.05
    group = np.repeat(np.arange(4), sizes)
    chosen = select("prob_cover", {"embeddings": points}, 4, dimensions=None)
    assert group[chosen].tolist() == [0, 1, 2, 3]
    labelled = np.zeros(65, bool)
    labelled[[0, 64]] = True
    after = select("prob_cover", {"embeddings": points}, 2, 0, labelled, radius=1.0, dimensions=None)
    assert group[after].tolist() == [1, 2]


def test_the_radius_is_the_largest_pure_one() -> None:
    points = np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]], np.float32)
    radius = pure_radius(points, 2, 0, np.random.default_rng(0))
    assert 8 <= radius < 8.5


def test_typicality_uses_only_neighbours_of_the_same_cluster() -> None:
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


def test_stratified_shares_are_those_of_the_pool() -> None:
    source = np.repeat(["a", "b", "c"], [50, 30, 20])
    for seed in range(5):
        chosen = select("stratified", {"source": source}, 11, seed, by="source")
        result = {name: int((source[chosen] == name).sum()) for name in "abc"}
        assert result == {"a": 6, "b": 3, "c": 2}  # 5.5, 3.3 and 2.2: the greatest remainder goes up
    ranked = select("stratified", {"source": source, "entropy": np.arange(100.0)}, 10, by="source", within="entropy")
    assert sorted(ranked.tolist()) == [45, 46, 47, 48, 49, 77, 78, 79, 98, 99]


def test_cost_aware_buys_the_most_uncertainty_for_the_cost() -> None:
    scores = {"entropy": np.array([0.0, 1.0, 0.9, 0.5]), "cost": np.array([1.0, 10.0, 3.0, 1.0])}
    assert select("cost_aware", scores, 4).tolist() == [3, 2, 1, 0]
    assert select("cost_aware", scores, 4, budget=5).tolist() == [3, 2, 0]
    with pytest.raises(UserError, match="positive"):
        select("cost_aware", {**scores, "cost": np.array([1.0, 0.0, 1.0, 1.0])}, 2)
