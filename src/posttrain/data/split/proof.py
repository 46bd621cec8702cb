"""How strictly a split is proven before a model learns from it: no setting of the step `decontaminate` loosens that."""

from dataclasses import dataclass

from posttrain.data.split import SplitsConfig
from posttrain.data.steps.decontaminate import Decontaminate

_NGRAM = 13
_STRICT = Decontaminate()


@dataclass(frozen=True)
class Proof:
    """What the proof looks for besides equal inputs and what was made of one record.

    Attributes:
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: words in a run that must not be shared.
        group: whether a shared group is a leak.
        fix: what the user can do about a leak.
    """

    threshold: float | None
    ngram: int
    group: bool
    fix: str

    @staticmethod
    def of(step: Decontaminate | None, splits: SplitsConfig | None) -> "Proof":
        """The stricter of what the recipe's step and its split are to keep apart; either may be absent."""
        asked = [step.threshold if step else None, splits.near_duplicates if splits else None]
        threshold = min((one for one in asked if one is not None), default=None)
        ngram = step.ngram if step and step.ngram is not None else _NGRAM
        group = splits is None or splits.group
        return Proof(threshold, ngram, group, _fix(step, threshold, ngram))

    @property
    def left_out(self) -> str | None:
        """What the settings have switched off, in words; None: nothing."""
        off = [] if self.group else ["shared groups (`splits.group` is false)"]
        off += [] if self.threshold is not None else ["near duplicates (no threshold is set)"]
        return " and ".join(off) or None


def _fix(step: Decontaminate | None, threshold: float | None, ngram: int) -> str:
    """The settings with which `decontaminate` takes all that the proof finds."""
    if step is None:
        return "the step `decontaminate` takes such records from training"
    wanted: dict[str, float] = {}
    if threshold is not None and (step.threshold is None or step.threshold > threshold):
        wanted["threshold"] = threshold
    if step.ngram is None:
        wanted["ngram"] = ngram
    if step.share > 0:
        wanted["share"] = 0
    if step.ignore_above is not None and step.ignore_above < (_STRICT.ignore_above or 0):
        wanted["ignore_above"] = _STRICT.ignore_above or 0
    if not wanted:
        return "`decontaminate` takes such records from training where the version is built again"
    said = ", ".join(f"{name}: {value:g}" for name, value in wanted.items())
    return f"`decontaminate: {{{said}}}` takes such records from training; its settings let them pass"
