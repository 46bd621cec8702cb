"""Regularised evolution: a population in which the oldest dies, and parents are the best of random samples."""

from collections.abc import Sequence

from posttrain.tune.parts import check_ranges
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial

_MAX_DRAWS = 100  # of one child, until its settings meet the constraints and differ from its parent's


class EvolutionSampler(Sampler):
    """Ageing evolution (Real et al. 2019, arXiv:1802.01548, algorithm 1).

    The first trials are drawn at random. Then each is the child of the best of a random sample of the population, which
    is the youngest trials that have a value: the oldest dies, however good. In a child one parameter is drawn anew.
    A failed trial is no member, and so never a parent: as the worst of the population it would only take the place of a
    member that can have children.

    Args:
        population: trials of the population.
        tournament: trials of a sample; None: 5, or the whole of a smaller population.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(
        self, space: Space, seed: int = 0, maximize: bool = False, population: int = 20, tournament: int | None = None
    ) -> None:
        super().__init__(space, seed, maximize)
        tournament = min(5, population) if tournament is None else tournament
        check_ranges(
            "sampler",
            {
                "population": (population, population >= 2, "at least 2"),
                "tournament": (tournament, 1 <= tournament <= population, f"1 to the population, {population:g}"),
            },
        )
        self.population, self.tournament = int(population), int(tournament)

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        generator = self.generator(number)
        losses = self.comparable_losses(trials)
        # By number, as the order in which trials end differs from run to run.
        alive = sorted(losses)[-self.population :]
        if len(alive) < self.population:
            return Proposal(self.space.draw(generator))
        sample = generator.choice(alive, self.tournament, replace=False).tolist()
        parent = trials[min(sample, key=lambda item: (losses[item], item))].drawn
        for _ in range(_MAX_DRAWS):
            name = list(parent)[generator.integers(len(parent))]
            value = self.space.parameters[name].from_unit(generator.random())
            # Parameters that come into being with the new value are drawn, too; those that cease to exist go.
            child = self.space.draw(generator) | dict(parent) | {name: value}
            point = self.space.complete(child)
            drawn = {key: point[key] for key in self.space.parameters if key in point}
            if value != parent[name] and self.space.is_feasible(point):
                return Proposal(drawn)
        return Proposal(self.space.draw(generator))
