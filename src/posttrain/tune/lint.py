"""Warnings about a search space: linear in place of logarithmic before a study, the best on an edge after it."""

from typing import Any

from posttrain.tune.parameters import Choice, Float, Int, Parameter, is_number
from posttrain.tune.space import Space
from posttrain.tune.spaces import READY
from posttrain.tune.trial import Trial

_LINEAR_RATIO = 100  # between the ends of a linear range, above which most draws lie in the last tenth

_LOGARITHMIC = frozenset(
    name for part in READY.values() for name, entry in part.entries.items() if isinstance(entry, Float) and entry.log
)
"""Keys of a training whose usual range is logarithmic: rates, weight decay, KL coefficients."""

_LOGARITHMIC_NAMES = frozenset({"lr", "learning_rate", "weight_decay", "kl", "kl_coefficient"})
"""The last part of names of which the same holds, also those of a function's own settings."""

_LOGARITHMIC_RATIO = 10  # between the ends of such a range, above which it should be logarithmic

_EDGE = 0.02  # share of a range that counts as its edge


def check_space(space: Space) -> list[str]:
    """Returns a warning for each linear range that should be logarithmic."""
    warnings = []
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


def check_edges(space: Space, best: Trial) -> list[str]:
    """Returns a warning for each number of the best trial that lies on an edge of its range.

    Ends at 0 and 1 are taken for natural limits, as of a share or a count, and are not reported. Choices of numbers
    have edges, too. Of two values each is an edge, which says nothing.
    """
    warnings = []
    for name, parameter in space.parameters.items():
        if name in best.drawn and (side := _edge(parameter, best.drawn[name])) is not None:
            value = best.drawn[name]
            what = f"the best `{name}`, {value:g}, is on the {side} edge of its range"
            warnings.append(f"{what}; widen it in a study that names this one in warm_start")
    return warnings


def _edge(parameter: Parameter, value: Any) -> str | None:
    """Returns the name of the edge that a value lies on; None if there is none."""
    if isinstance(parameter, Choice):
        if len(parameter.values) < 3 or not all(map(is_number, parameter.values)):
            return None
        low, high = min(parameter.values), max(parameter.values)
    else:
        assert isinstance(parameter, Float | Int), "the kinds of parameters are these"
        low, high = parameter.low, parameter.high
    if isinstance(parameter, Int) and high - low < 2:
        return None
    if isinstance(parameter, Float):
        share = parameter.to_unit(value)
        value = low if share <= _EDGE else high if share >= 1 - _EDGE else value
    if value in (0, 1):
        return None
    return "lower" if value == low else "upper" if value == high else None
