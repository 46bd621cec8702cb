"""The choice of recomputed activations, against all possible choices."""

from itertools import combinations_with_replacement
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from posttrain.store.errors import UserError
from posttrain.train.config import RecomputeConfig, TrainConfig
from posttrain.train.memory.activations import ActivationCost, LayerCosts
from posttrain.train.memory.recompute import (
    KEEP_ALL,
    RecomputePolicy,
    choose_policies,
    layer_policies,
    recompute_policies,
)

COSTS = LayerCosts(
    norms=ActivationCost(30, 10, 4.0),
    attention=ActivationCost(50, 10, 100.0),
    feed_forward=ActivationCost(80, 10, 150.0),
    activation=ActivationCost(80, 50, 6.0),
    whole=ActivationCost(160, 10, 300.0),
)


def best(policies: list[RecomputePolicy], layers: int, needed: int) -> float:
    """The fewest FLOPs of all combinations that save enough."""
    combinations = combinations_with_replacement(policies, layers)
    return min(
        sum(policy.flops for policy in combination)
        for combination in combinations
        if sum(policy.saved for policy in combination) >= needed
    )


def test_the_policies_of_a_layer() -> None:
    policies = recompute_policies(COSTS)
    assert policies[0] == KEEP_ALL
    assert len(policies) == 2 * 2 * 3 + 1
    assert RecomputePolicy(frozenset({"norms", "activation"}), 50, 10.0) in policies
    assert policies[-1] == RecomputePolicy(frozenset({"layer"}), 150, 300.0)


def test_the_cheapest_savings_come_first() -> None:
    policies = recompute_policies(COSTS)
    assert choose_policies(policies, 3, 0) == [KEEP_ALL] * 3
    assert [set(policy.parts) for policy in choose_policies(policies, 3, 45)] == [{"norms", "activation"}, set(), set()]
    # The last layer recomputes only as much as needed.
    assert [set(policy.parts) for policy in choose_policies(policies, 3, 65)] == [
        {"norms", "activation"},
        {"norms"},
        set(),
    ]
    assert sum(policy.saved for policy in choose_policies(policies, 3, 10_000)) == 3 * 150


@pytest.mark.parametrize("needed", range(0, 451, 25))
def test_the_choice_is_near_the_optimum(needed: int) -> None:
    policies = recompute_policies(COSTS)
    result = choose_policies(policies, 3, needed)
    assert sum(policy.saved for policy in result) >= needed
    # A greedy choice costs at most one policy more than the best.
    assert sum(policy.flops for policy in result) <= best(policies, 3, needed) + max(
        policy.flops for policy in policies
    )


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 50)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 200),
)
def test_the_choice_is_near_the_optimum_for_any_costs(pairs: list[tuple[int, float]], layers: int, needed: int) -> None:
    policies = [KEEP_ALL, *(RecomputePolicy(frozenset({str(at)}), *pair) for at, pair in enumerate(pairs))]
    needed = min(needed, layers * max(policy.saved for policy in policies))
    result = choose_policies(policies, layers, needed)
    assert len(result) == layers
    assert sum(policy.saved for policy in result) >= needed
    flops = sum(policy.flops for policy in result)
    fewest = best(policies, layers, needed)
    assert flops <= fewest + max(policy.flops for policy in policies) or isclose(flops, fewest)


def test_a_budget_has_a_unit() -> None:
    assert RecomputeConfig(budget="25%").allowed(1000) == 250
    assert RecomputeConfig(budget="1.5 GiB").allowed(1) == 3 * 2**29
    assert RecomputeConfig(budget="800MB").allowed(1) == 800 * 10**6
    for wrong in ("much", "5", "-3GiB", "GiB"):
        with pytest.raises(ValidationError, match="an amount with its unit"):
            RecomputeConfig(budget=wrong)


def test_recompute_is_a_mode_or_a_section() -> None:
    assert TrainConfig().recompute.mode == "none"
    assert TrainConfig.read({"recompute": "full"}, "x").recompute == RecomputeConfig(mode="full")
    assert TrainConfig.read({"recompute": {"mode": "selective"}}, "x").recompute.budget == "50%"
    with pytest.raises(UserError, match=r"recompute\.mode"):
        TrainConfig.read({"recompute": "some"}, "x")


def test_policies_follow_the_config() -> None:
    def policies_for(**settings: str) -> list[RecomputePolicy]:
        return layer_policies(TrainConfig.read({"recompute": settings}, "x"), COSTS, 4)

    assert policies_for(mode="none") == [KEEP_ALL] * 4
    assert [way.parts for way in policies_for(mode="full")] == [{"layer"}] * 4
    assert sum(way.saved for way in policies_for(mode="selective", budget="50%")) >= 320
    assert sum(way.saved for way in policies_for(mode="selective", budget="100%")) == 0
    assert sum(way.saved for way in policies_for(mode="selective", budget="600B")) >= 40
