"""Drift between two versions: each formula against a second computation, and properties for all input."""

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.report.distribution import Distribution, DistributionBuilder
from posttrain.data.report.drift import measure_drift
from posttrain.data.report.drift_measures import (
    LEAST_SHARE,
    category_stability,
    divergence,
    divergence_by_chance,
    jensen_shannon,
    mean_discrepancy,
    population_stability,
)
from posttrain.data.report.ngrams import log_odds, ngram_changes, ngram_counts
from posttrain.data.report.profile import Profile, build_profile
from posttrain.store.hashing import canonical_json
from posttrain.testing.steps import table_of

COUNTS = st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any)


def distribution(values: Any) -> Distribution:
    collector = DistributionBuilder()
    collector.add(np.asarray(values, dtype=np.float64))
    return collector.distribution()


# Population stability index


def test_the_index_sums_over_the_deciles_of_the_older_version() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 1000, 5000), rng.integers(200, 1100, 3000)
    edges = np.quantile(old, np.arange(1, 10) / 10, method="inverted_cdf")
    bins = [np.bincount(np.digitize(item, edges, right=True), minlength=10) / len(item) for item in (old, new)]
    a, b = (np.maximum(item, LEAST_SHARE) for item in bins)
    measure = population_stability("x", distribution(old), distribution(new))
    assert measure.index == pytest.approx(float(((b - a) * np.log(b / a)).sum()), rel=1e-12)
    assert measure.edges == tuple(edges.astype(float))
    assert measure.old == pytest.approx(tuple(bins[0]))
    assert measure.level == "shifted"


def test_the_index_of_two_values_has_a_closed_form() -> None:
    old, new = distribution([0.0] * 80 + [1.0] * 20), distribution([0.0] * 40 + [1.0] * 60)
    measure = population_stability("x", old, new)
    assert measure.index == pytest.approx((0.4 - 0.8) * math.log(0.4 / 0.8) + (0.6 - 0.2) * math.log(0.6 / 0.2))


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0, 1.0], list(range(100))])
def test_the_index_of_equal_distributions_is_0(values: list[float]) -> None:
    measure = population_stability("x", distribution(values * 20), distribution(values * 50))
    assert measure.index == pytest.approx(0, abs=1e-12)
    assert measure.level == "stable"
    assert measure.p_value == pytest.approx(1)


@pytest.mark.parametrize("value", [2.0, 4.0])
def test_the_index_detects_another_constant(value: float) -> None:
    measure = population_stability("x", distribution([3.0] * 500), distribution([value] * 500))
    assert measure.level == "shifted"
    assert sum(measure.old) == pytest.approx(1)
    assert sum(measure.new) == pytest.approx(1)


def test_the_index_without_drift_is_that_of_chance() -> None:
    from scipy.stats import kstest

    rng = np.random.default_rng(1)
    measures = [
        population_stability("x", distribution(rng.integers(0, 2000, 1000)), distribution(rng.integers(0, 2000, 1500)))
        for _ in range(200)
    ]
    assert np.mean([item.index for item in measures]) == pytest.approx(measures[0].by_chance, rel=0.15)
    assert kstest([item.p_value for item in measures], "uniform").pvalue > 1e-3
    small_sample = population_stability("x", distribution(rng.normal(size=15)), distribution(rng.normal(size=15)))
    assert small_sample.index > 0.25, "by chance"
    assert small_sample.level == "stable"


# Jensen–Shannon divergence


@given(COUNTS, COUNTS)
@settings(max_examples=40, deadline=None)
def test_the_divergence_equals_that_of_scipy_and_is_symmetric(old: list[int], new: list[int]) -> None:
    from scipy.spatial.distance import jensenshannon

    size = max(len(old), len(new))
    old, new = old + [0] * (size - len(old)), new + [0] * (size - len(new))
    value = jensen_shannon(old, new)
    assert value == pytest.approx(float(jensenshannon(old, new, base=2)) ** 2, abs=1e-9)
    assert value == pytest.approx(jensen_shannon(new, old), abs=1e-12)
    assert 0 <= value <= 1
    assert jensen_shannon(old, [3 * count for count in old]) == pytest.approx(0, abs=1e-12)


def test_the_divergence_of_categories() -> None:
    disjoint = divergence("x", {"a": 5}, {"b": 9})
    assert (disjoint.divergence, disjoint.distance) == (1.0, 1.0)
    overlapping = divergence("x", {"a": 100}, {"a": 50, "b": 50})
    assert overlapping.divergence == pytest.approx(1 - 0.75 * math.log2(3) + 0.5)
    assert overlapping.shifted
    assert list(overlapping.old.items()) == [("a", 100), ("b", 0)]
    assert not divergence("x", {"a": 3, "b": 1}, {"a": 2, "b": 2}).shifted, "too few to say"
    assert divergence("x", {"a": 4}, {"a": 5}).p_value == 1.0


def test_the_p_value_is_that_of_the_chi_squared_statistic() -> None:
    """Of a table of two by two its closed form, without a correction for continuity."""
    (a, b), (c, d) = old, new = (8, 2), (3, 7)
    statistic = 20 * (a * d - b * c) ** 2 / (10 * 10 * 11 * 9)
    p_value = math.erfc(math.sqrt(statistic / 2))
    assert divergence("x", {"a": a, "b": b}, {"a": c, "b": d}).p_value == pytest.approx(p_value)
    assert category_stability("x", np.array(old), np.array(new)).p_value == pytest.approx(p_value)


def test_the_divergence_by_chance() -> None:
    rng = np.random.default_rng(2)
    shares = rng.dirichlet(np.full(20, 5.0))
    draws = [np.array([rng.multinomial(size, shares) for size in (2000, 3000)]) for _ in range(200)]
    assert np.mean([jensen_shannon(*item) for item in draws]) == pytest.approx(divergence_by_chance(draws[0]), rel=0.1)


# Words


def test_log_odds_follow_the_paper() -> None:
    old, new, prior = np.array([10, 0, 5]), np.array([3, 7, 5]), np.array([1.0, 0.5, 2.0])
    delta, z = log_odds(old, new, prior)
    n, m, a = old.sum(), new.sum(), prior.sum()
    for index in range(3):
        new_odds = (new[index] + prior[index]) / (m + a - new[index] - prior[index])
        old_odds = (old[index] + prior[index]) / (n + a - old[index] - prior[index])
        assert delta[index] == pytest.approx(math.log(new_odds) - math.log(old_odds))
        spread = math.sqrt(1 / (new[index] + prior[index]) + 1 / (old[index] + prior[index]))
        assert z[index] == pytest.approx(delta[index] / spread)
    assert np.allclose(log_odds(new, old, prior)[1], -z)


def test_new_and_vanished_words_are_reported_and_chance_is_not() -> None:
    rng = random.Random(4)
    words = [f"w{number}" for number in range(40)]
    old, new = ([" ".join(rng.choices(words, k=10)) for _ in range(300)] for _ in range(2))
    chance = ngram_changes(ngram_counts([old, new], 3))
    assert sum(map(len, (chance.appeared, chance.vanished, chance.more, chance.less))) <= 2
    measure = ngram_changes(
        ngram_counts([[*old, *["fax machine broken"] * 30], [*new, *["crypto wallet locked"] * 30]], 3)
    )
    assert {item.ngram for item in measure.appeared} >= {"crypto", "crypto wallet", "crypto wallet locked"}
    assert {item.ngram for item in measure.vanished} >= {"fax", "fax machine", "fax machine broken"}
    assert all(item.ratio is None and item.z > 3 for item in measure.appeared)
    assert all(item.ratio == 0 and item.z < -3 for item in measure.vanished)
    assert canonical_json(measure.to_json())
    equal = ngram_changes(ngram_counts([old, old], 2))
    assert not any((equal.appeared, equal.vanished, equal.more, equal.less))


# Maximum mean discrepancy


def brute_force(x: np.ndarray, y: np.ndarray) -> float:
    from scipy.spatial.distance import cdist

    all_rows = np.concatenate([x, y])
    width = float(np.median(cdist(all_rows, all_rows)[np.triu_indices(len(all_rows), 1)]))

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return math.exp(-float(((a - b) ** 2).sum()) / (2 * width**2))

    n, m = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_y = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (n * m)


def test_mmd_equals_its_definition_and_is_symmetric() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(9, 3)), rng.normal(0.5, 1.2, size=(12, 3))
    measure = mean_discrepancy(x, y, permutations=20)
    assert measure.squared == pytest.approx(brute_force(x, y), rel=1e-10)
    assert mean_discrepancy(y, x, permutations=20).squared == pytest.approx(measure.squared, rel=1e-10)
    far = mean_discrepancy((x + 1e4).astype(np.float64), (y + 1e4).astype(np.float64), permutations=1)
    assert far.squared == pytest.approx(measure.squared, rel=1e-6)


def test_the_p_value_is_the_share_of_permutations() -> None:
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), rng.normal(size=(40, 4)).astype(np.float32)
    measure = mean_discrepancy(x, y, permutations=300, seed=3)
    assert mean_discrepancy(x, y, permutations=300, seed=3) == measure
    assert measure.p_value == pytest.approx(mean_discrepancy(x, y, permutations=2000).p_value, abs=0.1)
    shifted = mean_discrepancy(x, y + 2, permutations=300)
    assert shifted.p_value == 1 / 301
    assert shifted.shifted


def test_the_p_value_without_drift_is_uniform() -> None:
    from scipy.stats import kstest

    rng = np.random.default_rng(7)
    result = [
        mean_discrepancy(rng.normal(size=(25, 3)), rng.normal(size=(20, 3)), permutations=99).p_value
        for _ in range(200)
    ]
    assert kstest(np.array(result) - rng.uniform(0, 0.01, 200), "uniform").pvalue > 1e-3


def test_equal_embeddings_have_no_discrepancy() -> None:
    measure = mean_discrepancy(np.ones((5, 2), np.float32), np.ones((6, 2), np.float32), permutations=50)
    assert measure.squared == pytest.approx(0)
    assert measure.p_value == 1.0


@pytest.mark.parametrize("shapes", [((1, 3), (5, 3)), ((5, 3), (5, 2))])
def test_incomparable_embeddings_raise(shapes: Any) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        mean_discrepancy(*(np.zeros(shape, np.float32) for shape in shapes))


# The whole measure


def records_of(seed: int, weights: list[int], extra: str = "", count: int = 400) -> pa.Table:
    rng = random.Random(seed)
    words = ["card", "lost", "bank", "transfer", "cash", "my", "is", "the", "where", "refund", "how", "account"]
    return table_of(
        *(
            {
                "prompt": " ".join(rng.choices(words, k=rng.randint(5, 15))) + f" {number}" + extra,
                "completion": rng.choices("abcd", weights)[0],
            }
            for number in range(count)
        )
    )


@pytest.fixture(scope="module")
def old() -> Profile:
    return build_profile([records_of(1, [1, 1, 1, 1])])


def test_labels_shift_where_inputs_do_not(old: Profile) -> None:
    measure = measure_drift(old, build_profile([records_of(2, [8, 1, 1, 1])]))
    assert measure.verdict.startswith("labels shifted (JS 0.")
    assert "inputs did not (MMD p = 0." in measure.verdict
    assert "sources did not (JS 0)" in measure.verdict
    assert canonical_json(measure.to_json())
    assert measure.to_json()["verdict"] == measure.verdict


def test_inputs_shift_where_labels_do_not(old: Profile) -> None:
    measure = measure_drift(old, build_profile([records_of(3, [1, 1, 1, 1], " please call me on my mobile")]))
    assert measure.verdict.startswith("inputs shifted (MMD p = 0.001), numbers shifted (greatest PSI")
    assert "labels did not" in measure.verdict
    assert "please call me" in {item.ngram for item in measure.ngrams["input"].appeared}


def test_equal_profiles_show_no_drift(old: Profile) -> None:
    measure = measure_drift(old, old)
    assert measure.verdict.startswith("labels did not shift (JS 0)")
    assert {item.index for item in measure.numbers} == {0}
    assert {item.divergence for item in measure.shares} == {0}


def test_the_two_samples_share_no_record(old: Profile) -> None:
    samples: list[list[str]] = []

    def embed(texts: list[str]) -> Any:
        samples.append(texts)
        return np.random.default_rng(len(samples)).normal(size=(len(texts), 4)).astype(np.float32)

    measure = measure_drift(old, old, embed, embedder="noise")
    assert measure.inputs is not None
    assert (sum(measure.inputs.rows), measure.inputs.embedder) == (old.records, "noise")
    assert not set(samples[0]) & set(samples[1])


def test_fields_of_only_one_version_are_reported(old: Profile) -> None:
    bare = dataclasses.replace(old, balances={}, sample=old.sample[:1])
    measure = measure_drift(old, bare)
    assert measure.incomparable == ("labels: only the older version has them",)
    assert measure.inputs is None
    empty = measure_drift(build_profile([]), build_profile([]))
    assert empty.verdict == "nothing to compare"
    assert canonical_json(empty.to_json())
