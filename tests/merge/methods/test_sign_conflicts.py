"""Resolutions of sign conflicts between two task vectors."""

import numpy as np
import pytest

from posttrain.store.errors import UserError

WEIGHT, IMPORTANCE = [1.3, 0.6], [2.0, 3.0]
RESOLUTIONS = ["magnitude", "zero", "average", "interpolate", "importance"]


def reference(first, second, resolution, normalize):
    result = np.zeros_like(first)
    for at in np.ndindex(first.shape):
        pair = np.array([first[at], second[at]])
        mean = np.dot(WEIGHT, pair) / sum(WEIGHT)
        if pair[0] * pair[1] >= 0:
            result[at] = mean if normalize else np.dot(WEIGHT, pair)
        elif resolution == "magnitude":
            larger = int(abs(WEIGHT[1] * pair[1]) > abs(WEIGHT[0] * pair[0]))
            result[at] = pair[larger] * (1 if normalize else WEIGHT[larger])
        elif resolution in ("average", "interpolate"):
            result[at] = mean
        elif resolution == "importance":
            result[at] = np.dot(IMPORTANCE, pair) / sum(IMPORTANCE)
    return result


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_definition(merge_vectors, vectors, resolution, normalize) -> None:
    # A number and 0 have no conflict.
    pair = [np.where(vectors[2] > limit, 0, vector) for limit, vector in zip((1, 0.5), vectors[:2], strict=True)]
    options = {"resolution": resolution, "weight": WEIGHT, "importance": IMPORTANCE, "normalize": normalize}
    merged = merge_vectors("resolve_conflicts", pair, scale=0.7, **options)
    np.testing.assert_allclose(merged, 0.7 * reference(*pair, resolution, normalize), atol=1e-6)


def test_magnitude_is_the_election_of_ties(merge_vectors, vectors) -> None:
    ties = merge_vectors("ties", vectors[:2], density=1.0, weight=WEIGHT)
    np.testing.assert_allclose(merge_vectors("resolve_conflicts", vectors[:2], weight=WEIGHT), ties, atol=1e-6)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_limits(merge_vectors, vectors, resolution) -> None:
    same = merge_vectors("resolve_conflicts", [vectors[0], vectors[0]], resolution=resolution)
    assert np.array_equal(same, vectors[0])
    # So small that their product is 0 in float32: still a conflict.
    merged = merge_vectors("resolve_conflicts", [np.array([[1e-30]]), np.array([[-3e-30]])], resolution=resolution)
    expected = {"magnitude": -3e-30, "zero": 0.0}.get(resolution, -1e-30)
    np.testing.assert_allclose(merged, [[expected]], rtol=1e-6)


def test_importances_of_zero_are_an_error(merge_vectors, vectors) -> None:
    with pytest.raises(UserError, match="importance"):
        merge_vectors("resolve_conflicts", vectors[:2], resolution="importance", importance=[0.0, 0.0])
