import numpy as np

from posttrain.attribution import CentroidUtility, Values, group_utility, shapley, sum_by_group, tmc_shapley
from posttrain.attribution.utility import IncrementalUtility

SOURCES = np.array([2, 0, 1, 2, 2, 0, 1, 3, 3, 0, 1, 2])


def utility() -> CentroidUtility:
    generator = np.random.default_rng(0)
    labels, true = np.arange(12) % 2, np.arange(40) % 2
    return CentroidUtility(
        generator.normal(size=(12, 2)) + labels[:, None], labels, generator.normal(size=(40, 2)) + true[:, None], true
    )


def test_a_group_adds_all_its_rows() -> None:
    row_sets = []

    def additive(rows: np.ndarray) -> float:
        row_sets.append(rows.tolist())
        return float(2.0 ** rows.astype(float) @ np.ones(len(rows)))

    result = shapley(group_utility(additive, SOURCES))
    expected = [sum(2.0**row for row in np.flatnonzero(source == SOURCES)) for source in range(4)]
    np.testing.assert_allclose(result.values, expected, rtol=1e-12)
    assert [] in row_sets
    assert list(range(12)) in row_sets
    assert [0, 3, 4, 7, 8, 11] in row_sets
    assert result.evaluations == 16


def test_groups_of_an_incremental_utility_grow() -> None:
    whole = group_utility(utility(), SOURCES)
    plain = group_utility(lambda rows: utility()(rows), SOURCES)
    assert isinstance(whole, IncrementalUtility)
    assert not isinstance(plain, IncrementalUtility)
    by_growth = tmc_shapley(whole, permutations=15, tolerance=0)
    from_scratch = tmc_shapley(plain, permutations=15, tolerance=0)
    np.testing.assert_array_equal(by_growth.values, from_scratch.values)
    exact = shapley(whole)
    np.testing.assert_allclose(exact.values, shapley(plain).values)
    np.testing.assert_allclose(exact.values.sum(), utility()(np.arange(12)) - 0.5)
    sampled = tmc_shapley(whole, permutations=400, tolerance=0, seed=3)
    assert (np.abs(sampled.values - exact.values) < 4.5 * sampled.standard_errors).all()


def test_different_groups_have_different_keys() -> None:
    keys = {group_utility(utility(), groups).key for groups in (SOURCES, SOURCES[::-1], np.zeros(12, int))}  # type: ignore[attr-defined]
    assert len(keys) == 3
    assert group_utility(utility(), SOURCES).key in keys  # type: ignore[attr-defined]


def test_sources_sum_values_and_propagate_errors() -> None:
    values = Values(np.arange(12.0) - 4, np.arange(1, 13) / 10, 77)
    result = sum_by_group(values, SOURCES)
    np.testing.assert_allclose(result.values, [-3 + 1 + 5, -2 + 2 + 6, -4 - 1 + 0 + 7, 3 + 4])
    np.testing.assert_allclose(result.standard_errors[3], np.hypot(0.8, 0.9))
    np.testing.assert_allclose(result.standard_errors[0], np.sqrt(0.04 + 0.36 + 1.0))
    assert result.evaluations == 77


def test_an_unknown_error_of_a_record_makes_that_of_its_source_unknown() -> None:
    errors = np.where(np.arange(12) == 0, np.nan, 0.1)
    result = sum_by_group(Values(np.ones(12), errors, 1), SOURCES)
    assert np.isnan(result.standard_errors).tolist() == [False, False, True, False]
