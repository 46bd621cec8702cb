"""When labelling more has stopped to pay."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from posttrain.select.expected_gain import ExpectedGain
from posttrain.store.section import Section


class StopConfig(Section):
    """When labelling more has stopped to pay, and what follows."""

    action: Literal["advise", "stop"] = Field(
        default="advise", description="Say so in the log and the report, or turn no further round."
    )
    gain: float = Field(
        default=0.005,
        ge=0,
        description="It has where the next batch can bring so little at best, by all learning curves that fit.",
    )
    agreement: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="It has where successive champions agree so well on the pool (Cohen's kappa), on the mean of ...",
    )
    rounds: int = Field(default=3, ge=1, description="... so many rounds.")


@dataclass(frozen=True)
class Outlook:
    """What is to be expected of the next batch.

    Attributes:
        metric: the main suite's, as the mean of the records' scores.
        labels: in the batch.
        expected: None while too little is known.
        agreements: Cohen's kappa of successive champions on the pool, oldest first.
        why: why labelling more has stopped to pay; None where it may still.
        unknown: why nothing is expected where that is not for want of rounds.
    """

    metric: str
    labels: int
    expected: ExpectedGain | None
    agreements: tuple[float, ...]
    why: str | None
    unknown: str = ""

    @property
    def sentence(self) -> str:
        """The estimate in words."""
        if self.expected is None:
            return f"{self.unknown or 'too few rounds'}: what {self.labels} labels will bring is not known"
        one = self.expected
        return (
            f"{self.labels} labels are expected to bring {one.gain:+.3f} {self.metric} "
            f"({one.level:.0%} interval {one.low:+.3f} to {one.high:+.3f})"
        )


def outlook(
    config: StopConfig,
    metric: str,
    labels: int,
    expected: ExpectedGain | None,
    agreements: Sequence[float],
    unknown: str = "",
) -> Outlook:
    """Judge whether a further batch pays.

    The agreement of successive models on records that nobody has labelled is the rule of M. Bloodgood and
    K. Vijay-Shanker, A Method for Stopping Active Learning Based on Stabilizing Predictions (CoNLL 2009).

    Args:
        config: the config section ``select.stop``.
        metric: what the gain is in.
        labels: of the next batch.
        expected: what they bring.
        agreements: of successive champions, oldest first.
        unknown: why nothing is expected, where that is not for want of rounds.
    """
    reasons = []
    if expected is not None and expected.hope < config.gain:
        reasons.append(f"{labels} labels can hardly bring {config.gain:g} {metric} (at best {expected.hope:+.4f})")
    latest = list(agreements)[-config.rounds :]
    if len(latest) == config.rounds and (mean := sum(latest) / len(latest)) >= config.agreement:
        reasons.append(f"the last {config.rounds} champions answer the pool alike (kappa {mean:.3f})")
    return Outlook(metric, labels, expected, tuple(agreements), "; ".join(reasons) or None, unknown)


def kappa(before: Mapping[str, str], now: Mapping[str, str]) -> float | None:
    """Cohen's kappa of two models' answers, by record, on the records that both have answered; None for fewer than two.

    J. Cohen, A Coefficient of Agreement for Nominal Scales (1960): (p - e) / (1 - e), with p the share of records that
    are answered alike and e what it would be by chance. 1 where both give one and the same answer to all.
    """
    both = sorted(before.keys() & now.keys())
    if len(both) < 2:
        return None
    alike = sum(before[id] == now[id] for id in both) / len(both)
    ours, theirs = (Counter(side[id] for id in both) for side in (now, before))
    chance = sum(count * theirs[answer] for answer, count in ours.items()) / len(both) ** 2
    return 1.0 if chance == 1.0 else (alike - chance) / (1 - chance)
