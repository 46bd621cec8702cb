"""What each layer computes again in the backward pass, so that activations fit a budget with the least extra work.

A multiple-choice knapsack: a layer has one of a few ways, each with the bytes that it saves and the FLOPs that it
costs. Ways are ordered as a chain in which each step saves the most bytes per further FLOP; layers take the steps one
after another, the best first, until the rest fits (the greedy bound of Sinha & Zoltners 1979, Operations Research
27(3)). The last step is the cheapest that is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from posttrain.train.config import TrainConfig
from posttrain.train.memory.activations import Cost, LayerCosts


@dataclass(frozen=True)
class Way:
    """What one layer computes again.

    Args:
        parts: some of ``norms``, ``attention``, ``feed_forward``, ``activation``; or ``layer`` alone.
        saved: bytes.
        flops: extra.
    """

    parts: frozenset[str]
    saved: int
    flops: float


NOTHING = Way(frozenset(), 0, 0.0)


def ways(costs: LayerCosts) -> list[Way]:
    """All ways of a layer, `NOTHING` first."""
    attention: list[tuple[str, Cost]] = [("attention", costs.attention)]
    forward = [("feed_forward", costs.feed_forward)]
    if costs.activation:
        forward.append(("activation", costs.activation))
    choices = product([None, ("norms", costs.norms)], [None, *attention], [None, *forward])
    found = []
    for chosen in choices:
        parts = [one for one in chosen if one]
        saved = sum(cost.saved for _, cost in parts)
        found.append(Way(frozenset(name for name, _ in parts), saved, sum(cost.flops for _, cost in parts)))
    return [*found, Way(frozenset(["layer"]), costs.whole.saved, costs.whole.flops)]


def choose(every: Sequence[Way], layers: int, needed: int) -> list[Way]:
    """A way for each layer that together save at least ``needed`` bytes, or as many as can be.

    What is computed again stands in the first layers: when the backward pass comes to it, what the later ones kept is
    freed already.

    Args:
        every: ways, `NOTHING` among them.
        layers: how many layers there are, all alike.
        needed: bytes.
    """
    chain = _chain(every)
    chosen = [NOTHING] * layers
    missing = needed
    for before, after in pairwise(chain):
        for place in range(layers):
            if missing <= 0:
                return chosen
            enough = [way for way in every if way.saved - before.saved >= missing]
            cheapest = min(enough, key=lambda way: way.flops, default=after)
            step = cheapest if cheapest.flops <= after.flops else after
            chosen[place] = step
            missing -= step.saved - before.saved
    return chosen


def chosen_ways(config: TrainConfig, costs: LayerCosts, layers: int) -> list[Way]:
    """The way of each layer that ``train.recompute`` asks for."""
    recompute = config.recompute
    if recompute.mode == "none":
        return [NOTHING] * layers
    every = ways(costs)
    if recompute.mode == "full":
        return [every[-1]] * layers
    whole = costs.whole.kept * layers
    return choose(every, layers, whole - recompute.allowed(whole))


def _chain(every: Sequence[Way]) -> list[Way]:
    """From `NOTHING` upwards, ways of which each saves the most further bytes per further FLOP."""
    chain = [NOTHING]
    while more := [way for way in every if way.saved > chain[-1].saved]:
        last = chain[-1]

        def worth(way: Way, last: Way = last) -> tuple[float, int]:
            extra = way.flops - last.flops
            return ((way.saved - last.saved) / extra if extra > 0 else float("inf"), way.saved)

        chain.append(max(more, key=worth))
    return chain
