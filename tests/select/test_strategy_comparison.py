"""Statistics of learning curves, computed by hand or by SciPy."""

import numpy as np
import pytest

from posttrain.select.strategy_comparison import (
    area_under_curve,
    labels_to_target,
    recommendation,
    sign_flip_test,
    summarise,
)


def test_area_is_the_mean_accuracy() -> None:
    counts = [10, 20, 40]
    assert area_under_curve(counts, np.array([[0.5, 0.5, 0.5]])).tolist() == [0.5]
    # 10 labels at a mean of 0.3, then 20 at a mean of 0.6.
    np.testing.assert_allclose(area_under_curve(counts, np.array([[0.2, 0.4, 0.8]])), [(10 * 0.3 + 20 * 0.6) / 30])
    assert area_under_curve([10], np.array([[0.7]])).tolist() == [0.7]


def test_labels_to_a_target() -> None:
    counts, curve = [10, 20, 40], np.array([0.2, 0.4, 0.8])
    assert labels_to_target(counts, curve, 0.6) == pytest.approx(30)
    assert labels_to_target(counts, curve, 0.4) == pytest.approx(20)
    assert labels_to_target(counts, curve, 0.1) == 10
    assert labels_to_target(counts, curve, 0.9) is None


@pytest.mark.parametrize("pairs", [3, 8, 40])
def test_the_p_value_equals_that_of_a_permutation_test(pairs: int) -> None:
    from scipy.stats import permutation_test

    differences = np.random.default_rng(pairs).normal(0.3, 1, pairs)
    exact = permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=2**pairs if pairs < 13 else 20_000, rng=0
    )
    assert sign_flip_test(differences) == pytest.approx(exact.pvalue, abs=1e-12 if pairs < 13 else 0.02)


def test_equal_curves_have_a_p_value_of_one() -> None:
    assert sign_flip_test(np.zeros(5)) == 1.0


def test_the_best_strategy_is_recommended_if_its_gain_is_significant() -> None:
    counts, targets = [10, 20], [0.5] * 6
    base = np.tile([0.2, 0.6], (6, 1))
    curves = {
        "random": base,
        "good": base + 0.1,
        "lucky": base + np.array([[0.3], [-0.1], [0.4], [-0.2], [0.3], [0.0]]),
    }
    summaries = summarise(counts, curves, targets, "random")
    assert [summary.strategy for summary in summaries] == ["lucky", "good", "random"]
    good = summaries[1]
    assert (good.gain, good.p_value) == (pytest.approx(0.1), pytest.approx(2 / 64))
    assert good.labels == pytest.approx(15)
    assert recommendation(summaries[1:], "random") == (
        "use good: +0.100 of area over random (p = 0.031), and 86% of its labels to the target"
    )
    assert "may be chance" in recommendation(summaries, "random")
    assert "no strategy beats random" in recommendation(summaries[2:], "random")


def test_a_target_that_a_seed_misses_has_no_label_count() -> None:
    curves = {"random": np.array([[0.2, 0.6], [0.2, 0.4]])}
    assert summarise([10, 20], curves, [0.5, 0.5], "random")[0].labels is None
