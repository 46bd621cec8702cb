"""Label agreement of nearest neighbours, and the strategy that ``auto`` chooses by it."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score
from sklearn.neighbors import NearestNeighbors

from posttrain.select.config import SelectConfig
from posttrain.select.selectors.similarity import whiten
from posttrain.select.strategy import NeighbourAgreement, neighbour_agreement


def clusters(records: int, classes: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=records)
    centres = generator.normal(size=(classes, 16))
    return centres[labels] + spread * generator.normal(size=(records, 16)), labels


@pytest.mark.parametrize("seed", range(4))
def test_kappa_equals_that_of_the_nearest_neighbours_labels(seed: int) -> None:
    points, labels = clusters(150, 7, 2.0, seed)
    pool, _ = clusters(400, 7, 2.0, seed)
    whitened = whiten(np.concatenate([points, pool]))[:150]
    nearest = NearestNeighbors(n_neighbors=2).fit(whitened).kneighbors(whitened, return_distance=False)[:, 1]
    result = neighbour_agreement(points, labels, pool)
    assert result.kappa == pytest.approx(cohen_kappa_score(labels, labels[nearest]), abs=1e-12)
    agreements = int((labels == labels[nearest]).sum())
    chance = (agreements / 150 - result.kappa) / (1 - result.kappa)
    highest = binomtest(agreements, 150).proportion_ci(0.9, method="wilson").high
    assert result.highest == pytest.approx((highest - chance) / (1 - chance), abs=1e-3)
    assert result.records == 150


def test_clustered_labels_are_shared_and_shuffled_ones_are_not() -> None:
    points, labels = clusters(300, 5, 0.1, 0)
    clustered = neighbour_agreement(points, labels, points)
    assert clustered.kappa == 1
    assert clustered.neighbours_share_labels
    shuffled = neighbour_agreement(points, np.random.default_rng(1).permutation(labels), points)
    assert abs(shuffled.kappa) < 0.15
    assert not shuffled.neighbours_share_labels


@pytest.mark.parametrize("records", [4, 10, 30, 50, 100, 150, 200])
def test_labels_of_several_topics_are_shared_however_few_records_there_are(records: int) -> None:
    """Five labels of eight topics each, as intents in groups are: in a small sample the nearest is of another topic."""
    points, topics = clusters(2000, 40, 0.5, 3)
    for seed in range(10):
        rows = np.random.default_rng(seed).permutation(2000)[:records]
        assert neighbour_agreement(points[rows], topics[rows] % 5, points).neighbours_share_labels


def test_labels_of_few_records_count_as_shared() -> None:
    assert NeighbourAgreement(-1.0, 0.1, 149).neighbours_share_labels
    assert not NeighbourAgreement(0.1, 0.19, 150).neighbours_share_labels
    assert NeighbourAgreement(0.1, 0.2, 500).neighbours_share_labels


def test_labels_of_one_record_are_ignored() -> None:
    points, labels = clusters(60, 4, 0.1, 2)
    names = [f"class {label}" for label in labels]
    agreement = neighbour_agreement(np.concatenate([points, points[:3] + 1e-3]), [*names, "a", "b", "c"], points)
    assert agreement == neighbour_agreement(points, names, np.concatenate([points[:3] + 1e-3, points]))


@pytest.mark.parametrize("labels", [[], ["a"] * 5, ["a", "b", "c"], ["a", "a", "b"]])
def test_fewer_than_two_repeated_labels_give_no_kappa(labels: list[str]) -> None:
    result = neighbour_agreement(np.random.default_rng(0).normal(size=(len(labels), 4)), labels, np.eye(4))
    assert math.isnan(result.kappa)
    assert result.records == 0
    assert result.neighbours_share_labels


def test_auto_covers_only_where_labels_are_shared() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    covering, ranking = (config.for_round(1, neighbours_share_labels=share) for share in (True, False))
    assert (covering.cold_start, covering.strategy) == ("facility_location", "facility_location")
    assert (ranking.cold_start, ranking.strategy, ranking.options) == ("random", "margin", {})
    assert [config.embedding_limit(1, cold, neighbours_share_labels=False) for cold in (True, False)] == [30, 30]
    covering = SelectConfig(pool_sample=30, pool_embedded=500, cold_start="typiclust")
    assert [covering.embedding_limit(1, cold, neighbours_share_labels=False) for cold in (True, False)] == [500, 500]
    assert all(config.depends_on_neighbours(1, cold) for cold in (True, False))


def test_a_strategy_that_the_user_names_stays() -> None:
    cold_start = SelectConfig(cold_start="typiclust").for_round(1, neighbours_share_labels=False)
    assert (cold_start.cold_start, cold_start.strategy) == ("typiclust", "margin")
    ranking = SelectConfig(strategy="entropy")
    assert [ranking.depends_on_neighbours(1, cold) for cold in (True, False)] == [True, False]
    by_round = SelectConfig(strategy=["k_center", "margin"])
    assert [by_round.depends_on_neighbours(number, cold=True) for number in (1, 2)] == [False, True]
    options = {"facility_location": {"power": 2.0}, "margin": {}}
    assert SelectConfig(options=options).for_round(2).options == {"by": "least_confidence", "power": 2.0}
