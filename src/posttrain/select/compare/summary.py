"""What learning curves say: which strategy to use, and how sure that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

Curves = npt.NDArray[np.float64]

_EXACT = 12
_DRAWS = 10_000
_SURE = 0.05


@dataclass(frozen=True)
class Summary:
    """One strategy's curves.

    Attributes:
        strategy: its name.
        accuracy: mean over seeds after each count of labels.
        area: mean accuracy under the curve, over counts and seeds, from 0 to 1.
        labels: mean over seeds of the labels after which the target is reached; None if one seed does not reach it.
        gain: of the area over the baseline's, the mean over seeds.
        p_value: of no gain, two-sided, by a sign-flip test over seeds; None of the baseline.
    """

    strategy: str
    accuracy: list[float]
    area: float
    labels: float | None
    gain: float
    p_value: float | None


def summarise(
    counts: Sequence[int], curves: Mapping[str, Curves], targets: Sequence[float], baseline: str
) -> list[Summary]:
    """Each strategy's summary, the largest area first.

    Args:
        counts: labels, ascending.
        curves: by strategy float64 [seeds, counts]; the same seed has the same held-out records.
        targets: the accuracy to reach, by seed.
        baseline: the strategy that gains are over.
    """
    areas = {name: area(counts, found) for name, found in curves.items()}
    summaries = []
    for name, found in curves.items():
        needed = [labels_to(counts, curve, target) for curve, target in zip(found, targets, strict=True)]
        reached = [count for count in needed if count is not None]
        gains = areas[name] - areas[baseline]
        summaries.append(
            Summary(
                name,
                found.mean(axis=0).tolist(),
                float(areas[name].mean()),
                float(np.mean(reached)) if len(reached) == len(needed) else None,
                float(gains.mean()),
                None if name == baseline else sign_flip(gains),
            )
        )
    return sorted(summaries, key=lambda summary: -summary.area)


def area(counts: Sequence[int], curves: Curves) -> npt.NDArray[np.float64]:
    """Mean accuracy between the first count and the last, by trapezoids, float64 [seeds]."""
    if len(counts) == 1:
        return curves[:, 0]
    return np.asarray(np.trapezoid(curves, counts, axis=1)) / (counts[-1] - counts[0])


def labels_to(counts: Sequence[int], curve: npt.NDArray[np.float64], target: float) -> float | None:
    """Labels after which a curve first reaches the target, along straight lines; None if it never does."""
    above = np.flatnonzero(curve >= target)
    if not len(above):
        return None
    at = int(above[0])
    if at == 0:
        return float(counts[0])
    share = (target - curve[at - 1]) / (curve[at] - curve[at - 1])
    return float(counts[at - 1] + share * (counts[at] - counts[at - 1]))


def sign_flip(differences: npt.NDArray[np.float64]) -> float:
    """Two-sided p-value of paired differences whose signs, were there nothing to them, would be chance.

    R. Fisher, The Design of Experiments (1935), section 21: exact over all signs for up to 12 pairs, by 10,000 draws
    beyond, of which the found signs count as one.
    """
    found = abs(differences.sum())
    if len(differences) <= _EXACT:
        signs = np.array(list(product((1, -1), repeat=len(differences))))
        return float((np.abs(signs @ differences) >= found * (1 - 1e-12)).mean())
    signs = np.random.default_rng(0).choice((1, -1), (_DRAWS, len(differences)))
    return float((1 + (np.abs(signs @ differences) >= found * (1 - 1e-12)).sum()) / (1 + _DRAWS))


def advice(summaries: Sequence[Summary], baseline: str) -> str:
    """One line: which strategy to use."""
    best = summaries[0]
    if best.strategy == baseline or best.p_value is None:
        return f"no strategy beats {baseline} here: keep to it, or try more seeds"
    if best.p_value > _SURE:
        return (
            f"use {best.strategy}: {best.gain:+.3f} of area over {baseline}, which may be chance "
            f"(p = {best.p_value:.2f}): try more seeds"
        )
    base = next(one for one in summaries if one.strategy == baseline)
    spared = ""
    if best.labels is not None and base.labels is not None:
        spared = f", and {best.labels / base.labels:.0%} of its labels to the target"
    return f"use {best.strategy}: {best.gain:+.3f} of area over {baseline} (p = {best.p_value:.3f}){spared}"
