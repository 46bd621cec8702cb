"""Budgets, such as ``50 trials``, ``1h 30m``, ``2M tokens``, ``2 gpu-hours`` or ``5 EUR``, and what is left of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple, Self

from posttrain.store.amounts import COUNTS
from posttrain.store.errors import UserError, suggest
from posttrain.tune.trial import Trial

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+(?:-[a-zA-Z]+)?)(?:\s+(tokens?))?")

_UNITS = {1: "s sec second seconds", 60: "m min minute minutes", 3600: "h hour hours", 86400: "d day days"}

_SECONDS = {unit: seconds for seconds, units in _UNITS.items() for unit in units.split()}

_MULTIPLES = {**COUNTS, "k": 10**3, "G": 10**9}  # a small m is a minute

_GPU_SECONDS = {f"gpu-{unit}": seconds for unit, seconds in _SECONDS.items()}

_CURRENCY = re.compile(r"[A-Z]{3}")

_GRACE = 0.1  # of a limit of time, that running trials get to report and pause when it is spent

_EXAMPLE = "such as 50 trials, 30m, 2M tokens, 2 gpu-hours, 5 EUR, or several with commas"


@dataclass(frozen=True)
class Price:
    """The price of an accelerator.

    Attributes:
        per_hour: of one accelerator.
        currency: three capital letters, such as ``EUR``.
    """

    per_hour: float
    currency: str


class Spent(NamedTuple):
    """Costs of a study so far.

    Attributes:
        seconds: Time of work on the study, over all sessions.
        tokens: Tokens of all trials.
        device_seconds: Time in which devices were in use, each counted once, however many trials share it.
    """

    seconds: float
    tokens: int
    device_seconds: float = 0.0


@dataclass(frozen=True)
class Budget:
    """The most that a study may spend; None has no limit.

    Attributes:
        trials: Trials that are started.
        seconds: Time of work on the study, over all sessions.
        tokens: Tokens that all trials process.
        gpu_seconds: Time in which devices are in use, in seconds, times ``accelerators``.
        money: The price of this time.
        price: The price of an accelerator; needed for money alone.
        accelerators: Accelerators of a device. A device is what one trial has: a GPU, or a machine without any. Trials
            that share a device count once.
    """

    trials: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    gpu_seconds: float | None = None
    money: float | None = None
    price: Price | None = None
    accelerators: int = 1

    @classmethod
    def read(cls, value: Any, where: str = "budget", price: Price | None = None, accelerators: int = 1) -> Self:
        """Reads a budget.

        Args:
            value: a text, a number of trials, or a budget as it is.
            where: the key, named in errors.
            price: of an accelerator, for a budget in money.
            accelerators: Accelerators that one trial uses.

        Raises:
            UserError: the text is no budget, a part of it is nothing, or its currency is not that of the price.
        """
        if isinstance(value, cls):
            if value.money is not None and (price or value.price) is None:
                raise UserError("money is spent at a price, and there is none", where=where, fix="give a price")
            if price is None and accelerators == 1:
                return value
            return replace(value, price=price or value.price, accelerators=accelerators)
        if isinstance(value, int) and not isinstance(value, bool):
            value = f"{value} trials"
        parts = [part.strip() for part in str(value).split(",")] if value is not None else []
        empty = budget = cls(price=price, accelerators=accelerators)
        for part in parts:
            budget = budget._with(part, where)
        if budget == empty:
            raise UserError("is no budget", where=where, fix=_EXAMPLE)
        return budget

    def _with(self, part: str, where: str) -> Self:
        wrong = UserError(f"`{part}` is no budget", where=where, fix=_EXAMPLE)
        matches = list(_PART.finditer(part))
        if not matches or _PART.sub("", part).strip():
            raise wrong
        amounts: dict[str, float] = {}
        for number, unit, tokens in (match.groups() for match in matches):
            factor = 1
            if unit in ("trial", "trials") and not tokens:
                name = "trials"
            elif unit in ("token", "tokens") or (tokens and unit in _MULTIPLES):
                name, factor = "tokens", _MULTIPLES.get(unit, 1)
            elif unit in _SECONDS and not tokens:
                name, factor = "seconds", _SECONDS[unit]
            elif unit.lower() in _GPU_SECONDS and not tokens:
                name, factor = "gpu_seconds", _GPU_SECONDS[unit.lower()]
            elif _CURRENCY.fullmatch(unit) and not tokens:
                self._check_currency(unit, where)
                name = "money"
            else:
                raise wrong
            amounts[name] = amounts.get(name, 0) + float(Decimal(number) * factor)  # 2.01M is a whole number
        if repeated := [name for name in amounts if getattr(self, name) is not None]:
            kind = repeated[0].replace("_", " ")
            raise UserError(f"`{part}` is a second limit of {kind}", where=where, fix="give one of each kind")
        if len(amounts) > 1:
            raise UserError(f"`{part}` names two budgets in one", where=where, fix="put a comma between them")
        ((name, amount),) = amounts.items()
        whole = name in ("trials", "tokens")
        if amount <= 0 or (whole and amount != int(amount)):
            raise wrong
        limits: dict[str, Any] = {name: int(amount) if whole else amount}
        return replace(self, **limits)

    def _check_currency(self, currency: str, where: str) -> None:
        example = f"price: {{per_hour: 2.5, currency: {currency}}}"
        if self.price is None:
            raise UserError(f"{currency} is spent at a price, and there is none", where=where, fix=f"give {example}")
        if self.price.currency != currency:
            what = f"is in {currency}, and the price in {self.price.currency}"
            raise UserError(what, where=where, fix=f"give {example}, or the budget in {self.price.currency}")

    def allows_start(self, trials: Sequence[Trial]) -> bool:
        """Returns whether another trial may be started."""
        return self.trials is None or len(trials) < self.trials

    def is_spent(self, spent: Spent) -> bool:
        """Returns whether running trials must pause."""
        return any(amount >= limit for limit, amount in self._amounts(spent))

    def time_left(self, spent: Spent, devices: int) -> float:
        """Returns the seconds after which runs are ended, as a limit of time is exceeded by a tenth; 0 or less: now.

        Args:
            spent: so far.
            devices: Devices that are in use until then.
        """
        rates = [rate for _, rate in self._amounts(Spent(1.0, 0, devices))]  # of tokens none is known
        pairs = zip(self._amounts(spent), rates, strict=True)
        return min(
            ((limit * (1 + _GRACE) - amount) / rate for (limit, amount), rate in pairs if rate > 0), default=math.inf
        )

    def seconds_to_go(self, trials: int, spent: Spent) -> float | None:
        """Returns an estimate of the seconds until a limit is reached, if it goes on as so far; None without one.

        Args:
            trials: Trials that have been run.
            spent: by them.
        """
        amounts = [*self._amounts(spent), *([(self.trials, trials)] if self.trials is not None else [])]
        shares = [amount / limit for limit, amount in amounts]
        share = max(shares, default=0.0)
        return spent.seconds * max(0.0, 1 / share - 1) if share > 0 else None

    def _amounts(self, spent: Spent) -> list[tuple[float, float]]:
        """Returns each limit but that of the trials, and what is spent of it."""
        gpu_seconds = spent.device_seconds * self.accelerators
        price = self.price.per_hour if self.price else 0.0
        amounts = [
            (self.seconds, spent.seconds),
            (self.tokens, spent.tokens),
            (self.gpu_seconds, gpu_seconds),
            (self.money, gpu_seconds / 3600 * price),
        ]
        return [(limit, amount) for limit, amount in amounts if limit is not None]

    def share(self, trials: Sequence[Trial], workers: int = 1, devices: int | None = None) -> float:
        """Returns the share that trials have spent, by the limit that is nearest; 0 without a limit.

        Args:
            trials: the trials.
            workers: trials at a time, which share the seconds.
            devices: Devices that they share; None: each has its own.
        """
        seconds = sum(trial.seconds for trial in trials) / workers
        device_seconds = seconds * (workers if devices is None else min(workers, devices))
        amounts = self._amounts(Spent(seconds, sum(trial.tokens for trial in trials), device_seconds))
        amounts += [(self.trials, len(trials))] if self.trials is not None else []
        return max((amount / limit for limit, amount in amounts), default=0.0)

    def left(self, trials: int, spent: Spent) -> str:
        """Formats what is left, such as ``12 trials, 4m 10s left``."""
        parts = []
        if self.trials is not None:
            parts.append(count_trials(max(0, self.trials - trials)))
        if self.seconds is not None:
            parts.append(format_seconds(max(0.0, self.seconds - spent.seconds)))
        if self.tokens is not None:
            parts.append(f"{max(0, self.tokens - spent.tokens):,} tokens")
        gpu_seconds = spent.device_seconds * self.accelerators
        if self.gpu_seconds is not None:
            parts.append(f"{max(0.0, self.gpu_seconds - gpu_seconds) / 3600:.2f} gpu-hours")
        if self.money is not None and self.price is not None:
            left = max(0.0, self.money - gpu_seconds / 3600 * self.price.per_hour)
            parts.append(f"{left:.2f} {self.price.currency}")
        return f"{', '.join(parts)} left"


@dataclass(frozen=True)
class Gain:
    """The least gain that is worth a trial.

    Attributes:
        amount: of the value, or a share of the best value.
        relative: whether it is a share.
        text: as it was given.
    """

    amount: float
    relative: bool
    text: str

    def threshold(self, best: float) -> float:
        """Returns it as a difference of values."""
        return self.amount * abs(best) if self.relative else self.amount


def read_gain(value: Any, where: str = "stop") -> Gain:
    """Reads ``{gain: 0.1%}`` or ``{gain: 0.002}``.

    Raises:
        UserError: the value is something else, or no positive gain.
    """
    if not isinstance(value, Mapping) or set(value) != {"gain"}:
        unknown = [str(key) for key in value if key != "gain"] if isinstance(value, Mapping) else []
        fix = (suggest(unknown[0], ["gain"]) if unknown else None) or "give {gain: 0.1%}"
        raise UserError(f"{value!r} is no rule to stop by", where=where, fix=fix)
    text = str(value["gain"]).strip()
    relative = text.endswith("%")
    try:
        amount = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise UserError(f"`{text}` is no gain", where=f"{where}.gain", fix="give 0.1%, or a difference of values")
    return Gain(amount, relative, text)


def count_trials(count: int) -> str:
    """Formats a number of trials, such as ``1 trial`` or ``1,200 trials``."""
    return f"{count:,} trial{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Formats a duration, such as ``1h 5m``, ``4m 10s`` or ``0.3s``."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60)}s"
    return f"{minutes // 60}h {minutes % 60}m"
