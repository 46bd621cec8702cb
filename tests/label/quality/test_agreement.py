"""Agreement: published worked examples, reference libraries, and invariances."""

import math
from collections.abc import Sequence

import krippendorff
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vote_tables import answer_table, votes_of

from posttrain.label.answers import Votes, encode_votes
from posttrain.label.quality.agreement import Agreement, krippendorff_alpha, measure_agreement

OBSERVERS = {
    "A": [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    "B": [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    "C": [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    "D": [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
}

PSYCHIATRISTS = (
    "00060 03003 01401 00006 03030 20400 00402 20310 20040 00006 10050 11040 03300 10050 02031 "
    "00501 30012 51000 02040 10203 00006 01050 02013 20040 10041 05010 40002 02040 10500 00006"
)
"""Diagnoses of 30 patients by 6 raters each: depression, personality disorder, schizophrenia, neurosis, other."""


def two(left: Sequence[str], right: Sequence[str]) -> Votes:
    return votes_of({"left": left, "right": right})


@pytest.mark.parametrize(
    ("left", "right", "alpha"),
    [("0100000010", "1110010000", 0.095), ("aabbdcccedda", "babbbccceddd", 0.692)],
)
def test_alpha_of_two_observers_as_krippendorff_2011_prints_it(left: str, right: str, alpha: float) -> None:
    assert round(krippendorff_alpha(two(left, right)), 3) == alpha


def test_alpha_with_missing_data_as_krippendorff_2011_prints_it() -> None:
    assert round(krippendorff_alpha(votes_of(OBSERVERS)), 3) == 0.743
    assert round(measure_agreement(votes_of(OBSERVERS)).alpha.value, 3) == 0.743


def test_cohens_kappa_as_cohen_1960_prints_it() -> None:
    counts = [[88, 10, 2], [14, 40, 6], [18, 10, 12]]
    pairs = [(a, b) for a, row in enumerate(counts) for b, count in enumerate(row) for _ in range(count)]
    agreement = measure_agreement(two(*zip(*pairs, strict=True)))
    assert (agreement.pairs_agreed, agreement.pairs, round(agreement.cohen.value, 3)) == (140, 200, 0.492)


def test_fleiss_kappa_as_fleiss_1971_prints_it() -> None:
    ratings = [[label for label, count in enumerate(row) for _ in range(int(count))] for row in PSYCHIATRISTS.split()]
    agreement = measure_agreement(votes_of({f"rater{at}": [row[at] for row in ratings] for at in range(6)}))
    assert [entry.answers for entry in agreement.by_class] == [26, 26, 30, 55, 43]
    assert round(agreement.fleiss.value, 3) == 0.430


def test_an_item_counts_once_in_fleiss_kappa_however_many_answers_it_has() -> None:
    agreement = measure_agreement(votes_of({"A": "aa", "B": "aa", "C": [None, "b"], "D": [None, "b"]}), draws=0)
    # Items agree in 1 of 1 and 2 of 6 pairs, and four of six answers are `a`: (2/3 - 5/9) / (1 - 5/9).
    assert agreement.fleiss.value == pytest.approx(0.25)


def random_votes(seed: int, items: int = 40, raters: int = 4, classes: int = 4, missing: float = 0.3) -> np.ndarray:
    """float64 [raters, items] of correlated labels; NaN where missing."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=items)
    given_ = np.where(rng.random((raters, items)) < 0.6, truth, rng.integers(classes, size=(raters, items)))
    return np.where(rng.random((raters, items)) < missing, np.nan, given_)


def as_votes(matrix: np.ndarray) -> Votes:
    cells = [[None if np.isnan(value) else int(value) for value in row] for row in matrix]
    return votes_of({f"r{at}": row for at, row in enumerate(cells)})


@pytest.mark.parametrize("seed", range(2))
def test_alpha_equals_the_package_krippendorff(seed: int) -> None:
    matrix = random_votes(seed)
    expected = krippendorff.alpha(matrix, level_of_measurement="nominal")
    assert krippendorff_alpha(as_votes(matrix)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_pairs_and_classes_equal_krippendorff_and_scikit_learn(seed: int) -> None:
    from sklearn.metrics import cohen_kappa_score

    matrix = random_votes(seed)
    agreement = measure_agreement(as_votes(matrix), draws=0)
    weighted = weights = 0.0
    for pair in agreement.by_pair:
        left, right = matrix[int(pair.first[1:])], matrix[int(pair.second[1:])]
        both = ~np.isnan(left) & ~np.isnan(right)
        kappa = cohen_kappa_score(left[both], right[both])
        assert pair.cohen.value == pytest.approx(kappa, abs=1e-12)
        assert pair.agreed == int((left == right).sum())
        weighted, weights = weighted + both.sum() * kappa, weights + both.sum()
    assert agreement.cohen.value == pytest.approx(weighted / weights)
    for entry in agreement.by_class:
        binary = np.where(np.isnan(matrix), np.nan, matrix == float(entry.label))
        assert entry.alpha.value == pytest.approx(krippendorff.alpha(binary, level_of_measurement="nominal"))


matrices = st.lists(
    st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=6, max_size=6), min_size=2, max_size=4
).filter(lambda rows: any(value is not None for row in rows for value in row))


def overall(votes: Votes) -> list[float]:
    agreement = measure_agreement(votes, draws=0)
    return [getattr(agreement, name).value for name in ("percent", "cohen", "fleiss", "alpha")]


@settings(deadline=None, max_examples=25)
@given(matrices, st.permutations(range(4)))
def test_other_names_for_labels_and_annotators_and_an_item_with_one_answer_change_nothing(
    rows: list[list[int | None]], names: list[int]
) -> None:
    plain = overall(votes_of({f"a{at}": row for at, row in enumerate(rows)}))
    renamed = [[None if value is None else f"label {names[value]}" for value in row] for row in rows]
    assert overall(votes_of({f"z{-at}": row for at, row in enumerate(renamed)})) == pytest.approx(plain, nan_ok=True)
    more = {f"a{at}": [*row, 3 if at == 0 else None] for at, row in enumerate(rows)}
    assert overall(votes_of(more)) == pytest.approx(plain, nan_ok=True)


def test_a_second_answer_to_an_item_replaces_the_first() -> None:
    rows = [{"item": item, "annotator": name, "answer": "x"} for item in range(4) for name in ("anna", "ben")]
    votes = encode_votes(answer_table([*rows, {"item": 0, "annotator": "anna", "answer": "y"}]))
    assert (len(votes.item), measure_agreement(votes).pairs_agreed) == (8, 3)


def test_nothing_to_compare_and_one_label_only_are_undefined() -> None:
    for votes in (votes_of({"anna": [1, 2]}), encode_votes(answer_table([])), two("aaaa", "aaaa")):
        assert math.isnan(krippendorff_alpha(votes))
    assert measure_agreement(two("aaaa", "aaaa")).percent.value == 1


@pytest.mark.slow
def test_intervals_cover_the_true_alpha_as_often_as_they_say_and_depend_on_the_seed_only() -> None:
    def agreement(seed: int, items: int = 120, coverage: float = 0.5) -> Agreement:
        votes = as_votes(random_votes(seed, items, 3, 3, 0.2))
        return measure_agreement(votes, draws=200, seed=1, coverage=coverage)

    truth = agreement(0, 8_000).alpha.value
    covered = [sample.low <= truth <= sample.high for sample in (agreement(seed).alpha for seed in range(1, 41))]
    assert 0.3 <= float(np.mean(covered)) <= 0.7
    assert agreement(1) == agreement(1)
    wide, narrow = agreement(1, coverage=0.95).alpha, agreement(1).alpha
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.mark.parametrize("items", [20, 100])
def test_where_no_item_differs_an_interval_is_as_wide_as_that_of_the_share(items: int) -> None:
    from scipy.stats import binomtest

    agreement = measure_agreement(two("ab" * (items // 2), "ab" * (items // 2)), draws=100)
    expected = binomtest(items, items).proportion_ci(0.95, "wilson").low
    pair, label = agreement.by_pair[0], agreement.by_class[0]
    for percent in (agreement.percent, pair.percent):
        assert (percent.low, percent.high) == (pytest.approx(expected), 1)
    # Half of the answers agree by chance: kappa is 1 - 2 * (1 - share).
    for kappa in (agreement.cohen, agreement.fleiss, pair.cohen):
        assert (kappa.low, kappa.value, kappa.high) == (pytest.approx(1 - 2 * (1 - expected)), 1, 1)
    assert agreement.alpha.low == pytest.approx(1 - (2 - 1 / items) * (1 - expected))
    half = binomtest(items // 2, items // 2).proportion_ci(0.95, "wilson").low
    assert label.percent.low == pytest.approx(half)
    assert label.alpha.low == pytest.approx(1 - (2 - 1 / items) * (1 - half))


@pytest.mark.slow
def test_intervals_cover_the_truth_where_hardly_an_item_differs() -> None:
    generator, covered = np.random.default_rng(0), []
    for _ in range(150):
        left = generator.integers(0, 2, 50)
        right = np.where(generator.random(50) < 0.02, 1 - left, left)
        result = measure_agreement(two(list(map(str, left)), list(map(str, right))), draws=100)
        covered.append([result.percent.low <= 0.98 <= result.percent.high, result.cohen.low <= 0.96])
    assert np.mean(covered, axis=0).min() >= 0.94
