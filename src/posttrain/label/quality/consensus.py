"""Consensus: majorities with their ties, Dawid and Skene's posterior, and the answers that others gave to an item.

Source: A. P. Dawid and A. M. Skene, Maximum Likelihood Estimation of Observer Error-Rates Using the EM Algorithm
(Applied Statistics 28, 1979)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from posttrain.label.answers import Floats, Integers, Votes
from posttrain.store.errors import UserError

MAX_CELLS = 50_000_000
"""Numbers in all posteriors, or in all confusion matrices, at most: 400 MB each."""

_TINY = 1e-10  # probabilities are at least this, so that their logarithms are finite

# Of the prior, in answers or items. They matter for the first dozens only.
_TEAM_ANSWERS, _TEAM_ACCURACY = 2.0, 0.75
_OWN_ANSWERS = 5.0
_LABEL_ITEMS = 20.0


@dataclass(frozen=True)
class Majority:
    """The most frequent answer to each of U items.

    Attributes:
        label: int64 [U], index of the label; -1 for a tie.
        share: float64 [U], share of the answers that the most frequent one has.
        answers: int64 [U], number of answers.
        ties: The tied labels by the index of the item, in the order of the labels.
    """

    label: Integers
    share: Floats
    answers: Integers
    ties: Mapping[int, tuple[int, ...]]


def majority(votes: Votes) -> Majority:
    """Counts the answers to each item; a tie is named and not broken."""
    counts = _counts(votes)
    answers = np.asarray(counts.sum(axis=1)).ravel().astype(np.int64)
    label = np.full(len(votes.items), -1, np.int64)
    share = np.zeros(len(votes.items))
    ties: dict[int, tuple[int, ...]] = {}
    for item in range(len(votes.items)):
        start, stop = counts.indptr[item : item + 2]
        most = counts.data[start:stop].max()
        winners = np.sort(counts.indices[start:stop][counts.data[start:stop] == most])
        share[item] = most / answers[item]
        if len(winners) == 1:
            label[item] = winners[0]
        else:
            ties[item] = tuple(int(winner) for winner in winners)
    return Majority(label, share, answers, ties)


@dataclass(frozen=True)
class DawidSkene:
    """The model of Dawid and Skene, fitted: U items, W annotators, C labels.

    Attributes:
        posterior: float64 [U, C], probability of each label; rows sum to 1.
        confusion: float64 [W, C, C], probability that the annotator gives label k (last axis) where c is right.
        prior: float64 [C], share of each label.
        iterations: Rounds of EM.
        log_likelihood: Of all answers, at the last parameters.
    """

    posterior: Floats
    confusion: Floats
    prior: Floats
    iterations: int
    log_likelihood: float

    @property
    def label(self) -> Integers:
        """Returns the most probable label of each item, int64 [U]."""
        return np.asarray(self.posterior.argmax(axis=1), np.int64)

    @property
    def accuracy(self) -> Floats:
        """Returns the probability that each annotator is right, over the labels' prior, float64 [W]."""
        return np.asarray(np.einsum("wcc,c->w", self.confusion, self.prior), np.float64)


def dawid_skene(
    votes: Votes,
    *,
    expected: Integers | None = None,
    smoothing: float = 100.0,
    iterations: int = 200,
    tolerance: float = 1e-3,
) -> DawidSkene:
    """Fits each annotator's confusion matrix and each item's posterior by expectation maximisation, in float64.

    Annotators are taken to err independently of each other: of a text that misleads several, the posterior is too sure.

    Args:
        votes: The answers.
        expected: int64 [U], the known label of gold items, -1 for the others; their posterior is fixed.
        smoothing: Answers that the prior adds to each row of a confusion matrix; 0 is maximum likelihood, as published.
            A matrix has more rows than an annotator has answers to each label. Maximum likelihood fits them to the
            posterior that it is about to compute: of three annotators with three answers it is 99% sure of one, and
            right in a third of the cases.
        iterations: Rounds of EM, at most.
        tolerance: EM ends when the mean absolute change of a posterior is below.

    Raises:
        UserError: there are more labels and annotators than memory; see `MAX_CELLS`.
    """
    items, workers, classes = len(votes.items), len(votes.annotators), len(votes.labels)
    if max(items * classes, workers * classes**2) > MAX_CELLS:
        raise UserError(f"{classes} different answers by {workers} annotators are too many for Dawid and Skene's model")
    if not items:
        return DawidSkene(np.empty((0, classes)), np.empty((workers, classes, classes)), np.empty(classes), 0, 0.0)
    # One column for each annotator and label: both steps of EM become products with this matrix.
    column = votes.annotator * classes + votes.label
    shape = (items, workers * classes)
    answers = sparse.csr_array((np.ones(len(column)), (votes.item, column)), shape=shape)
    by_answer = sparse.csr_array(answers.T)
    counts = _counts(votes).toarray()
    posterior = counts / counts.sum(axis=1, keepdims=True)
    known = np.flatnonzero(expected >= 0) if expected is not None else np.empty(0, np.int64)
    fixed = np.eye(classes)[expected[known]] if expected is not None else np.empty((0, classes))
    posterior[known] = fixed
    count = 0
    while True:
        items_of = posterior.sum(axis=0)
        given = (by_answer @ posterior).reshape(workers, classes, classes)  # [w, answer k, right c]
        if smoothing:
            items_of = items_of + _LABEL_ITEMS / classes
            given = given + smoothing * _expected_confusion(given, smoothing)
        prior = np.maximum(items_of / items_of.sum(), _TINY)
        given = np.maximum(given, _TINY)
        given = given / given.sum(axis=1, keepdims=True)
        joint = answers @ np.log(given).reshape(workers * classes, classes) + np.log(prior)
        most = joint.max(axis=1, keepdims=True)
        scaled = np.exp(joint - most)
        evidence = scaled.sum(axis=1, keepdims=True)
        updated = scaled / evidence
        updated[known] = fixed
        change = float(np.abs(updated - posterior).sum(axis=1).mean())
        posterior, count = updated, count + 1
        if change < tolerance or count >= iterations:
            break
    likelihood = float((most + np.log(evidence)).sum())
    return DawidSkene(posterior, given.transpose(0, 2, 1), prior, count, likelihood)


def _expected_confusion(given: Floats, smoothing: float) -> Floats:
    """Returns the prior mean of each confusion matrix: equally accurate on all labels, wrong as the team is.

    Args:
        given: float64 [W, C, C], expected number of answers k (second axis) of each annotator where c is right.
        smoothing: Answers that spread the team's errors evenly, for each right label.
    """
    classes = given.shape[1]
    same = np.eye(classes)
    right, count = np.einsum("wcc->w", given), given.sum(axis=(1, 2))
    team = (right.sum() + _TEAM_ANSWERS * _TEAM_ACCURACY) / (count.sum() + _TEAM_ANSWERS)
    accuracy = ((right + _OWN_ANSWERS * team) / (count + _OWN_ANSWERS))[:, None, None]
    wrong = (given.sum(axis=0) + smoothing / max(classes - 1, 1)) * (1 - same)
    wrong /= np.maximum(wrong.sum(axis=0), _TINY)
    return np.asarray(accuracy * same + (1 - accuracy) * wrong, np.float64)


def gold_labels(votes: Votes, expected: Sequence[str | None]) -> Integers:
    """Returns the index of the right label of each item, int64 [U]; -1 for items that are not gold.

    Args:
        votes: The answers.
        expected: The column ``expected`` of the table that ``votes`` comes from.
    """
    labels = np.full(len(votes.items), -1, np.int64)
    given = votes.label_index([expected[row] for row in votes.rows])
    labels[votes.item[given >= 0]] = given[given >= 0]
    return labels


def reference_labels(votes: Votes, expected: Integers) -> Integers:
    """Returns what each vote is compared with, int64 [N]: the gold label, else the majority of all other annotators.

    An annotator's own answer is left out, as it would agree with itself; -1 where nobody else answered, or others tie.

    Args:
        votes: The answers.
        expected: int64 [U] of `gold_labels`.
    """
    return np.where(expected[votes.item] >= 0, expected[votes.item], _majority_without(votes, votes.item, votes.label))


def _majority_without(votes: Votes, items: Integers, own: Integers) -> Integers:
    """Returns the majority label of each item without the answer ``own``; -1 for a tie or no other answer."""
    counts = _counts(votes)
    rows = sparse.csr_array(counts[items])
    removed = sparse.csr_array((np.ones(len(items)), (np.arange(len(items)), own)), shape=rows.shape)
    rows = sparse.csr_array(rows - removed)
    if not len(items) or not rows.shape[1]:
        return np.full(len(items), -1, np.int64)
    most = rows.max(axis=1).toarray().ravel()
    top = rows.copy()
    top.data = ((top.data == np.repeat(most, np.diff(top.indptr))) & (top.data > 0)).astype(np.float64)
    winners = np.asarray(top.sum(axis=1)).ravel()
    index = np.asarray(top @ np.arange(rows.shape[1], dtype=np.float64)).ravel()
    return np.where((most >= 1) & (winners == 1), index, -1).astype(np.int64)


def _counts(votes: Votes) -> sparse.csr_array:
    shape = (len(votes.items), len(votes.labels))
    counts = sparse.csr_array((np.ones(len(votes.item)), (votes.item, votes.label)), shape=shape)
    counts.sum_duplicates()
    return counts
