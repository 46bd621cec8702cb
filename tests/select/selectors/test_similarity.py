"""Similarities by matrix products, against their definitions."""

import numpy as np
import pytest

from posttrain.select.selectors.similarity import Euclidean, OuterProducts, Similarity, max_similarity, whiten

GENERATOR = np.random.default_rng(0)
LEFT = GENERATOR.normal(size=(40, 5)).astype(np.float32)
RIGHT = GENERATOR.normal(size=(40, 7)).astype(np.float32) + 2
PRODUCTS = np.einsum("nk,nd->nkd", LEFT, RIGHT).reshape(40, -1)


def squared_distances(rows: np.ndarray) -> np.ndarray:
    return np.square(rows[:, None] - rows[None]).sum(axis=-1, dtype=np.float64)


KINDS = {
    "Euclidean": (Euclidean.from_rows(RIGHT), -squared_distances(RIGHT) / 2),
    "outer products": (OuterProducts.from_rows(LEFT, RIGHT), -squared_distances(PRODUCTS) / 2),
}
every_kind = pytest.mark.parametrize(("similarity", "exact"), KINDS.values(), ids=KINDS)


@every_kind
def test_values_equal_the_definition(similarity: Similarity, exact: np.ndarray) -> None:
    np.testing.assert_allclose(similarity.between(slice(None), slice(None)), exact, rtol=1e-4, atol=1e-3)
    rows, others = np.array([3, 3, 39]), np.array([0, 20])
    np.testing.assert_allclose(similarity.between(rows, others), exact[rows][:, others], rtol=1e-4, atol=1e-3)
    assert len(similarity) == 40


@every_kind
def test_max_similarity_is_that_of_the_closest_row(similarity: Similarity, exact: np.ndarray) -> None:
    others = np.array([5, 11, 2])
    rows = np.arange(40)
    np.testing.assert_allclose(
        max_similarity(similarity, rows, others), exact[:, others].max(axis=1), rtol=1e-4, atol=1e-3
    )
    assert np.isneginf(max_similarity(similarity, rows, others[:0])).all()


def test_whitened_rows_do_not_depend_on_where_the_cloud_is() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 8)) * np.arange(1, 9)
    np.testing.assert_allclose(np.abs(whiten(rows, 4)), np.abs(whiten(rows + 50, 4)), atol=1e-4)
