"""Whether neighbours share labels, and what ``auto`` makes of it."""

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
def test_kappa_is_that_of_the_nearest_neighbours_labels(seed: int) -> None:
    points, labels = clusters(150, 7, 2.0, seed)
    pool, _ = clusters(400, 7, 2.0, seed)
    seen = whiten(np.concatenate([points, pool]))[:150]
    nearest = NearestNeighbors(n_neighbors=2).fit(seen).kneighbors(seen, return_distance=False)[:, 1]
    result = neighbour_agreement(points, labels, pool)
    assert result.kappa == pytest.approx(cohen_kappa_score(labels, labels[nearest]), abs=1e-12)
    agreed = int((labels == labels[nearest]).sum())
    chance = (agreed / 150 - result.kappa) / (1 - result.kappa)
    highest = binomtest(agreed, 150).proportion_ci(0.9, method="wilson").high
    assert result.highest == pytest.approx((highest - chance) / (1 - chance), abs=1e-3)
    assert result.records == 150


def test_labels_that_lie_together_are_shared_and_drawn_ones_are_not() -> None:
    points, labels = clusters(300, 5, 0.1, 0)
    together = neighbour_agreement(points, labels, points)
    assert together.kappa == 1
    assert together.shared
    shuffled = neighbour_agreement(points, np.random.default_rng(1).permutation(labels), points)
    assert abs(shuffled.kappa) < 0.15
    assert not shuffled.shared


@pytest.mark.parametrize("records", [4, 10, 30, 50, 100, 150, 200])
def test_labels_of_several_topics_are_shared_however_few_records_there_are(records: int) -> None:
    """Five labels of eight topics each, as intents in groups are: in a small sample the nearest is of another topic."""
    points, topics = clusters(2000, 40, 0.5, 3)
    for seed in range(10):
        rows = np.random.default_rng(seed).permutation(2000)[:records]
        assert neighbour_agreement(points[rows], topics[rows] % 5, points).shared


def test_few_records_have_the_benefit_of_the_doubt() -> None:
    assert NeighbourAgreement(-1.0, 0.1, 149).shared
    assert not NeighbourAgreement(0.1, 0.19, 150).shared
    assert NeighbourAgreement(0.1, 0.2, 500).shared


def test_labels_of_one_record_are_left_out() -> None:
    points, labels = clusters(60, 4, 0.1, 2)
    names = [f"class {label}" for label in labels]
    alone = neighbour_agreement(np.concatenate([points, points[:3] + 1e-3]), [*names, "a", "b", "c"], points)
    assert alone == neighbour_agreement(points, names, np.concatenate([points[:3] + 1e-3, points]))


@pytest.mark.parametrize("labels", [[], ["a"] * 5, ["a", "b", "c"], ["a", "a", "b"]])
def test_nothing_can_be_told_of_fewer_than_two_labels(labels: list[str]) -> None:
    result = neighbour_agreement(np.random.default_rng(0).normal(size=(len(labels), 4)), labels, np.eye(4))
    assert math.isnan(result.kappa)
    assert result.records == 0
    assert result.shared


def test_auto_covers_only_where_labels_are_shared() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    covering, alone = (config.of_round(1, shared=shared) for shared in (True, False))
    assert (covering.cold_start, covering.strategy) == ("facility_location", "facility_location")
    assert (alone.cold_start, alone.strategy, alone.options) == ("random", "margin", {})
    assert [config.embedded_in(1, cold, shared=False) for cold in (True, False)] == [30, 30]
    covering = SelectConfig(pool_sample=30, pool_embedded=500, cold_start="typiclust")
    assert [covering.embedded_in(1, cold, shared=False) for cold in (True, False)] == [500, 500]
    assert all(config.goes_by_neighbours(1, cold) for cold in (True, False))


def test_what_the_user_named_stays() -> None:
    named = SelectConfig(cold_start="typiclust").of_round(1, shared=False)
    assert (named.cold_start, named.strategy) == ("typiclust", "margin")
    ranked = SelectConfig(strategy="entropy")
    assert [ranked.goes_by_neighbours(1, cold) for cold in (True, False)] == [True, False]
    listed = SelectConfig(strategy=["k_center", "margin"])
    assert [listed.goes_by_neighbours(number, cold=True) for number in (1, 2)] == [False, True]
    options = {"facility_location": {"power": 2.0}, "margin": {}}
    assert SelectConfig(options=options).of_round(2).options == {"by": "least_confidence", "power": 2.0}
