"""BALD, vote entropy and divergence from the consensus, against the definitions and scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy as scipy_entropy

from posttrain.select.scores.uncertainty import bald, consensus_kl, vote_entropy

weights = arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5)),
    elements=st.floats(0, 1, width=32),
).filter(lambda w: bool((w.sum(axis=2) > 1e-3).all()))


def test_certain_and_opposed_members_give_one_bit() -> None:
    p = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    for score in (bald, vote_entropy, consensus_kl):
        assert score(p)[0] == pytest.approx(np.log(2))


def test_members_with_equal_probabilities_do_not_disagree() -> None:
    p = np.full((4, 1, 3), 1 / 3)
    for score in (bald, vote_entropy, consensus_kl):
        assert score(p)[0] == pytest.approx(0.0, abs=1e-12)
        assert not np.signbit(score(p)[0])


def test_an_example_computed_by_hand() -> None:
    p = np.array([[[0.9, 0.1]], [[0.5, 0.5]], [[0.2, 0.8]]])
    mean = np.array([1.6, 1.4]) / 3
    single = [-(0.9 * np.log(0.9) + 0.1 * np.log(0.1)), np.log(2), -(0.2 * np.log(0.2) + 0.8 * np.log(0.8))]
    assert bald(p)[0] == pytest.approx(-(mean * np.log(mean)).sum() - np.mean(single))
    # The member with equal probabilities votes for the first label: two votes against one.
    assert vote_entropy(p)[0] == pytest.approx(-(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)))


@pytest.mark.slow
@given(weights)
def test_values_equal_the_definitions(raw: np.ndarray) -> None:
    p = raw / raw.sum(axis=2, keepdims=True)
    members, records, labels = p.shape
    mean = p.mean(axis=0)
    divergence = np.array([[scipy_entropy(p[t, n], mean[n]) for n in range(records)] for t in range(members)]).mean(0)
    np.testing.assert_allclose(consensus_kl(p), divergence, atol=1e-12)
    information = scipy_entropy(mean, axis=1) - scipy_entropy(p, axis=2).mean(axis=0)
    np.testing.assert_allclose(bald(p), information, atol=1e-12)
    np.testing.assert_allclose(bald(p), consensus_kl(p), atol=1e-9)
    votes = np.stack([np.bincount(p[:, n].argmax(1), minlength=labels) for n in range(records)])
    np.testing.assert_allclose(vote_entropy(p), scipy_entropy(votes, axis=1), atol=1e-12)
    for score in (bald, vote_entropy, consensus_kl):
        assert (score(p) >= 0).all()
        assert (score(p) <= np.log(min(members, labels)) + 1e-9).all()
        np.testing.assert_allclose(score(p[::-1]), score(p), atol=1e-9)


@pytest.mark.parametrize("score", [bald, vote_entropy, consensus_kl])
def test_arrays_of_other_shapes_are_refused(score) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="shape"):
        score(np.ones((3, 2)))
    with pytest.raises(ValueError, match="shape"):
        score(np.empty((0, 3, 2)))
