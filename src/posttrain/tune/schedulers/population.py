"""Population-based training (PBT; Jaderberg et al. 2017, arXiv:1711.09846), in generations that wait for each other."""

from collections.abc import Mapping
from itertools import cycle
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.trial import Fork

_POPULATION, _MEMBER = "population", "member"
"""The notes of a trial with the number of its population, and of its member in it."""

_QUANTILE = 0.25  # the share of the population that is replaced, and the share that is taken over


class Pbt(Scheduler):
    """Trains a population in intervals; after each, poor members take over the checkpoints and settings of good ones.

    Exploiting is the paper's truncation selection: a member in the worst quarter ends, and a new trial takes its place
    that continues from the checkpoint of a member in the best quarter, with settings that the sampler perturbs. The
    paper draws which; here the worst takes over the best, the second worst the second best, and so on, so that a study
    follows from its events. A member that has failed is replaced as well. At the last step the population is done, and
    the next begins.

    No member continues before all have come to the end of the interval. So neither the workers nor their speed change a
    study. A study of one population takes about ``population * (1 + 0.25 * (max_resource / interval - 1))`` trials;
    with none left in the budget, poor members continue as they are.

    Args:
        max_resource: the step at which a trial is finished.
        population: number of members.
        interval: steps between two comparisons.

    Raises:
        UserError: the numbers make no population or no interval.
    """

    sampler: ClassVar[str] = "perturb"
    has_forks: ClassVar[bool] = True

    def __init__(self, max_resource: int, population: Annotated[int, Field(ge=2)] = 8, interval: int = 1) -> None:
        if not 1 <= interval <= max_resource:
            what = f"interval {interval} does not lie between 1 and max_resource {max_resource}"
            raise UserError(what, where="scheduler", fix="give a shorter one, or a greater max_resource")
        self.max_resource: int = max_resource
        self._size, self._interval = population, interval
        self._number = -1  # of the population
        self._end = interval  # the step up to which this generation runs
        self._members: dict[int, int] = {}  # the latest trial of each member
        self._forks: dict[int, Fork] = {}  # of this generation, by member, which are still to be started
        self._target: dict[int, int] = {}  # the step up to which a trial runs
        self._arrived: dict[int, tuple[int, float]] = {}  # step and value of the trials that have come to it
        self._ended: dict[int, float | None] = {}

    def choose(self, can_start: bool = True) -> Start | Promote | None:
        if can_start and self._number >= 0 and self._end == self._interval and len(self._members) < self._size:
            member = next(member for member in range(self._size) if member not in self._members)
            return self._start(self._number, member, self._end)
        alive = [number for number in self._members.values() if number not in self._ended]
        end, forks = self._end, self._forks
        if not forks and all(number in self._arrived and self._target[number] == end for number in alive):
            if not alive or end >= self.max_resource:
                return self._start(self._number + 1, 0, self._interval) if can_start else None
            end, forks = min(end + self._interval, self.max_resource), self._exploits()
        # Before any parent continues, as its checkpoint would be a later one then.
        if forks and can_start:
            member, fork = next(iter(forks.items()))
            return self._start(self._number, member, end, fork)
        waiting = [number for number in alive if self._target[number] < end]
        return Promote(waiting[0], end) if waiting else None

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if resource is None or not notes.keys() >= {_POPULATION, _MEMBER}:
            return  # of another scheduler
        member = notes[_MEMBER]
        if notes[_POPULATION] != self._number:
            self._number, self._end = notes[_POPULATION], resource
            self._members, self._forks = {}, {}
        elif resource > self._end:
            self._forks, self._end = self._exploits(), resource
        if self._members.get(member) == number:
            self._forks = {}  # a parent may have gone on
        else:
            self._forks.pop(member, None)
        self._members[member] = number
        self._target[number] = resource
        self._arrived.pop(number, None)

    def report(self, number: int, step: int, value: float) -> Decision:
        if number in self._target:
            if step < self._target[number]:
                return Decision.CONTINUE
            self._arrived[number] = step, value
            if step < self.max_resource:
                return Decision.PAUSE
        return Decision.STOP if step >= self.max_resource else Decision.CONTINUE

    def ended(self, number: int, value: float | None) -> None:
        self._ended[number] = value
        self._forks = {member: fork for member, fork in self._forks.items() if fork.parent != number}

    def _start(self, population: int, member: int, end: int, fork: Fork | None = None) -> Start:
        return Start(end, {_POPULATION: population, _MEMBER: member}, fork)

    def _exploits(self) -> dict[int, Fork]:
        """Returns what the members that are replaced continue from, once all have come to the end of the generation."""
        failed = [member for member, number in self._members.items() if self._ended.get(number, 0.0) is None]
        ranked = sorted(
            (self._arrived[number][1], number, member)
            for member, number in self._members.items()
            if number not in self._ended and number in self._arrived
        )
        if not ranked:
            return {}
        count = min(max(1, int(len(ranked) * _QUANTILE)), len(ranked) // 2)
        poor = [member for *_, member in reversed(ranked[len(ranked) - count :])]
        parents = [number for _, number, _ in ranked[: max(1, count)]]
        return {
            member: Fork(parent, self._arrived[parent][0], self._members[member])
            for member, parent in zip([*failed, *poor], cycle(parents), strict=False)
        }
