"""The regularised mean against the minimum that it is defined by."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import merge_tensor

WEIGHTS = st.floats(0.01, 10)


@given(weight=st.lists(WEIGHTS, min_size=1, max_size=4), strength=st.one_of(st.just(0.0), WEIGHTS))
def test_gradient_of_its_objective_is_zero(weight: list[float], strength: float) -> None:
    generator = torch.Generator().manual_seed(len(weight))
    base, *models = torch.randn(len(weight) + 1, 3, 5, generator=generator)
    result = merge_tensor("regularized_mean", models, base, weight=weight, strength=strength).double()
    gradient = strength * (result - base.double())
    for factor, model in zip(weight, models, strict=True):
        gradient += factor * (result - model.double())
    assert gradient.abs().max() <= 1e-5 * (sum(weight) + strength)


def test_strength_leads_from_the_mean_to_the_base() -> None:
    base, *models = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    mean = merge_tensor("linear", models)
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=0.0), mean)
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=1e9), base)
    # Two models of weight 1 and a base of weight 2.
    torch.testing.assert_close(merge_tensor("regularized_mean", models, base, strength=2.0), (mean + base) / 2)


@pytest.mark.parametrize("options", [{"strength": -1.0}, {"weight": -1.0}, {"weight": 0.0, "strength": 0.0}])
def test_refuses_what_has_no_minimum(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        merge_tensor("regularized_mean", [torch.ones(2)] * 2, torch.zeros(2), **options)


def test_infinite_strength_is_refused() -> None:
    with pytest.raises(UserError):
        merge_tensor("regularized_mean", [torch.ones(2)], torch.zeros(2), strength=np.inf)
