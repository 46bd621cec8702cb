"""Label errors: the confident joint by hand and against a reference, and the recovery of a noise channel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.labels import label_noise
from posttrain.data.labels.label_noise import audit_labels, confident_joint
from posttrain.models.linear_head import assign_folds, predict_out_of_fold

# Three classes; record 2 looks like class 1, record 5 like class 0, and record 6 like none.
LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 2])
PROBABILITIES = np.array(
    [
        [0.90, 0.05, 0.05],
        [0.80, 0.10, 0.10],
        [0.10, 0.85, 0.05],
        [0.15, 0.80, 0.05],
        [0.10, 0.80, 0.10],
        [0.70, 0.20, 0.10],
        [0.30, 0.40, 0.30],
        [0.10, 0.20, 0.70],
    ]
)


def test_a_case_by_hand() -> None:
    # The thresholds are 0.6, 0.55 and 0.7.
    assert confident_joint(LABELS, PROBABILITIES).tolist() == [[2, 1, 0], [1, 2, 0], [0, 0, 1]]


def test_classes_without_labels_or_without_records() -> None:
    labels = np.array([0, 0, 1])
    probabilities = np.array([[0.9, 0.1, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0], [0.91, 0.09, 0.0, 0.0]])
    expected = np.zeros((4, 4), np.int64)
    expected[0, 0], expected[1, 0] = 2, 1
    assert (confident_joint(labels, probabilities) == expected).all()
    empty = np.zeros(0, np.int64), np.zeros((0, 3))
    assert confident_joint(*empty).sum() == 0
    assert label_noise.fit_noise_channel(*empty).correct.tolist() == []


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40), classes=st.integers(2, 5))
def test_the_algorithm_of_the_paper(seed: int, count: int, classes: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    probabilities = generator.dirichlet(np.full(classes, 0.5), count)
    per_class = [[p[s] for p, s in zip(probabilities, labels, strict=True) if s == k] for k in range(classes)]
    limits = [np.mean(values) if values else np.inf for values in per_class]
    counts = np.zeros((classes, classes))
    for p, s in zip(probabilities, labels, strict=True):
        confident_classes = [k for k in range(classes) if p[k] >= limits[k]]
        if confident_classes:
            counts[s, max(confident_classes, key=lambda k: p[k])] += 1
    assert confident_joint(labels, probabilities).tolist() == counts.tolist()


def test_a_noise_channel_is_recovered() -> None:
    generator = np.random.default_rng(0)
    count, classes = 20_000, 3
    true_channel = np.array([[0.85, 0.10, 0.05], [0.02, 0.95, 0.03], [0.0, 0.2, 0.8]])
    clean = generator.dirichlet(np.full(classes, 0.15), count)
    truth = (clean.cumsum(axis=1) > generator.random((count, 1))).argmax(axis=1)
    labels = (true_channel[truth].cumsum(axis=1) > generator.random((count, 1))).argmax(axis=1)
    flat = clean**0.5 / (clean**0.5).sum(axis=1, keepdims=True)  # an underconfident model
    result = label_noise.fit_noise_channel(labels, flat)
    assert result.temperature == pytest.approx(0.5, abs=0.03)
    assert result.transition == pytest.approx(true_channel, abs=0.02)
    bayes = clean * true_channel[:, labels].T
    bayes /= bayes.sum(axis=1, keepdims=True)
    assert np.abs(result.correct - bayes[np.arange(count), labels]).mean() < 0.01
    assert (result.likely == bayes.argmax(axis=1)).mean() > 0.99
    for low, high in ((0.0, 0.2), (0.4, 0.6), (0.8, 1.0)):
        mask = (result.correct >= low) & (result.correct <= high)
        assert (labels == truth)[mask].mean() == pytest.approx(result.correct[mask].mean(), abs=0.05)


def test_clean_labels_are_probably_correct() -> None:
    generator = np.random.default_rng(1)
    labels = np.arange(600) % 4
    logits = generator.normal(size=(600, 4)) + 9 * np.eye(4)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert (label_noise.fit_noise_channel(labels, probabilities).correct > 0.5).all()


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2)), max_size=60), count=st.integers(2, 5))
def test_folds_are_even_and_copies_stay_together(rows: list[tuple[str, int]], count: int) -> None:
    inputs = [text for text, _ in rows]
    labels = np.array([label for _, label in rows], dtype=np.int64)
    fold = assign_folds(inputs, labels, count)
    assert all(0 <= item < count for item in fold.tolist())
    fold_by_pair = {}
    for pair, item in zip(rows, fold.tolist(), strict=True):
        assert fold_by_pair.setdefault(pair, item) == item
    for label in set(labels.tolist()):
        sizes = np.bincount(
            [item for (_, pair_label), item in fold_by_pair.items() if pair_label == label], minlength=count
        )
        assert sizes.max() - sizes.min() <= 1
    reversed_fold = assign_folds(inputs[::-1], labels[::-1], count)
    assert reversed_fold[::-1].tolist() == fold.tolist()


def points(count: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of three clouds, their labels with every tenth wrong, and the mask of the wrong labels."""
    generator = np.random.default_rng(2)
    truth = np.arange(count) % 3
    features = np.eye(3)[truth] + 0.18 * generator.normal(size=(count, 3))
    wrong = np.arange(count) % 10 == 0
    return features, np.where(wrong, (truth + 1) % 3, truth), wrong


def test_no_record_is_predicted_from_its_own_fold() -> None:
    features, labels, _ = points()
    fold = assign_folds([f"{n}" for n in range(len(labels))], labels, 5)
    before = predict_out_of_fold(features, labels, fold)
    assert before.sum(axis=1) == pytest.approx(1)
    changed_labels = labels.copy()
    changed_labels[fold == 2] = (labels[fold == 2] + 1) % 3
    after = predict_out_of_fold(features, changed_labels, fold)
    assert (after[fold == 2] == before[fold == 2]).all()
    assert (after[fold != 2] != before[fold != 2]).any(axis=1).all()


def test_an_audit_finds_the_planted_errors() -> None:
    features, labels, wrong = points()
    names = [f"{n}" for n in range(len(labels))]
    one_round, two_rounds = (audit_labels(features, labels, names, rounds=rounds) for rounds in (1, 2))
    for result in (one_round, two_rounds):
        suspects = result.correct < 0.5
        assert (suspects & wrong).sum() >= 0.9 * wrong.sum()
        assert (suspects & ~wrong).sum() <= 0.1 * wrong.sum()
    repeat = audit_labels(features, labels, names)
    assert (repeat.correct == two_rounds.correct).all()
