import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.select.scores.uncertainty import entropy, least_confidence, margin

EXAMPLE = np.array([[0.4, 0.35, 0.25]])

weights = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(2, 7)), elements=st.floats(0, 1, width=32)
).filter(lambda w: bool((w.sum(axis=1) > 1e-3).all()))


def test_published_example() -> None:
    assert entropy(EXAMPLE)[0] == pytest.approx(1.0805, abs=5e-5)
    assert least_confidence(EXAMPLE)[0] == pytest.approx(0.6)
    assert margin(EXAMPLE)[0] == pytest.approx(0.05)


def test_certain_and_uniform_rows() -> None:
    rows = np.array([[1.0, 0, 0, 0], [0.25] * 4])
    np.testing.assert_allclose(entropy(rows), [0, np.log(4)])
    assert not np.signbit(entropy(rows)).any()
    np.testing.assert_allclose(least_confidence(rows), [0, 0.75])
    np.testing.assert_allclose(margin(rows), [1, 0])


def test_single_label_is_certain() -> None:
    rows = np.ones((2, 1))
    assert entropy(rows).tolist() == [0, 0]
    assert least_confidence(rows).tolist() == [0, 0]
    assert margin(rows).tolist() == [1, 1]


@pytest.mark.parametrize("measure", [entropy, least_confidence, margin])
def test_arrays_that_are_no_matrix_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="shape"):
        measure(np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="shape"):
        measure(np.empty((3, 0)))


@given(weights)
def test_measures_equal_their_definitions_and_stay_in_bounds(raw: np.ndarray) -> None:
    from scipy.stats import entropy as scipy_entropy

    p = raw / raw.sum(axis=1, keepdims=True)
    labels = p.shape[1]
    np.testing.assert_allclose(entropy(p), scipy_entropy(p, axis=1), atol=1e-12)
    top = np.sort(p, axis=1)[:, ::-1]
    np.testing.assert_allclose(margin(p), top[:, 0] - top[:, 1])
    assert (entropy(p) <= np.log(labels) + 1e-9).all()
    assert (least_confidence(p) <= 1 - 1 / labels + 1e-9).all()
    shuffled = p[:, np.random.default_rng(0).permutation(labels)]
    for measure in (entropy, least_confidence, margin):
        np.testing.assert_allclose(measure(p), measure(shuffled), atol=1e-12)


def test_a_margin_is_to_the_second_of_many_labels() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(1000, 0.5), 50)
    top = np.sort(p, axis=1)
    np.testing.assert_array_equal(margin(p), top[:, -1] - top[:, -2])
