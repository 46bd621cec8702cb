"""Majority, and Dawid and Skene's model."""

import numpy as np
import pytest
from vote_tables import votes_of

from posttrain.label.answers import Votes
from posttrain.label.quality.consensus import dawid_skene, gold_labels, majority, reference_labels
from posttrain.store.errors import UserError


def noisy_votes(accuracies: list[float], items: int, classes: int, seed: int, overlap: int) -> tuple[Votes, np.ndarray]:
    """Votes of annotators with these accuracies, and the true labels, int64 [items]."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=items)
    item = np.repeat(np.arange(items), overlap)
    annotator = np.concatenate([rng.choice(len(accuracies), overlap, replace=False) for _ in range(items)])
    right = rng.random(len(item)) < np.array(accuracies)[annotator]
    wrong = (truth[item] + rng.integers(1, classes, len(item))) % classes
    label = np.where(right, truth[item], wrong)
    names = tuple(f"a{at:02}" for at in range(len(accuracies)))
    labels = tuple(str(at) for at in range(classes))
    return Votes(item, annotator, label, np.arange(len(item)), np.arange(items), names, labels), truth


def test_majorities_and_ties_are_named() -> None:
    result = majority(votes_of({"a": "xxzy", "b": "xyzx", "c": ["y", "z", "z", None], "d": [None, None, "y", None]}))
    x, y, z = range(3)
    assert result.label.tolist() == [x, -1, z, -1]
    assert result.ties == {1: (x, y, z), 3: (x, y)}
    assert result.share.tolist() == pytest.approx([2 / 3, 1 / 3, 3 / 4, 1 / 2])
    assert result.answers.tolist() == [3, 3, 4, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*keyword.*is deprecated")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_dawid_skene_without_smoothing_equals_crowd_kit_after_any_number_of_iterations(seed: int) -> None:
    import pandas as pd
    from crowdkit.aggregation import DawidSkene as CrowdKit

    votes, _ = noisy_votes([0.9, 0.8, 0.7, 0.6, 0.85], 150, 3, seed, 4)
    frame = pd.DataFrame({"task": votes.item, "worker": votes.annotator, "label": votes.label})
    theirs = CrowdKit(15, tol=-np.inf).fit(frame)
    ours, next_step = (dawid_skene(votes, smoothing=0, tolerance=0, iterations=count) for count in (15, 16))
    assert ours.posterior == pytest.approx(theirs.probas_.sort_index().sort_index(axis=1).to_numpy(), abs=1e-9)
    # Their matrices are of one step later than the posterior.
    errors = theirs.errors_.sort_index().sort_index(axis=1).to_numpy().reshape(5, 3, 3)
    assert next_step.confusion == pytest.approx(errors.transpose(0, 2, 1), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_dawid_skene_recovers_accuracies_and_beats_the_majority_of_unequal_annotators(seed: int) -> None:
    accuracies = [0.95, 0.95, 0.55, 0.5, 0.45, 0.5]
    votes, truth = noisy_votes(accuracies, 3000, 4, seed, 4)
    fitted = dawid_skene(votes)
    assert fitted.accuracy == pytest.approx(accuracies, abs=0.04)
    counted = majority(votes)
    assert (fitted.label == truth).mean() > (counted.label == truth).mean() + 0.05
    assert fitted.posterior.sum(axis=1) == pytest.approx(np.ones(3000))
    assert fitted.confusion.sum(axis=2) == pytest.approx(np.ones((6, 4)))
    # The posterior means what it says: of items at 90% about 90% are right.
    sure = fitted.posterior.max(axis=1)
    assert sure.mean() == pytest.approx((fitted.label == truth).mean(), abs=0.03)


def test_smoothing_helps_where_annotators_have_few_answers_a_label() -> None:
    gains = []
    for seed in range(4):
        accuracies = np.random.default_rng(seed).uniform(0.4, 0.95, 40).tolist()
        votes, truth = noisy_votes(accuracies, 1500, 30, seed, 3)
        plain, smooth = (dawid_skene(votes, smoothing=amount).label for amount in (0, 100))
        gains.append((smooth == truth).mean() - (plain == truth).mean())
    assert np.mean(gains) > 0.004


def test_the_posterior_of_disputed_items_in_a_small_batch_is_as_sure_as_it_is_right() -> None:
    excess: dict[float, list[np.ndarray]] = {0.0: [], 100.0: []}
    for seed in range(20):
        accuracies = np.random.default_rng(seed).uniform(0.6, 0.95, 5).tolist()
        votes, truth = noisy_votes(accuracies, 80, 8, seed, 3)
        disputed = majority(votes).share < 1
        for smoothing, values in excess.items():
            fitted = dawid_skene(votes, smoothing=smoothing)
            values.append((fitted.posterior.max(axis=1) - (fitted.label == truth))[disputed])
    published, smoothed = (float(np.concatenate(values).mean()) for values in excess.values())
    assert abs(smoothed) < 0.06
    assert published > 0.12


def test_nobody_is_sure_where_equal_annotators_all_differ() -> None:
    votes, _ = noisy_votes([0.85] * 3, 60, 6, 1, 3)
    label = votes.label.copy()
    label[:3] = range(3)
    split = Votes(**{**votes.__dict__, "label": label})
    assert majority(split).ties[0] == (0, 1, 2)
    assert dawid_skene(split, smoothing=0).posterior[0].max() > 0.95
    assert dawid_skene(split).posterior[0].max() < 0.7


def test_gold_items_keep_their_label_and_teach_the_confusions() -> None:
    votes, truth = noisy_votes([0.9, 0.3, 0.3], 400, 3, 0, 3)
    expected = np.where(np.arange(400) < 200, truth, -1)
    taught, alone = dawid_skene(votes, expected=expected), dawid_skene(votes)
    assert (taught.label[:200] == truth[:200]).all()
    assert (taught.label[200:] == truth[200:]).mean() >= (alone.label[200:] == truth[200:]).mean()
    assert taught.accuracy == pytest.approx([0.9, 0.3, 0.3], abs=0.1)


def test_too_many_labels_are_refused() -> None:
    votes, _ = noisy_votes([0.9, 0.9], 10, 2, 0, 2)
    many = Votes(**{**votes.__dict__, "labels": tuple(str(at) for at in range(8000))})
    with pytest.raises(UserError, match="too many"):
        dawid_skene(many)


def test_a_reference_never_contains_the_answers_that_are_compared_with_it() -> None:
    votes = votes_of({"a": "xyx", "b": "xyy", "c": "yyy", "d": [None, "x", None]})
    expected = gold_labels(votes, [None] * len(votes.rows))
    by_vote = {
        (votes.annotators[annotator], int(item)): "-" if label < 0 else votes.labels[label]
        for annotator, item, label in zip(votes.annotator, votes.item, reference_labels(votes, expected), strict=True)
    }
    # Of item 0 (x, x, y), `a` is compared with a tie of x and y, `c` with x.
    assert by_vote["a", 0] == "-"
    assert by_vote["c", 0] == "x"
    assert by_vote["d", 1] == "y"
