"""Chooses the confidence from which a model's answers are accepted, so that their error stays under a bound.

The threshold is chosen on held-out answers: predictions of records that have a label of people, by a model that did not
learn from them. Every threshold of a fixed list is a hypothesis, "the error of what it accepts is above the bound",
tested by an exact binomial bound; they are tested one after the other from the strictest, up to the first that cannot
be rejected. So the error of the chosen one exceeds the bound with a probability of at most 1 - level, however many
thresholds there are.

Sources: A. N. Angelopoulos et al., Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control, 2021
(arXiv:2110.01052), section 2.2 for fixed-sequence testing; S. Bates et al., Distribution-Free, Risk-Controlling
Prediction Sets, JACM 2021 (arXiv:2101.02703); C. J. Clopper and E. S. Pearson, The Use of Confidence or Fiducial Limits
Illustrated in the Case of the Binomial, Biometrika 26 (1934).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.models.binomial import LEVEL, THRESHOLDS, lower_limit, needed_answers, shows_error_below, upper_limit

CHECKED_SHARE = 0.1
"""Share of accepted suggestions that people answer all the same, without seeing them."""

_SPARE_ERRORS = 2  # that the first test should survive, or one slip of an annotator would end it all

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Acceptance:
    """The threshold from which answers are accepted, and what it rests on.

    Attributes:
        threshold: an answer is accepted at this confidence or more; None: none is.
        bound: the error that accepted answers may have.
        held_out: held-out answers in all.
        answers: those at the threshold or above, of which ``errors`` were wrong; of the test that failed where nothing
            is accepted.
        upper: the limit of their error, at `LEVEL`; None where there was nothing to test.
        why: one sentence for people.
    """

    threshold: float | None
    bound: float
    held_out: int
    answers: int = 0
    errors: int = 0
    upper: float | None = None
    why: str = ""

    def accepts(self, confidence: Floats) -> Mask:
        """Returns which answers are accepted, bool [N]."""
        if self.threshold is None:
            return np.zeros(len(confidence), bool)
        return np.asarray(confidence, np.float64) >= self.threshold

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)


def choose_threshold(
    confidence: Floats, right: Mask, bound: float, *, checked: tuple[Floats, Mask] | None = None
) -> Acceptance:
    """Chooses the lowest threshold whose accepted answers surely have an error of at most ``bound``.

    Answers that people gave to accepted items in earlier rounds may contradict it: a threshold at which their error is
    surely above the bound is raised to the next one that they do not contradict.

    Args:
        confidence: float [N] of held-out answers.
        right: bool [N], whether they agree with people.
        bound: between 0 and 1.
        checked: confidences and agreement of answers that were accepted and checked.
    """
    held_out = len(confidence)
    counts = [int((confidence >= threshold).sum()) for threshold in THRESHOLDS]
    fewest = needed_answers(bound)
    # Where the sequence begins depends on the confidences alone, not on what is wrong, and so costs no validity.
    start = next((at for at, count in enumerate(counts) if count >= needed_answers(bound, _SPARE_ERRORS)), None)
    if start is None:
        start = next((at for at, count in enumerate(counts) if count >= fewest), None)
    if start is None:
        why = f"{held_out} held-out answers are too few: {fewest} without an error would show {bound:.1%}"
        return Acceptance(None, bound, held_out, max(counts, default=0), why=f"nothing is accepted: {why}")
    passed: list[Acceptance] = []
    failed: Acceptance | None = None
    for threshold, answers in zip(THRESHOLDS[start:], counts[start:], strict=True):
        # A threshold that accepts no more than the one before says nothing about answers between the two.
        if passed and answers == passed[-1].answers:
            continue
        errors = int((~right[confidence >= threshold]).sum())
        upper = upper_limit(errors, answers, 1 - LEVEL)
        why = f"of {answers} held-out answers at a confidence of {threshold:g} or more, {errors} are wrong"
        tested = Acceptance(threshold, bound, held_out, answers, errors, upper, f"{why}: at most {upper:.1%}")
        if not shows_error_below(errors, answers, bound):
            failed = tested
            break
        passed.append(tested)
    if not passed:
        assert failed is not None, "the first threshold passes or fails"
        why = f"nothing is accepted: {failed.why}, and {bound:.1%} is allowed"
        return Acceptance(None, bound, held_out, failed.answers, failed.errors, failed.upper, why)
    return _lowest_unrefuted(passed, checked)


def _lowest_unrefuted(passed: list[Acceptance], checked: tuple[Floats, Mask] | None) -> Acceptance:
    """Returns the lowest threshold that checks do not contradict; none where they contradict all.

    Args:
        passed: thresholds that the held-out answers allow, the strictest first.
    """
    lowest = passed[-1]
    if checked is None or not len(checked[0]):
        return lowest
    confidence, right = checked
    for tested in reversed(passed):
        accepted = confidence >= float(tested.threshold or 0)
        wrong, count = int((accepted & ~right).sum()), int(accepted.sum())
        if lower_limit(wrong, count, 1 - LEVEL) <= tested.bound:
            if tested is lowest:
                return tested
            note = f"raised from {lowest.threshold:g}, as checks of what was accepted contradict it"
            return Acceptance(**{**asdict(tested), "why": f"{tested.why}; {note}"})
    wrong, count = int((~right).sum()), len(right)
    why = (
        f"nothing is accepted: people found {wrong} of {count} checked answers wrong, and {lowest.bound:.1%} is allowed"
    )
    return Acceptance(None, lowest.bound, lowest.held_out, lowest.answers, lowest.errors, lowest.upper, why)


def draw_checks(accepted: Mask, share: float, seed: int) -> Mask:
    """Draws the accepted answers that people check all the same, bool [N]: a share of them, at least one.

    Args:
        accepted: bool [N].
        share: from 0, which draws none, to 1.
        seed: fixes the draw.
    """
    rows = np.flatnonzero(accepted)
    size = min(len(rows), max(1, round(share * len(rows)))) if share else 0
    drawn = np.zeros(len(accepted), bool)
    drawn[np.random.default_rng(seed).permutation(rows)[:size]] = True
    return drawn
