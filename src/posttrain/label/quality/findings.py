"""Findings about annotators, and the statistics that several measures share.

Sources: E. B. Wilson (JASA 22, 1927), intervals of shares; R. A. Fisher, exact test of two shares; S. Holm, A Simple
Sequentially Rejective Multiple Test Procedure (Scandinavian Journal of Statistics 6, 1979)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special


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
