"""The area under the ROC curve, its standard error, and whether a champion's confidence predicts its errors."""

import itertools

import numpy as np
import pytest

from posttrain.select.strategy import confidence_above_chance, roc_auc


@pytest.mark.parametrize("seed", range(5))
def test_area_equals_that_of_scikit_learn(seed: int) -> None:
    from sklearn.metrics import roc_auc_score

    generator = np.random.default_rng(seed)
    right = generator.random(200) < 0.6
    confidence = np.round(generator.random(200) + 0.3 * right, 2)  # with ties
    area, _ = roc_auc(confidence, right)
    assert area == pytest.approx(roc_auc_score(right, confidence), abs=1e-12)


def test_standard_error_equals_that_of_the_paper() -> None:
    """Hanley and McNeil's table II: area 0.893, 58 normal and 51 abnormal images, standard error 0.032."""
    confidence = np.repeat([1.0, 2, 3, 4, 5, 1, 2, 3, 4, 5], [33, 6, 6, 11, 2, 3, 2, 2, 11, 33])
    area, error = roc_auc(confidence, np.arange(109) >= 58)
    assert area == pytest.approx(0.893, abs=5e-4)
    assert error == pytest.approx(0.032, abs=5e-4)


def test_random_confidence_does_not_predict_errors() -> None:
    results = [
        confidence_above_chance(generator.random(300), generator.random(300) < 0.5)
        for generator in (np.random.default_rng(seed) for seed in range(200))
    ]
    assert 0.9 < results.count(False) / len(results) < 0.99  # 5% by chance


def test_confidence_with_noise_predicts_errors() -> None:
    right = np.arange(60) % 2 == 0
    assert confidence_above_chance(right + np.random.default_rng(0).normal(0, 0.5, 60), right) is True
    assert confidence_above_chance(-1.0 * right, right) is False


@pytest.mark.parametrize("right", [[True] * 5, [True, False, True, True], []])
def test_too_few_answers_give_no_result(right: list[bool]) -> None:
    assert confidence_above_chance(np.linspace(0, 1, len(right)), np.array(right, bool)) is None


def test_unknown_confidence_is_ignored() -> None:
    right = np.array(list(itertools.chain([True] * 5, [False] * 5)))
    assert confidence_above_chance(np.full(10, np.nan), right) is None
    confidence = np.concatenate([np.linspace(0.9, 1, 5), np.linspace(0, 0.1, 5)])
    assert roc_auc(np.append(confidence, np.nan), np.append(right, False))[0] == 1.0
