"""Warnings about a search space: too large for its budget, linear in place of logarithmic, the best on an edge."""

import math
from collections.abc import Sequence
from typing import Any

from posttrain.tune.budget import Budget, count_trials
from posttrain.tune.parameters import Choice, Float, Int, Parameter, is_number
from posttrain.tune.space import Space
from posttrain.tune.spaces import READY
from posttrain.tune.trial import Trial, TrialState

_TRIALS_PER_PARAMETER = 10  # the rule n = 10 d for computer experiments (Loeppky, Sacks and Welch 2009)

_LINEAR_RATIO = 100  # between the ends of a linear range, above which most draws lie in the last tenth

_LOGARITHMIC = frozenset(
    name for part in READY.values() for name, entry in part.entries.items() if isinstance(entry, Float) and entry.log
)
"""Keys of a training whose usual range is logarithmic: rates, weight decay, KL coefficients."""

_LOGARITHMIC_NAMES = frozenset({"lr", "learning_rate", "weight_decay", "kl", "kl_coefficient"})
"""The last part of names of which the same holds, also those of a function's own settings."""

_LOGARITHMIC_RATIO = 10  # between the ends of such a range, above which it should be logarithmic

_FIRST = 5  # trials, whose costs say how many a budget holds

_EDGE = 0.02  # share of a range that counts as its edge


def check_space(space: Space, trials: int | None = None) -> list[str]:
    """Returns what is suspicious about a space before a study.

    Args:
        space: the space.
        trials: Trials that the budget allows; None where that is not known.
    """
    warnings = []
    if trials is not None and trials < wanted_trials(space):
        text = f"{count_trials(trials)} {'is' if trials == 1 else 'are'} few for {_few_for(space)}"
        warnings.append(f"{text}; fix some or narrow them")
    for name, parameter in space.parameters.items():
        if not isinstance(parameter, Float | Int) or parameter.log:
            continue
        low, high = parameter.low, parameter.high
        usually_log = name in _LOGARITHMIC or name.rpartition(".")[2] in _LOGARITHMIC_NAMES
        if 0 < _LINEAR_RATIO * low <= high or (usually_log and 0 <= _LOGARITHMIC_RATIO * low <= high):
            tenth = low + (high - low) / 10
            fix = "try `log: true`" if low > 0 else "try `log: true` with a lower end above 0"
            text = f"`{name}` from {low:g} to {high:g} is linear: of ten trials nine lie above {tenth:g}; {fix}"
            warnings.append(text)
    return warnings


class SizeCheck:
    """Compares a space with the number of trials that a budget of seconds, tokens or money holds.

    Called with all trials, it returns a warning once the costs of the first ones say that the budget holds too few, and
    None from then on. Where the number of trials is itself too small, `check_space` has said so.

    Args:
        space: what is searched.
        budget: of the study.
        workers: trials at a time.
    """

    def __init__(self, space: Space, budget: Budget, workers: int = 1) -> None:
        self._space, self._budget, self._workers = space, budget, workers
        self._wanted = wanted_trials(space)
        self._done = budget.trials is not None and budget.trials < self._wanted

    def __call__(self, trials: Sequence[Trial]) -> str | None:
        if self._done:
            return None
        # Settings that a limit refuses at once say nothing of the costs.
        known = [trial for trial in trials if trial.latest is not None and trial.state is not TrialState.RUNNING]
        if len(known) < _FIRST:
            return None
        self._done = True
        share = self._budget.share(known, self._workers)
        if len(known) >= share * self._wanted:
            return None
        count = count_trials(max(len(known), int(len(known) / share)))
        text = f"the budget holds about {count}, as the first {len(known)} cost: few for {_few_for(self._space)}"
        return f"{text}; fix some or narrow them"


def _few_for(space: Space) -> str:
    count = len(space.parameters)
    parameters = f"{count} parameter{'' if count == 1 else 's'}"
    return f"{parameters}, as a rule wants {wanted_trials(space)}"


def wanted_trials(space: Space) -> int:
    """Returns how many trials a space needs by rule: ten a parameter, or all of its points where they are fewer."""
    return int(min(_TRIALS_PER_PARAMETER * len(space.parameters), _points(space)))


def check_edges(space: Space, best: Trial) -> list[str]:
    """Returns the numbers of the best trial that lie on an edge of their range, with a wider range.

    Ends at 0 and 1 are taken for natural limits, as of a share or a count, and are not reported. Choices of numbers
    have edges, too, but no wider range: only the user knows what may follow. Of two values each is an edge, which says
    nothing.
    """
    warnings = []
    for name, parameter in space.parameters.items():
        if name not in best.drawn or (side := _edge(parameter, best.drawn[name])) is None:
            continue
        value = best.drawn[name]
        text = f"the best `{name}`, {value:g}, is on the {'lower' if side < 0 else 'upper'} edge of its range"
        if isinstance(parameter, Float | Int):
            low, high = _widened(parameter, side)
            text += f"; widen it to {low:g} to {high:g}, and go on with --migrate"
        else:
            text += "; add values beyond it"
        warnings.append(text)
    return warnings


def _edge(parameter: Parameter, value: Any) -> int | None:
    """Returns -1 for the lower edge, 1 for the upper one, None for neither."""
    if isinstance(parameter, Choice):
        if value in (0, 1) or len(parameter.values) < 3 or not all(map(is_number, parameter.values)):
            return None
        return -1 if value == min(parameter.values) else 1 if value == max(parameter.values) else None
    assert isinstance(parameter, Float | Int)
    if isinstance(parameter, Int):
        low, high = value == parameter.low, value == parameter.high
        if parameter.high - parameter.low < 2:
            return None
    else:
        share = parameter.to_unit(value)
        low, high = share <= _EDGE, share >= 1 - _EDGE
    if low and parameter.low not in (0, 1):
        return -1
    return 1 if high and parameter.high not in (0, 1) else None


def _widened(parameter: Float | Int, side: int) -> tuple[float, float]:
    """Returns the ends of a range that goes on for a factor of 10 if it is logarithmic, else for its own width.

    A real range within 0 to 1 is taken for that of a share, and stays within.
    """
    low, high = float(parameter.low), float(parameter.high)
    is_share = isinstance(parameter, Float) and not parameter.log and low >= 0 and high <= 1
    if side > 0:
        high = high * 10 if parameter.log else high + (high - low)
        high = min(high, 1.0) if is_share else high
    else:
        # A positive number stays one: its sign is hardly an accident.
        below = low - (high - low)
        low = low / 10 if parameter.log else max(below, low / 2) if low > 0 else below
    if isinstance(parameter, Int):
        return float(max(1, round(low)) if parameter.low > 0 else round(low)), float(round(high))
    return low, high


def _points(space: Space) -> float:
    """Returns the number of points of a space of integers and choices; infinite with real numbers."""
    sizes: list[float] = []
    for parameter in space.parameters.values():
        if isinstance(parameter, Choice):
            sizes.append(len(parameter.values))
        elif isinstance(parameter, Int):
            sizes.append(parameter.high - parameter.low + 1)
        else:
            return math.inf
    return math.prod(sizes)
