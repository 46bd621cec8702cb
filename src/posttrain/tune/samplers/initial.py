"""Points that a study tries first, whatever its sampler."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.store.errors import UserError
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.population import PopulationSampler
from posttrain.tune.space import Settings, Space, point_key
from posttrain.tune.trial import Fork, Trial


class InitialPoints(PopulationSampler):
    """Proposes given points in their order, and then what another sampler proposes.

    The other sampler sees the trials of these points like any others; where it stands in a grid or a sequence, it notes
    with its own trials, so that it skips nothing.

    Args:
        sampler: proposes settings once all points have been tried.
        points: drawn values by name, as `read_points` returns them.
    """

    def __init__(self, sampler: Sampler, points: Sequence[Settings]) -> None:
        super().__init__(sampler.space, sampler.seed, sampler.directions)
        self._sampler, self._points = sampler, points
        self._left = list(points)

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        if (point := self._next_point(trials)) is not None:
            return Proposal(point)
        return self._sampler.propose(number, trials)

    def _next_point(self, trials: Sequence[Trial]) -> Settings | None:
        """Returns the first point that no trial has tried, also where these were begun without the points."""
        # Once tried, for good: not asked again with each of thousands of trials.
        while self._left and any(point_key(trial.drawn) == point_key(self._left[0]) for trial in trials):
            del self._left[0]
        return self._left[0] if self._left else None

    def propose_child(self, number: int, trials: Sequence[Trial], fork: Fork) -> Proposal:
        assert isinstance(self._sampler, PopulationSampler), "a study checks its sampler before it has points"
        return self._sampler.propose_child(number, trials, fork)


def read_points(points: Sequence[Settings], space: Space, where: str = "initial") -> list[dict[str, Any]]:
    """Returns the drawn values of points, each point once.

    Args:
        points: values by name; those that are derived or fixed may be left out.
        space: what is searched.
        where: the key that they come from, named in errors.

    Raises:
        UserError: one is not a point of the space.
    """
    if isinstance(points, Mapping) or not all(isinstance(point, Mapping) for point in points):
        raise UserError("is not a list of points", where=where, fix="give such as [{x: 0.5}]")
    read: list[dict[str, Any]] = []
    for point in points:
        drawn = find_drawn(point, space)
        if drawn is None:
            listed = ", ".join(f"{name}: {value}" for name, value in point.items())
            fix = "give every parameter that exists there a value in its range"
            raise UserError(f"{{{listed}}} is not a point of the space", where=where, fix=fix)
        read.append(drawn)
    return list({point_key(drawn): drawn for drawn in read}.values())


def find_drawn(point: Mapping[str, Any], space: Space) -> dict[str, Any] | None:
    """Returns the drawn values of a point; None where it is not a point of the space."""
    given = {name: point[name] for name in space.parameters if name in point}
    if any(value not in space.parameters[name] for name, value in given.items()):
        return None  # before formulas see it
    whole = space.complete(given)
    if whole not in space or any(name not in whole or whole[name] != value for name, value in point.items()):
        return None
    return {name: whole[name] for name in space.parameters if name in whole}
