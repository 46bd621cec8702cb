"""Synchronous successive halving (Jamieson and Talwalkar 2015, arXiv:1502.07943): rungs are compared as a whole."""

from abc import abstractmethod
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.schedulers.rungs import Rung, rung_levels, warn_of_warmup

_BRACKET = "bracket"
"""The note of a trial with the number of its bracket."""


class Bracket:
    """One run of successive halving.

    Trials run to the step of the first rung and pause there. When all have arrived, the best are promoted to the next
    rung, and so on. One that failed is never promoted; one that came to its own end counts with its final value in all
    rungs.

    Args:
        rungs: of the bracket, from the first; the numbers of trials fall and the steps rise.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._rungs = list(rungs)
        self._members: list[dict[int, None]] = [{} for _ in rungs]
        self._values: list[dict[int, float]] = [{} for _ in rungs]
        self._ended: dict[int, float | None] = {}
        self._failed: set[int] = set()
        self._closed: dict[int, dict[int, None]] = {}  # trials that a rung gets, once one of them has been promoted
        # Value and trial of all that have arrived, so that a rung of thousands need not be sorted when it is complete.
        self._ranked: list[list[tuple[float, int]]] = [[] for _ in rungs]

    def started(self, number: int, resource: int | None) -> None:
        """Notes that a trial runs up to a rung's step."""
        for level, rung in enumerate(self._rungs):
            if rung.step == resource:
                if level and level not in self._closed:
                    # The rung below is complete, though the budget may have left it smaller than planned.
                    self._closed[level] = dict.fromkeys(self._best(level, self._entrants(level - 1)))
                    for entrant in self._closed[level]:
                        self._rank_ended(level, entrant)
                self._members[level][number] = None

    def report(self, number: int, step: int, value: float) -> Decision:
        """Notes a value; a trial pauses at the step of its rung, and stops at that of the last one."""
        level = max((at for at, members in enumerate(self._members) if number in members), default=0)
        if step < self._rungs[level].step:
            return Decision.CONTINUE
        if number not in self._values[level]:  # another scheduler may have continued it from here
            self._values[level][number] = value
            insort(self._ranked[level], (value, number))
        return Decision.PAUSE if level + 1 < len(self._rungs) else Decision.STOP

    def ended(self, number: int, value: float | None) -> None:
        """Notes that a trial has ended, with its final value, or None if it failed."""
        self._ended[number] = value
        if value is None:
            self._failed.add(number)
        for level, members in enumerate(self._members):
            if number in members or number in self._closed.get(level, ()):
                self._rank_ended(level, number)

    def choose(self, can_start: bool) -> tuple[Start | Promote | None, bool]:
        """Returns what a free worker does in this bracket, where a `Start` has no notes; and whether it is over."""
        if len(self._members[0]) < self._rungs[0].trials and not self._closed and can_start:
            return Start(self._rungs[0].step), False
        entrants: Collection[int] = self._members[0]
        for level, rung in enumerate(self._rungs):
            if level:
                entrants = self._closed[level] if level in self._closed else self._best(level, entrants)
            waiting = [number for number in entrants if not self._has_arrived(level, number)]
            for number in waiting:
                if number not in self._members[level]:
                    return Promote(number, rung.step), False
            if waiting:
                return None, False
        return None, True

    def _entrants(self, level: int) -> Collection[int]:
        return self._closed[level] if level else self._members[0]

    def _rank_ended(self, level: int, number: int) -> None:
        """Enters the final value of a trial that has ended before it came to a rung."""
        value = self._ended.get(number)
        if value is not None and number not in self._values[level]:
            insort(self._ranked[level], (value, number))

    def _has_arrived(self, level: int, number: int) -> bool:
        return number in self._values[level] or number in self._ended

    def _best(self, level: int, below: Collection[int]) -> list[int]:
        """Returns the trials that a rung gets from those of the rung below, the best first."""
        # The same share of a rung that the budget has left smaller.
        count = max(1, len(below) * self._rungs[level].trials // self._rungs[level - 1].trials)
        ranked = self._ranked[level - 1]
        if level > 1 and level - 1 not in self._closed:  # all that it would get have ended
            values = {number: self._values[level - 1].get(number, self._ended.get(number)) for number in below}
            ranked = sorted((value, number) for number, value in values.items() if value is not None)
        return list(islice((number for _, number in ranked if number not in self._failed), count))


class BracketScheduler(Scheduler):
    """Runs one bracket after another, each to its end; a subclass says which."""

    def __init__(self) -> None:
        self._brackets: list[Bracket] = []
        self._bracket_of: dict[int, Bracket] = {}

    @abstractmethod
    def rungs(self, number: int) -> list[Rung]:
        """Returns the rungs of a bracket, by its number from 0."""

    def choose(self, can_start: bool = True) -> Start | Promote | None:
        # Only the last: a bracket begins when the one before is over.
        number = len(self._brackets) - 1
        choice, over = self._brackets[-1].choose(can_start) if self._brackets else (None, True)
        if over:
            number += 1
            choice = Start(self.rungs(number)[0].step) if can_start else None
        return Start(choice.resource, {_BRACKET: number}) if isinstance(choice, Start) else choice

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        if _BRACKET not in notes:
            return  # of another scheduler
        while len(self._brackets) <= notes[_BRACKET]:
            self._brackets.append(Bracket(self.rungs(len(self._brackets))))
        self._bracket_of[number] = self._brackets[notes[_BRACKET]]
        self._bracket_of[number].started(number, resource)

    def report(self, number: int, step: int, value: float) -> Decision:
        if number not in self._bracket_of:
            return Decision.STOP if self.max_resource is not None and step >= self.max_resource else Decision.CONTINUE
        return self._bracket_of[number].report(number, step, value)

    def ended(self, number: int, value: float | None) -> None:
        if number in self._bracket_of:
            self._bracket_of[number].ended(number, value)


class SuccessiveHalving(BracketScheduler):
    """Starts so many trials that one comes to the last rung, and keeps the best 1/eta at each; then begins again.

    Args:
        max_resource: the step of the last rung, at which a trial is finished.
        min_resource: the least step of the first rung.
        eta: the factor between the steps of two rungs, and between their numbers of trials.

    Raises:
        UserError: the numbers leave no rungs.
    """

    def __init__(self, max_resource: int, min_resource: int = 1, eta: float = 3) -> None:
        super().__init__()
        steps = rung_levels(max_resource, min_resource, eta, "scheduler successive_halving")
        count = round(eta ** (len(steps) - 1))
        self.max_resource = max_resource
        self._rungs = [Rung(max(1, int(count // eta**level)), step) for level, step in enumerate(steps)]

    def spare_warmup(self, share: float) -> str:
        return warn_of_warmup([rung.step for rung in self._rungs], share)

    def rungs(self, number: int) -> list[Rung]:
        return self._rungs
