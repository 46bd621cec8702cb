"""Multi-objective asynchronous successive halving (MO-ASHA; Schmucker et al. 2021, arXiv:2106.12639)."""

from collections.abc import Sequence
from typing import ClassVar

from posttrain.tune.pareto import Fronts
from posttrain.tune.schedulers.asha import Asha, AshaRung


class MoAsha(Asha):
    """Promotes as `Asha` does, where the best 1/eta of a rung are those of several objectives.

    The trials of a rung are sorted into fronts. The best 1/eta are the first fronts, and of the front that is too large
    for what is left as many as fit, by a greedy ε-net (`posttrain.tune.pareto.farthest`). The net goes on from the
    trials of the front that were promoted before: begun anew with each report it would be another one each time, and
    far more than 1/eta would be promoted. With one objective this is ASHA.

    The arguments and the errors are those of `Asha`.
    """

    several_objectives: ClassVar[bool] = True
    _name: ClassVar[str] = "moasha"

    def _make_rung(self) -> AshaRung:
        return _ParetoRung()


class _ParetoRung:
    """The trials of a rung in fronts, and those that may be promoted."""

    def __init__(self) -> None:
        self._fronts = Fronts()
        self._waiting: set[int] = set()
        self._answer: tuple[float, int | None] | None = None  # of the last question, until something changes

    def add(self, number: int, values: Sequence[float]) -> None:
        self._fronts.add(number, values)
        self._waiting.add(number)
        self._answer = None

    def remove(self, number: int) -> None:
        self._waiting.discard(number)
        self._answer = None

    def promotable(self, eta: float) -> int | None:
        # Asked for each rung whenever a worker is free, while a report changes one.
        if self._answer is None or self._answer[0] != eta:
            self._answer = eta, self._next(int(len(self._fronts) // eta))
        return self._answer[1]

    def _next(self, count: int) -> int | None:
        """Returns the trial to promote if the best ``count`` are to be; None if no more are."""
        for level, members in enumerate(self._fronts.members):
            taken = {number for number in members if number not in self._waiting}
            if len(taken) < min(count, len(members)):
                return self._fronts.farthest(level, taken)
            count -= len(members)
            if count <= 0:
                break
        return None
