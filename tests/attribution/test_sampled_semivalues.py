import numpy as np
import pytest

from posttrain.attribution import banzhaf, beta_shapley, tmc_shapley


class CappedSum:
    """A capped sum of fixed numbers that counts its calls."""

    def __init__(self, cap: float = np.inf) -> None:
        self.worth = np.random.default_rng(0).uniform(0.5, 1.5, 30)
        self.cap, self.calls = cap, 0

    def __call__(self, rows: np.ndarray) -> float:
        self.calls += 1
        return float(min(self.worth[rows].sum(), self.cap)) - 3


def test_values_sum_to_the_score_of_all_less_that_of_none() -> None:
    utility = CappedSum(cap=11.0)
    for permutations in (1, 7, 23):
        result = tmc_shapley(utility, 30, permutations=permutations, tolerance=0, seed=permutations)
        np.testing.assert_allclose(result.values.sum(), 11.0, rtol=1e-13)


def test_evaluations_are_counted() -> None:
    utility = CappedSum()
    assert tmc_shapley(utility, 30, permutations=5, tolerance=0).evaluations == utility.calls == 5 * 30 + 2
    utility = CappedSum()
    assert beta_shapley(utility, 30, permutations=5).evaluations == utility.calls == 5 * 30 + 2
    utility = CappedSum()
    assert banzhaf(utility, 30, samples=64).evaluations == utility.calls == 64
    utility = CappedSum(cap=11.0)
    result = tmc_shapley(utility, 30, permutations=5)
    assert result.evaluations == utility.calls < 5 * 20


def test_truncation_skips_the_rest_within_the_tolerance_of_the_full_score() -> None:
    utility, tolerance = CappedSum(), 4.0
    result = tmc_shapley(utility, 30, permutations=1, tolerance=tolerance, seed=3)
    order = np.random.default_rng([3, 0]).permutation(30)
    missing = utility.worth.sum() - utility.worth[order].cumsum()
    evaluated = int((missing >= tolerance).sum()) + 1
    expected = np.zeros(30)
    expected[order[:evaluated]] = utility.worth[order[:evaluated]]
    np.testing.assert_allclose(result.values, expected, atol=1e-12)
    assert result.evaluations == evaluated + 2
    assert 0 < utility.worth.sum() - result.values.sum() < tolerance


def test_patience_ignores_a_single_score_within_the_tolerance() -> None:
    def rising_and_falling(rows: np.ndarray) -> float:
        return float(min(len(rows), 10 - len(rows)))  # all are worth as much as none

    impatient = tmc_shapley(rising_and_falling, 10, permutations=3, tolerance=0.5)
    assert not impatient.values.any()
    assert impatient.evaluations == 2
    patient = tmc_shapley(rising_and_falling, 10, permutations=3, tolerance=0.5, patience=2)
    assert patient.evaluations == 32
    np.testing.assert_allclose(patient.values.sum(), 0, atol=1e-12)
    assert patient.values.any()


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_it_stops_at_the_bound_and_not_before(reduction: str) -> None:
    def size(errors: np.ndarray) -> float:
        return float(errors.max() if reduction == "max" else errors.mean())

    settings = {"tolerance": 0.0, "seed": 5, "block_size": 4}
    bound = 0.12
    result = tmc_shapley(CappedSum(11), 30, permutations=400, standard_error=bound, reduction=reduction, **settings)  # type: ignore[arg-type]
    permutations = (result.evaluations - 2) // 30
    assert 8 <= permutations < 400
    assert permutations % 4 == 0
    assert size(result.standard_errors) <= bound
    shorter = tmc_shapley(CappedSum(11), 30, permutations=permutations - 4, **settings)  # type: ignore[arg-type]
    assert size(shorter.standard_errors) > bound


def test_banzhaf_stops_at_the_bound_and_one_sample_gives_no_values() -> None:
    utility = CappedSum(11)
    result = banzhaf(utility, 30, samples=5000, standard_error=0.2, block_size=10)
    assert result.evaluations < 5000
    assert result.standard_errors.max() <= 0.2
    single = banzhaf(utility, 30, samples=1)
    assert np.isnan(single.values).all()
    assert np.isnan(single.standard_errors).all()


def test_the_seed_determines_the_values() -> None:
    first, again, other = (tmc_shapley(CappedSum(11), 30, permutations=6, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.values, again.values)
    assert (first.values != other.values).any()


def test_the_number_of_permutations_per_block_does_not_matter() -> None:
    small, large = (tmc_shapley(CappedSum(11), 30, permutations=13, block_size=block_size) for block_size in (1, 5))
    np.testing.assert_allclose(small.values, large.values, rtol=1e-12)
    np.testing.assert_allclose(small.standard_errors, large.standard_errors, rtol=1e-12)
    assert small.evaluations == large.evaluations
