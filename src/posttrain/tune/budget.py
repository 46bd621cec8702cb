"""Budgets, such as ``50 trials``, ``1h 30m`` or ``2M tokens``, and what is left of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from posttrain.store.errors import UserError
from posttrain.tune.trial import Trial

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)(?:\s+(tokens?))?")

_SECONDS = {"s": 1, "sec": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600, "hours": 3600, "d": 86400}

_MULTIPLES = {"k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}

_EXAMPLE = "such as 50 trials, 30m, 2M tokens, or several with commas"


@dataclass(frozen=True)
class Budget:
    """The most that a study may spend; None has no limit.

    Attributes:
        trials: started.
        seconds: that the study is worked on, over all calls.
        tokens: processed by all trials.
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
            UserError: the text is no budget, or a part of it is nothing.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = f"{value} trials"
        parts = [part.strip() for part in str(value).split(",")] if value is not None else []
        budget = cls()
        for part in parts:
            budget = budget._with(part, where)
        if budget == cls():
            raise UserError("is no budget", where=where, fix=_EXAMPLE)
        return budget

    def _with(self, part: str, where: str) -> Self:
        wrong = UserError(f"`{part}` is no budget", where=where, fix=_EXAMPLE)
        matches = list(_PART.finditer(part))
        if not matches or _PART.sub("", part).strip():
            raise wrong
        amounts: dict[str, float] = {}
        for number, unit, tokens in (match.groups() for match in matches):
            amount = float(number)
            if unit in ("trial", "trials") and not tokens:
                name = "trials"
            elif unit in ("token", "tokens") or (tokens and unit in _MULTIPLES):
                name, amount = "tokens", amount * _MULTIPLES.get(unit, 1)
            elif unit in _SECONDS and not tokens:
                name, amount = "seconds", amount * _SECONDS[unit]
            else:
                raise wrong
            amounts[name] = amounts.get(name, 0) + amount
        if len(amounts) > 1 or any(getattr(self, name) is not None for name in amounts):
            raise UserError(f"`{part}` names two budgets in one", where=where, fix="put a comma between them")
        ((name, amount),) = amounts.items()
        if amount <= 0 or (name != "seconds" and amount != int(amount)):
            raise wrong
        if name == "seconds":
            return replace(self, seconds=amount)
        return replace(self, trials=int(amount)) if name == "trials" else replace(self, tokens=int(amount))

    def allows_start(self, trials: Sequence[Trial]) -> bool:
        """Returns whether another trial may be started."""
        return self.trials is None or len(trials) < self.trials

    def is_spent(self, seconds: float, tokens: int) -> bool:
        """Returns whether running trials must pause.

        Args:
            seconds, tokens: that the study has spent.
        """
        return (self.seconds is not None and seconds >= self.seconds) or (
            self.tokens is not None and tokens >= self.tokens
        )

    def left(self, trials: int, seconds: float, tokens: int) -> str:
        """Formats what is left, such as ``12 trials, 4m 10s left``."""
        parts = []
        if self.trials is not None:
            parts.append(f"{max(0, self.trials - trials):,} trials")
        if self.seconds is not None:
            parts.append(format_seconds(max(0.0, self.seconds - seconds)))
        if self.tokens is not None:
            parts.append(f"{max(0, self.tokens - tokens):,} tokens")
        return f"{', '.join(parts)} left"


def format_seconds(seconds: float) -> str:
    """Formats a duration, such as ``1h 5m``, ``4m 10s`` or ``0.3s``."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60)}s"
    return f"{minutes // 60}h {minutes % 60}m"
