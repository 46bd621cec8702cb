"""Whether neighbours share labels, and what ``auto`` makes of it."""

import math

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score
from sklearn.neighbors import NearestNeighbors

from posttrain.select.config import SelectConfig
from posttrain.select.neighbours import Agreement, neighbour_agreement
from posttrain.select.selectors.whitening import whiten


def clusters(records: int, classes: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=records)
    centres = generator.normal(size=(classes, 16))
    return centres[labels] + spread * generator.normal(size=(records, 16)), labels


@pytest.mark.parametrize("seed", range(4))
def test_kappa_is_that_of_the_nearest_neighbours_labels(seed: int) -> None:
    points, labels = clusters(150, 7, 2.0, seed)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    for dimensions, seen in ((None, unit), (8, whiten(points.astype(np.float32), 8))):
        nearest = NearestNeighbors(n_neighbors=2).fit(seen).kneighbors(seen, return_distance=False)[:, 1]
        found = neighbour_agreement(points, labels, dimensions)
        assert found.kappa == pytest.approx(cohen_kappa_score(labels, labels[nearest]), abs=1e-12)
        assert found.records == 150


def test_labels_that_lie_together_are_shared_and_drawn_ones_are_not() -> None:
    points, labels = clusters(300, 5, 0.1, 0)
    together = neighbour_agreement(points, labels)
    assert together.kappa == 1
    assert together.error == 0
    assert together.shared
    shuffled = neighbour_agreement(points, np.random.default_rng(1).permutation(labels))
    assert abs(shuffled.kappa) < 4 * shuffled.error
    assert not shuffled.shared


def test_few_records_leave_the_benefit_of_the_doubt() -> None:
    assert Agreement(0.0, 0.13, 20).shared
    assert not Agreement(0.0, 0.12, 25).shared
    assert Agreement(0.21, 0.0, 500).shared


def test_labels_of_one_record_are_left_out() -> None:
    points, labels = clusters(60, 4, 0.1, 2)
    names = [f"class {label}" for label in labels]
    alone = neighbour_agreement(np.concatenate([points, points[:3] + 1e-3]), [*names, "a", "b", "c"])
    assert alone == neighbour_agreement(points, names)


@pytest.mark.parametrize("labels", [[], ["a"] * 5, ["a", "b", "c"], ["a", "a", "b"]])
def test_nothing_can_be_told_of_fewer_than_two_labels(labels: list[str]) -> None:
    found = neighbour_agreement(np.random.default_rng(0).normal(size=(len(labels), 4)), labels)
    assert math.isnan(found.kappa)
    assert found.records == 0
    assert found.shared


def test_auto_covers_only_where_labels_are_shared() -> None:
    config = SelectConfig(pool_sample=30, pool_embedded=500)
    covering, alone = (config.of_round(1, shared=shared) for shared in (True, False))
    assert (covering.cold_start, covering.strategy) == ("facility_location", "facility_location")
    assert (alone.cold_start, alone.strategy, alone.options) == ("random", "margin", {})
    assert [config.embedded_in(1, cold, shared=False) for cold in (True, False)] == [30, 30]
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
