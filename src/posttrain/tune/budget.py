"""Budgets, such as ``50 trials``, ``1h 30m`` or ``2M tokens``, and what is left of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple, Self

from posttrain.store.amounts import COUNTS
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.tune.trial import Trial

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+(?:\s+tokens?)?)")

_SECONDS = {1: "s sec second seconds", 60: "m min minute minutes", 3600: "h hour hours", 86400: "d day days"}

_MULTIPLES = {"": 1, **COUNTS, "k": 10**3, "G": 10**9}  # a small m is a minute

_UNITS = {
    **dict.fromkeys(("trial", "trials"), ("trials", 1)),
    **{unit: ("seconds", seconds) for seconds, units in _SECONDS.items() for unit in units.split()},
    **{
        f"{multiple} {unit}".strip(): ("tokens", count)
        for multiple, count in _MULTIPLES.items()
        for unit in ("token", "tokens")
    },
}
"""The limit and the factor of each unit."""

_GRACE = 0.1  # of a limit of time, that running trials get to report and pause when it is spent

_EXAMPLE = "such as 50 trials, 30m, 2M tokens, or several with commas"


class Spent(NamedTuple):
    """Costs of a study so far.

    Attributes:
        seconds: Time of work on the study, over all sessions.
        tokens: Tokens of all trials.
    """

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Budget:
    """The most that a study may spend; None has no limit.

    Attributes:
        trials: Trials that are started.
        seconds: Time of work on the study, over all sessions.
        tokens: Tokens that all trials process.
    """

    trials: int | None = None
    seconds: float | None = None
    tokens: int | None = None

    @classmethod
    def read(cls, value: Any, where: str = "budget") -> Self:
        """Reads a budget.

        Args:
            value: a text, a number of trials, or a budget as it is.
            where: the key, named in errors.

        Raises:
            UserError: the text is not a budget, or a part of it is nothing.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = counted(value, "trial")
        parts = [part.strip() for part in str(value).split(",")] if value is not None else []
        budget = cls()
        for part in parts:
            budget = budget._with(part, where)
        if budget == cls():
            raise UserError("is not a budget", where=where, fix=_EXAMPLE)
        return budget

    def _with(self, part: str, where: str) -> Self:
        wrong = UserError(f"`{part}` is not a budget", where=where, fix=_EXAMPLE)
        amounts: dict[str, float] = {}
        for number, words in _PART.findall(part):
            unit = " ".join(words.split())
            if unit not in _UNITS:
                raise wrong
            name, factor = _UNITS[unit]
            amounts[name] = amounts.get(name, 0) + float(Decimal(number) * factor)  # 2.01M is a whole number
        if not amounts or _PART.sub("", part).strip():
            raise wrong
        if repeated := [name for name in amounts if getattr(self, name) is not None]:
            raise UserError(f"`{part}` is a second limit of {repeated[0]}", where=where, fix="give one of each kind")
        if len(amounts) > 1:
            raise UserError(f"`{part}` names two budgets in one", where=where, fix="put a comma between them")
        ((name, amount),) = amounts.items()
        whole = name in ("trials", "tokens")
        if amount <= 0 or (whole and amount != int(amount)):
            raise wrong
        limits: dict[str, Any] = {name: int(amount) if whole else amount}
        return replace(self, **limits)

    def allows_start(self, trials: Sequence[Trial]) -> bool:
        """Returns whether another trial may be started."""
        return self.trials is None or len(trials) < self.trials

    def is_spent(self, spent: Spent) -> bool:
        """Returns whether running trials must pause."""
        return any(amount >= limit for limit, amount in self._amounts(spent))

    def time_left(self, seconds: float) -> float:
        """Returns the seconds after which runs are ended, as the limit of time is exceeded by a tenth; 0 or less: now.

        Args:
            seconds: spent so far.
        """
        return math.inf if self.seconds is None else self.seconds * (1 + _GRACE) - seconds

    def seconds_to_go(self, trials: int, spent: Spent) -> float | None:
        """Returns an estimate of the seconds until a limit is reached, at the pace so far; None without one.

        Args:
            trials: Trials that have been run.
            spent: by them.
        """
        amounts = [*self._amounts(spent), *([(self.trials, trials)] if self.trials is not None else [])]
        share = max((amount / limit for limit, amount in amounts), default=0.0)
        return spent.seconds * max(0.0, 1 / share - 1) if share > 0 else None

    def _amounts(self, spent: Spent) -> list[tuple[float, float]]:
        """Returns each limit but that of the trials, and what is spent of it."""
        amounts = [(self.seconds, spent.seconds), (self.tokens, spent.tokens)]
        return [(limit, amount) for limit, amount in amounts if limit is not None]

    def left(self, trials: int, spent: Spent) -> str:
        """Formats what is left, such as ``12 trials, 4m 10s left``."""
        parts = []
        if self.trials is not None:
            parts.append(counted(max(0, self.trials - trials), "trial"))
        if self.seconds is not None:
            parts.append(format_seconds(max(0.0, self.seconds - spent.seconds)))
        if self.tokens is not None:
            parts.append(counted(max(0, self.tokens - spent.tokens), "token"))
        return f"{', '.join(parts)} left"


def format_seconds(seconds: float) -> str:
    """Formats a duration, such as ``1h 5m``, ``4m 10s`` or ``0.3s``."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60)}s"
    return f"{minutes // 60}h {minutes % 60}m"
