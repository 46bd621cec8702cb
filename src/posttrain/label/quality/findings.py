"""Findings about annotators, and the statistics that several measures share.

Sources: E. B. Wilson (JASA 22, 1927), intervals of shares; R. A. Fisher, exact test of two shares; S. Holm, A Simple
Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special

from posttrain.label.answers import Floats


@dataclass(frozen=True)
class Finding:
    """A fault of an annotator, with its evidence.

    Attributes:
        kind: ``suggestion_bias``, ``position_bias``, ``speed``, ``one_answer``, ``random_answers`` or ``new_errors``.
        annotators: Names.
        value: The measured value.
        threshold: The value from which on it would be reported, if the evidence suffices.
        evidence: Number of answers, items or outcomes that it is measured on.
        p_value: Probability of as much under an honest annotator, before `holm`.
        sentence: The finding in one plain sentence.
    """

    kind: str
    annotators: tuple[str, ...]
    value: float
    threshold: float
    evidence: int
    p_value: float
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return {**asdict(self), "annotators": list(self.annotators)}


@dataclass(frozen=True)
class Rate:
    """A share with Wilson's interval; NaN where nothing was counted.

    Attributes:
        count: Number of successes.
        n: Number of trials.
        value: ``count / n``.
        low: Lower end.
        high: Upper end.
    """

    count: int
    n: int
    value: float
    low: float
    high: float


def wilson(count: int, n: int, coverage: float = 0.95) -> Rate:
    """Computes a share and Wilson's score interval."""
    if n == 0:
        return Rate(0, 0, np.nan, np.nan, np.nan)
    z = float(special.ndtri((1 + coverage) / 2))
    share, scale = count / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    half = z / scale * float(np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)))
    return Rate(count, n, share, max(0.0, center - half), min(1.0, center + half))


def share_exceeds(count: int, n: int, other_count: int, other_n: int) -> float:
    """Returns the p-value of Fisher's exact test that the first share is greater than the second; 1 without data."""
    if not n or not other_n:
        return 1.0
    table = [[count, n - count], [other_count, other_n - other_count]]
    # Only here: scipy's statistics take longer to import than all else that a server needs.
    from scipy import stats

    return float(stats.fisher_exact(table, alternative="greater").pvalue)


def count_exceeds(count: int, n: int, share: float) -> float:
    """Returns the probability of at least ``count`` of ``n`` where each has the probability ``share``."""
    from scipy import stats

    return float(stats.binom.sf(count - 1, n, min(max(share, 0.0), 1.0))) if n else 1.0


def holm(findings: Iterable[Finding], rate: float, tests: int) -> list[Finding]:
    """Returns the findings that hold while the chance of any false one among all tests is at most ``rate``.

    Args:
        findings: Candidates, with their p-values.
        rate: Family-wise error rate.
        tests: Number of tests that were made, also those without a candidate.
    """
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: finding.p_value):
        if finding.p_value > rate / max(tests - len(kept), 1):
            break
        kept.append(finding)
    return kept


@dataclass(frozen=True)
class Shift:
    """Two distributions of counts compared.

    Attributes:
        psi: Population stability index, sum of (p - q) log(p / q), over the categories that are frequent enough.
        p_value: Of the index under equal distributions.
        largest: The category whose share changed most, with its shares; None for fewer than two categories.
    """

    psi: float
    p_value: float
    largest: tuple[str, float, float] | None


def compare_counts(before: Sequence[float], after: Sequence[float], names: Sequence[str]) -> Shift:
    """Compares two count vectors by the population stability index.

    Under equal distributions the index times 1 / (1/n + 1/m) follows a chi-squared distribution with one degree of
    freedom less than there are categories (B. Yurdakul and J. Naranjo, Journal of Risk Model Validation 14, 2020).

    Args:
        before: Counts of the reference, such as the pool's.
        after: Counts of the sample that is judged.
        names: Names of the categories, in the order of both.
    """
    old, new = np.asarray(before, np.float64), np.asarray(after, np.float64)
    n, m = old.sum(), new.sum()
    if not n or not m:
        return Shift(np.nan, 1.0, None)
    # Categories expected fewer than 5 times in the smaller sample are counted together: the distribution is one of
    # large counts.
    frequent = (old + new) / (n + m) * min(n, m) >= 5
    p, q, kept = _merged(old, frequent), _merged(new, frequent), int(frequent.sum()) + int((~frequent).any())
    if kept < 2:
        return Shift(0.0, 1.0, None)
    # Half a count each, so that a category that is missing on one side has a finite logarithm.
    p, q = (p + 0.5) / (p + 0.5).sum(), (q + 0.5) / (q + 0.5).sum()
    psi = float(((q - p) * np.log(q / p)).sum())
    at = int(np.abs(new / m - old / n).argmax())
    largest = names[at], float(old[at] / n), float(new[at] / m)
    return Shift(psi, float(special.chdtrc(kept - 1, psi / (1 / n + 1 / m))), largest)


def _merged(counts: Floats, frequent: np.ndarray) -> Floats:
    rest = [counts[~frequent].sum()] if (~frequent).any() else []
    return np.concatenate([counts[frequent], rest])
