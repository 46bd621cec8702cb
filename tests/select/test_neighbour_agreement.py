"""Label agreement of nearest neighbours, and the strategy that ``auto`` chooses by it."""

import math
from typing import Any

import numpy as np
import pytest

from posttrain.select.config import SelectConfig
from posttrain.select.selectors.similarity import whiten
from posttrain.select.strategy import NeighbourAgreement, depends_on_neighbours, neighbour_agreement


def clusters(records: int, classes: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=records)
    centres = generator.normal(size=(classes, 16))
    return centres[labels] + spread * generator.normal(size=(records, 16)), labels


@pytest.mark.parametrize("seed", range(4))
def test_kappa_equals_that_of_the_nearest_neighbours_labels(seed: int) -> None:
    from scipy.stats import binomtest
    from sklearn.metrics import cohen_kappa_score
    from sklearn.neighbors import NearestNeighbors

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


def chosen(config: SelectConfig, **conditions: bool) -> tuple[str, dict[str, Any], bool]:
    strategy = config.batch_strategy(**conditions)
    return strategy.name, dict(strategy.options), strategy.cold


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"cold": True}, ("facility_location", {}, True)),
        ({"cold": False}, ("facility_location", {"by": "least_confidence"}, False)),
        ({"cold": False, "has_labels": False}, ("facility_location", {"by": "entropy"}, False)),
        ({"cold": False, "predicts_errors": False}, ("facility_location", {}, True)),
        ({"cold": True, "neighbours_share_labels": False}, ("random", {}, True)),
        ({"cold": False, "neighbours_share_labels": False}, ("margin", {}, False)),
        ({"cold": False, "neighbours_share_labels": False, "predicts_errors": False}, ("random", {}, True)),
    ],
)
def test_what_auto_stands_for(conditions: dict[str, bool], expected: tuple[str, dict[str, Any], bool]) -> None:
    assert chosen(SelectConfig(), **conditions) == expected


def test_options_of_auto_are_those_of_coverage() -> None:
    config = SelectConfig(options={"by": "margin", "dimensions": 64})
    assert chosen(config, cold=False) == ("facility_location", {"by": "margin", "dimensions": 64}, False)
    assert chosen(config, cold=True) == ("facility_location", {"dimensions": 64}, True)
    assert chosen(config, cold=False, neighbours_share_labels=False) == ("margin", {}, False)


def test_auto_embeds_more_only_where_labels_are_shared() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    assert [config.embedding_limit(cold, neighbours_share_labels=False) for cold in (True, False)] == [30, 30]
    assert all(depends_on_neighbours(config.strategy, cold) for cold in (True, False))


def test_a_strategy_that_the_user_names_stays_once_it_can_work() -> None:
    conditions = {"predicts_errors": False, "neighbours_share_labels": False}
    assert chosen(SelectConfig(strategy="typiclust"), cold=True, **conditions) == ("typiclust", {}, True)
    by_margin = SelectConfig(strategy="facility_location", options={"by": "margin"})
    assert chosen(by_margin, cold=True, **conditions) == ("facility_location", {}, True)
    assert chosen(by_margin, cold=False, **conditions) == ("facility_location", {"by": "margin"}, False)
    ranking = SelectConfig(strategy="mmr", options={"relevance": 0.7})
    assert chosen(ranking, cold=False, **conditions) == ("mmr", {"relevance": 0.7}, False)
    assert chosen(ranking, cold=True) == ("facility_location", {}, True)
    assert chosen(ranking, cold=True, **conditions) == ("random", {}, True)
    assert [depends_on_neighbours("mmr", cold) for cold in (True, False)] == [True, False]
    assert not depends_on_neighbours("typiclust", cold=True)
