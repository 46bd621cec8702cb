"""Estimates what a warm start saved: trials and work until most of the gain was there, against the source studies."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from posttrain.tune.losses import comparable_values
from posttrain.tune.transfer.past import PastStudy
from posttrain.tune.transfer.warm_start import WARM_START_FILE, read_warm_start
from posttrain.tune.trial import Trial
from posttrain.tune.versions import Goal

_LEAST = 5  # trials with comparable values, of both

_SHARE = 0.99  # of the gain


@dataclass(frozen=True)
class Savings:
    """Trials that a study took, and those that its sources took.

    A study's gain is the difference of the median and the best of its first ``compared`` trials with a value. Counted
    are the trials until 99% of it: within 1% of the best. Better trials from the start narrow the gain, so that
    the same share asks for more: the estimate is rather low. It compares searches over different data, one of each.

    Attributes:
        compared: trials that were looked at of each study, as many as the shortest has.
        trials: Trials that this study took; ``seconds`` of them.
        source_trials: Trials that the sources took, the median; ``source_seconds`` of them.
        sources: number of sources; only those that started cold, where there are any.
    """

    compared: int
    trials: int
    seconds: float
    source_trials: float
    source_seconds: float
    sources: int

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, and the trials that were saved."""
        return {**asdict(self), "saved_trials": self.source_trials - self.trials}

    @property
    def sentence(self) -> str:
        """Says what was saved."""
        studies = "the study it started from" if self.sources == 1 else f"the {self.sources} studies it started from"
        took = f"of its first {self.compared} trials it took {self.trials} to come within 1% of the best"
        others = f"{studies} took {self.source_trials:g}"
        saved = self.source_trials - self.trials
        what = f"the warm start saved about {saved:g}" if saved > 0 else "the warm start saved nothing"
        return f"{took}, {others}: {what}, by this one comparison"


def estimate_savings(goal: Goal, trials: Sequence[Trial], sources: Sequence[PastStudy]) -> Savings | None:
    """Returns the estimate; None where there are too few trials to compare."""
    sign = -1.0 if goal.maximize else 1.0
    values = comparable_values(goal.space, trials).values
    losses = {number: sign * value for number, value in sorted(values.items())}
    cold = [source for source in sources if not source.warm] or sources
    others = [(source.losses(), source.trials) for source in cold]
    others = [(known, of) for known, of in others if len(known) >= _LEAST]
    if len(losses) < _LEAST or not others:
        return None
    compared = min(len(losses), *(len(known) for known, _ in others))
    own, rest = _until_gain(losses, trials, compared), [_until_gain(known, of, compared) for known, of in others]
    return Savings(compared, *own, median(count for count, _ in rest), median(time for _, time in rest), len(rest))


def describe_warm_start(folder: Path, goal: Goal, trials: Sequence[Trial]) -> tuple[list[str], Savings | None]:
    """Returns how the study in a folder was started, in sentences, and what that saved."""
    if not (folder / WARM_START_FILE).is_file():
        return [], None
    warm_start = read_warm_start(folder / WARM_START_FILE)
    return list(warm_start.sentences), estimate_savings(goal, trials, warm_start.sources)


def _until_gain(losses: Mapping[int, float], trials: Sequence[Trial], compared: int) -> tuple[int, float]:
    """Returns the number of trials until the share of the gain, and their seconds."""
    first = list(losses.items())[:compared]
    best, middle = min(loss for _, loss in first), median(loss for _, loss in first)
    goal = best + (1 - _SHARE) * (middle - best)
    count = next(index for index, (_, loss) in enumerate(first, 1) if loss <= goal)
    return count, sum(trials[number].seconds for number, _ in first[:count])
