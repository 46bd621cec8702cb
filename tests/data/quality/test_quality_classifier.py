"""The classifier of good and bad texts: its n-grams, its training, its calibration and its files."""

import json
import random
import re
import string
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from posttrain.data.quality.classifier import (
    SETTINGS,
    WEIGHTS,
    LinearClassifier,
    fit_platt,
    load_classifier,
    ngram_features,
    train_quality,
)
from posttrain.models.calibration import expected_calibration_error
from posttrain.store.errors import UserError

GOOD = [f"the {noun} was {word} and we thank you for it" for noun in ("meal", "room", "trip") for word in "abcdefgh"]
BAD = [f"click {word} now!!! free {noun}" for noun in ("prize", "money", "pills") for word in "abcdefgh"]


@pytest.fixture(scope="module")
def classifier() -> LinearClassifier:
    return train_quality(GOOD, BAD, {"source": "a test"})


@given(st.lists(st.text(alphabet="ab 中é", max_size=12), min_size=1, max_size=6))
def test_ngrams_match_a_plain_count(texts: list[str]) -> None:
    rows = ngram_features(texts).tocsr()
    for row, text in zip(rows, texts, strict=True):
        normal = " ".join(text.split())
        words = Counter([*normal.split(), *map(" ".join, pairwise(normal.split()))])
        spaced = re.sub(r"\s\s+", " ", text)
        runs = Counter(spaced[start : start + 4] for start in range(len(spaced) - 3))
        for counts, half in ((words, row.data[row.indices < 1 << 18]), (runs, row.data[row.indices >= 1 << 18])):
            length = np.sqrt(sum(count**2 for count in counts.values())) if counts else 1
            assert sorted(half) == pytest.approx(sorted(count / length for count in counts.values()))


def test_ngrams_depend_only_on_the_text() -> None:
    one, other = ngram_features(["A small text", "a  SMALL text"])
    assert (one != other).nnz == 0
    long = "x y " * 10_000
    first, second = ngram_features([long, long[:20_000]])
    assert (first != second).nnz == 0


def test_good_and_bad_texts_are_separated(classifier: LinearClassifier) -> None:
    result = classifier.probabilities(["the bus was late and we thank you", "click now!!! free pills", ""])
    assert result[0] > 0.8
    assert result[1] < 0.2
    assert classifier.report["auc"] > 0.99
    assert classifier.report["ece"] < 0.1
    assert (classifier.report["good"], classifier.report["bad"]) == (24, 24)


def test_logits_equal_the_sparse_dot_product(classifier: LinearClassifier) -> None:
    for text, logit in zip(GOOD, classifier.logits(GOOD), strict=True):
        row = ngram_features([text]).tocsr()
        expected = float(classifier.weights[row.indices].astype(np.float64) @ row.data) + classifier.intercept
        assert logit == pytest.approx(expected, rel=1e-12)


def test_the_report_is_of_texts_that_were_not_learned() -> None:
    """Texts without a difference: a classifier knows those that it learned, and no others."""
    generator = random.Random(0)
    texts = [" ".join(generator.choices(string.ascii_lowercase, k=30)) for _ in range(60)]
    report = train_quality(texts[:30], texts[30:]).report
    assert report["auc"] < 0.8
    assert report["ece"] < 0.2


def test_a_score_does_not_depend_on_the_batch(classifier: LinearClassifier) -> None:
    batch_scores = classifier.probabilities(GOOD + BAD)
    assert batch_scores.tolist() == [float(classifier.probabilities([text])[0]) for text in GOOD + BAD]
    assert classifier.probabilities([]).shape == (0,)


def test_the_same_texts_give_the_same_classifier(classifier: LinearClassifier) -> None:
    repeat = train_quality(iter(GOOD), iter(BAD), {"source": "a test"})
    np.testing.assert_array_equal(repeat.weights, classifier.weights)
    assert (repeat.slope, repeat.offset, repeat.report) == (classifier.slope, classifier.offset, classifier.report)


def test_save_and_load_round_trip(classifier: LinearClassifier, tmp_path: Path) -> None:
    classifier.save(tmp_path / "classifier")
    result = load_classifier(tmp_path / "classifier")
    assert result.probabilities(BAD).tolist() == classifier.probabilities(BAD).tolist()
    assert result.report == classifier.report
    assert sorted(file.name for file in (tmp_path / "classifier").iterdir()) == [SETTINGS, WEIGHTS]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (folder / WEIGHTS).write_bytes(b"\x80\x04broken"),
        lambda folder: save_file({"weights": np.zeros(3, np.float32)}, folder / WEIGHTS),
        lambda folder: (folder / SETTINGS).write_text("{"),
        lambda folder: (folder / SETTINGS).write_text("[]"),
        lambda folder: (folder / SETTINGS).write_text(json.dumps({"version": 99})),
        lambda folder: (folder / SETTINGS).unlink(),
    ],
)
def test_a_damaged_folder_raises_and_is_named(classifier: LinearClassifier, tmp_path: Path, damage: object) -> None:
    classifier.save(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=str(tmp_path)):
        load_classifier(tmp_path)


def test_a_classifier_of_another_version_is_refused(classifier: LinearClassifier, tmp_path: Path) -> None:
    classifier.save(tmp_path)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps({**settings, "version": 1}))
    with pytest.raises(UserError, match="a classifier of version 1 is not known here"):
        load_classifier(tmp_path)


def test_platt_scaling_matches_scikit_learn() -> None:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.linear_model import LogisticRegression

    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(400, 3))
    truths = inputs @ [1.0, -2.0, 0.5] + generator.normal(size=400) > 0.3
    model = LogisticRegression().fit(inputs, truths)
    logits = model.decision_function(inputs)
    slope, offset = fit_platt(logits, truths)
    from sklearn.frozen import FrozenEstimator

    reference = CalibratedClassifierCV(FrozenEstimator(model), method="sigmoid").fit(inputs, truths)
    np.testing.assert_allclose(
        1 / (1 + np.exp(-(slope * logits + offset))), reference.predict_proba(inputs)[:, 1], atol=1e-4
    )


def test_platt_scaling_is_finite_on_separable_scores() -> None:
    slope, offset = fit_platt(np.array([1e6, 2e6, -1e6, -3e6]), np.array([True, True, False, False]))
    assert np.isfinite([slope, offset]).all()
    assert slope > 0


def test_calibration_error_is_the_mean_distance() -> None:
    truths = np.array([True, True, False, False, True])
    assert expected_calibration_error(np.array([1.0, 1.0, 0.0, 0.0, 1.0]), truths) == 0
    # One bin of four at 0.7, half of them true, and one at 0.1 that is true: (4 * 0.2 + 0.9) / 5.
    result = expected_calibration_error(np.array([0.7, 0.7, 0.7, 0.7, 0.1]), truths)
    assert result == pytest.approx((4 * 0.2 + 0.9) / 5)


def test_too_few_examples_raise() -> None:
    with pytest.raises(UserError, match="2 bad examples are too few for 5 folds"):
        train_quality(GOOD, BAD[:2])
