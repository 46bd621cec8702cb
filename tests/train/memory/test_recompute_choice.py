"""Which activations are computed again, against all that could have been chosen."""

from itertools import combinations_with_replacement
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as some
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


def best(every: list[RecomputePolicy], layers: int, needed: int) -> float:
    """The fewest FLOPs of all combinations that save enough."""
    result = combinations_with_replacement(every, layers)
    return min(sum(w.flops for w in ones) for ones in result if sum(w.saved for w in ones) >= needed)


def test_the_ways_of_a_layer() -> None:
    every = recompute_policies(COSTS)
    assert every[0] == KEEP_ALL
    assert len(every) == 2 * 2 * 3 + 1
    assert RecomputePolicy(frozenset({"norms", "activation"}), 50, 10.0) in every
    assert every[-1] == RecomputePolicy(frozenset({"layer"}), 150, 300.0)


def test_what_saves_most_for_least_comes_first() -> None:
    every = recompute_policies(COSTS)
    assert choose_policies(every, 3, 0) == [KEEP_ALL] * 3
    assert [set(way.parts) for way in choose_policies(every, 3, 45)] == [{"norms", "activation"}, set(), set()]
    # Of the last layer as little as is enough.
    assert [set(way.parts) for way in choose_policies(every, 3, 65)] == [{"norms", "activation"}, {"norms"}, set()]
    assert sum(way.saved for way in choose_policies(every, 3, 10_000)) == 3 * 150


@pytest.mark.parametrize("needed", range(0, 451, 25))
def test_near_the_best_of_all(needed: int) -> None:
    every = recompute_policies(COSTS)
    result = choose_policies(every, 3, needed)
    assert sum(way.saved for way in result) >= needed
    # A greedy choice does at most one layer's way too much.
    assert sum(way.flops for way in result) <= best(every, 3, needed) + max(way.flops for way in every)


@given(
    some.lists(some.tuples(some.integers(1, 60), some.floats(0.1, 50)), min_size=1, max_size=5),
    some.integers(1, 4),
    some.integers(0, 200),
)
def test_any_ways(pairs: list[tuple[int, float]], layers: int, needed: int) -> None:
    every = [KEEP_ALL, *(RecomputePolicy(frozenset({str(at)}), *pair) for at, pair in enumerate(pairs))]
    needed = min(needed, layers * max(way.saved for way in every))
    result = choose_policies(every, layers, needed)
    assert len(result) == layers
    assert sum(way.saved for way in result) >= needed
    flops = sum(way.flops for way in result)
    least = best(every, layers, needed)
    assert flops <= least + max(way.flops for way in every) or isclose(flops, least)


def test_the_budget() -> None:
    assert RecomputeConfig(budget="25%").allowed(1000) == 250
    assert RecomputeConfig(budget="1.5 GiB").allowed(1) == 3 * 2**29
    assert RecomputeConfig(budget="800MB").allowed(1) == 800 * 10**6
    for wrong in ("much", "5", "-3GiB", "GiB"):
        with pytest.raises(ValidationError, match="an amount with its unit"):
            RecomputeConfig(budget=wrong)


def test_the_config() -> None:
    assert TrainConfig().recompute.mode == "none"
    assert TrainConfig.read({"recompute": "full"}, "x").recompute == RecomputeConfig(mode="full")
    assert TrainConfig.read({"recompute": {"mode": "selective"}}, "x").recompute.budget == "50%"
    with pytest.raises(UserError, match=r"recompute\.mode"):
        TrainConfig.read({"recompute": "some"}, "x")


def test_what_the_config_asks_for() -> None:
    def chosen(**settings: str) -> list[RecomputePolicy]:
        return layer_policies(TrainConfig.read({"recompute": settings}, "x"), COSTS, 4)

    assert chosen(mode="none") == [KEEP_ALL] * 4
    assert [way.parts for way in chosen(mode="full")] == [{"layer"}] * 4
    assert sum(way.saved for way in chosen(mode="selective", budget="50%")) >= 320
    assert sum(way.saved for way in chosen(mode="selective", budget="100%")) == 0
    assert sum(way.saved for way in chosen(mode="selective", budget="600B")) >= 40
