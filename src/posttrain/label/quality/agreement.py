"""Agreement between annotators: percent, Cohen's and Fleiss' kappa, Krippendorff's alpha, with bootstrap intervals.

Sources: J. Cohen, A Coefficient of Agreement for Nominal Scales (Educational and Psychological Measurement 20, 1960);
R. J. Light (Psychological Bulletin 76, 1971), the mean of Cohen's kappa over pairs; J. L. Fleiss (Psychological
Bulletin 76, 1971); K. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011); A. Zapf et al. (BMC Medical
Research Methodology 16, 2016), bootstrap over items.

Where no item differs, every bootstrap sample says the same. So no interval is narrower than Wilson's interval of the
share that agrees, with the margins as they are: each coefficient is then linear in that share."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from posttrain.label.answers import Floats, Integers, Votes, shared_items
from posttrain.label.quality.findings import wilson

_BLOCK = 20_000_000  # weights of items held in memory at a time
_LEAST_SHARED = 10  # items that a pair shares, from which on it gets an interval


@dataclass(frozen=True)
class Estimate:
    """A coefficient with its interval over items; NaN where it is undefined.

    Attributes:
        value: The coefficient.
        low: Lower end.
        high: Upper end.
        n: Items that it is computed from.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class ClassAgreement:
    """Agreement on one label against all others.

    Attributes:
        label: The label.
        answers: Answers with this label on items that several annotators answered.
        percent: Probability that another annotator gives it too, if one does (Fleiss' P_j).
        alpha: Krippendorff's alpha of the answers made binary.
    """

    label: str
    answers: int
    percent: Estimate
    alpha: Estimate


@dataclass(frozen=True)
class PairAgreement:
    """Agreement of two annotators on the items that both answered.

    Attributes:
        first: Name.
        second: Name.
        agreed: Items with the same answer; ``percent`` is their share.
    """

    first: str
    second: str
    agreed: int
    percent: Estimate
    cohen: Estimate


@dataclass(frozen=True)
class Agreement:
    """Agreement over all items that at least two annotators answered.

    Attributes:
        items: Their number.
        answers: Answers to them.
        pairs_agreed: Pairs of answers to one item that are equal.
        pairs: Pairs of answers to one item.
        percent: Share of equal pairs.
        cohen: Cohen's kappa, the mean over pairs of annotators weighted by the items that they share.
        fleiss: Fleiss' kappa; items may have different numbers of answers.
        alpha: Krippendorff's alpha.
        by_class: In the order of the labels.
        by_pair: Pairs that share an item, most items first.
    """

    items: int
    answers: int
    pairs_agreed: int
    pairs: int
    percent: Estimate
    cohen: Estimate
    fleiss: Estimate
    alpha: Estimate
    by_class: tuple[ClassAgreement, ...]
    by_pair: tuple[PairAgreement, ...]


def measure_agreement(votes: Votes, *, draws: int = 1000, seed: int = 0, coverage: float = 0.95) -> Agreement:
    """Measures the agreement of all annotators, on each class, and of each pair.

    Args:
        votes: The answers.
        draws: Bootstrap samples of the items.
        seed: Seed of the draws.
        coverage: Coverage of the intervals, between 0 and 1.
    """
    units = _Units.build(votes)
    pairs = _pairs(votes, units)
    point = _Statistics.compute(units, pairs, np.ones((1, units.items)))
    # With the same margins and no agreement: the other end of each coefficient's line.
    unlike = _Statistics.compute(units, pairs, np.ones((1, units.items)), agreement=0.0)
    samples = [_Statistics.compute(units, pairs, weights) for weights in _weights(units.items, draws, seed)]

    def estimate(name: str, column: int | None = None, n: int = units.items) -> Estimate:
        # Pairs and classes are columns; what is overall is a vector over the draws.
        at = (slice(None),) if column is None else (slice(None), column)
        kind = name.rpartition("_")[0]
        share, value, lowest = (
            float(getattr(*part)[at][0])
            for part in ((point, f"{kind}_percent" if kind else "percent"), (point, name), (unlike, name))
        )
        rest = [getattr(sample, name)[at] for sample in samples]
        return _interval(value, np.concatenate(rest) if rest else np.empty(0), n, coverage, share, lowest)

    sizes = np.asarray(units.counts.sum(axis=0)).ravel().astype(int)
    answered = np.asarray((units.counts > 0).sum(axis=0)).ravel().astype(int)
    by_class = [
        ClassAgreement(
            votes.labels[at],
            int(sizes[at]),
            *(estimate(f"class_{name}", at, int(answered[at])) for name in ("percent", "alpha")),
        )
        for at in range(units.classes)
        if sizes[at]
    ]
    by_pair = [
        PairAgreement(
            votes.annotators[pair.first],
            votes.annotators[pair.second],
            int((pair.left == pair.right).sum()),
            *(estimate(f"pair_{name}", at, len(pair.items)) for name in ("percent", "cohen")),
        )
        for at, pair in enumerate(pairs)
    ]
    return Agreement(
        units.items,
        int(units.sizes.sum()),
        round(float(units.pairs_agreed.sum())),
        round(float(units.pairs.sum())),
        estimate("percent"),
        estimate("cohen"),
        estimate("fleiss"),
        estimate("alpha"),
        tuple(by_class),
        tuple(sorted(by_pair, key=lambda pair: -pair.percent.n)),
    )


def krippendorff_alpha(votes: Votes) -> float:
    """Computes Krippendorff's alpha; NaN if fewer than two different labels are on items with several answers."""
    units = _Units.build(votes)
    weights = np.ones((1, units.items))
    return float(_alpha(weights @ units.counts, weights @ units.diagonal)[0])


@dataclass(frozen=True)
class _Units:
    """The U items with at least two answers; C labels.

    Attributes:
        kept: int64 [U], their indexes in ``votes.items``.
        sizes: float64 [U], answers to each.
        counts: sparse [U, C], answers by label.
        diagonal: sparse [U, C], each item's share of the coincidences o_cc.
        pairs_agreed: float64 [U].
        pairs: float64 [U].
    """

    kept: Integers
    sizes: Floats
    counts: sparse.csr_array
    diagonal: sparse.csr_array
    pairs_agreed: Floats
    pairs: Floats

    @property
    def items(self) -> int:
        return len(self.kept)

    @property
    def classes(self) -> int:
        return int(self.counts.shape[1])

    @classmethod
    def build(cls, votes: Votes) -> "_Units":
        classes = len(votes.labels)
        sizes = np.bincount(votes.item, minlength=len(votes.items))
        kept = np.flatnonzero(sizes >= 2)
        shape = (len(votes.items), classes)
        all_counts = sparse.csr_array((np.ones(len(votes.item)), (votes.item, votes.label)), shape=shape)
        counts = sparse.csr_array(all_counts[kept])
        m = sizes[kept].astype(np.float64)
        same = counts.copy()
        same.data = same.data * (same.data - 1)
        diagonal = sparse.csr_array(sparse.diags_array(1 / (m - 1)) @ same) if len(kept) else same
        agreed = np.asarray(same.sum(axis=1)).ravel() / 2
        return cls(kept, m, counts, diagonal, agreed, m * (m - 1) / 2)


@dataclass(frozen=True)
class _Pair:
    """Two annotators, the units that both answered, and the labels of each, numbered within the pair."""

    first: int
    second: int
    items: Integers
    left: Integers
    right: Integers
    labels: int


def _pairs(votes: Votes, units: _Units) -> list[_Pair]:
    pairs = []
    for shared in shared_items(votes):
        used, number = np.unique(np.concatenate([shared.left, shared.right]), return_inverse=True)
        left, right = np.split(number, 2)
        items = np.searchsorted(units.kept, shared.items)
        pairs.append(_Pair(shared.first, shared.second, items, left, right, len(used)))
    return pairs


@dataclass(frozen=True)
class _Statistics:
    """Every coefficient for B weightings of the items: float64 [B], [B, classes] and [B, pairs]."""

    percent: Floats
    cohen: Floats
    fleiss: Floats
    alpha: Floats
    class_percent: Floats
    class_alpha: Floats
    pair_percent: Floats
    pair_cohen: Floats

    @classmethod
    def compute(cls, units: _Units, pairs: list[_Pair], weights: Floats, agreement: float = 1.0) -> "_Statistics":
        """Computes them; ``agreement`` is the part of the agreement that counts."""
        margins, diagonal = weights @ units.counts, agreement * (weights @ units.diagonal)
        agreed = agreement * units.pairs_agreed
        total = margins.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = margins / total[:, None]
            observed, chance = weights @ (agreed / units.pairs) / weights.sum(axis=1), (share**2).sum(axis=1)
            # Krippendorff's alpha of one label against the rest: its coincidences with others are n_c - o_cc.
            apart = (total[:, None] - 1) * (margins - diagonal)
            return cls(
                percent=weights @ agreed / (weights @ units.pairs),
                fleiss=(observed - chance) / (1 - chance),
                alpha=_alpha(margins, diagonal),
                class_percent=diagonal / margins,
                class_alpha=1 - apart / (margins * (total[:, None] - margins)),
                **_pair_statistics(pairs, weights, agreement),
            )


def _pair_statistics(pairs: list[_Pair], weights: Floats, agreement: float) -> dict[str, Floats]:
    percent, cohen = (np.full((len(weights), len(pairs)), np.nan) for _ in range(2))
    kappa_sum, kappa_weight = np.zeros(len(weights)), np.zeros(len(weights))
    for at, pair in enumerate(pairs):
        own = weights[:, pair.items]
        n = own.sum(axis=1)
        left, right, both = np.split(own @ _indicators(pair), 3, axis=1)
        chance = (left * right).sum(axis=1) / n**2
        percent[:, at] = observed = agreement * both.sum(axis=1) / n
        cohen[:, at] = kappa = (observed - chance) / (1 - chance)
        defined = np.isfinite(kappa)
        kappa_sum += np.where(defined, n * kappa, 0)
        kappa_weight += np.where(defined, n, 0)
    return {"cohen": kappa_sum / kappa_weight, "pair_percent": percent, "pair_cohen": cohen}


def _indicators(pair: _Pair) -> sparse.csr_array:
    """Returns sparse [items, 3 * labels]: one where the left, the right, and both annotators gave the label."""
    count, classes = len(pair.items), pair.labels
    # By rows, not coordinates: a large team has thousands of pairs with few items each.
    columns = np.stack([pair.left, classes + pair.right, 2 * classes + pair.left], axis=1)
    values = np.stack([np.ones(count), np.ones(count), pair.left == pair.right], axis=1)
    rows = np.arange(0, 3 * count + 1, 3)
    return sparse.csr_array((values.ravel(), columns.ravel(), rows), shape=(count, 3 * classes))


def _alpha(margins: Floats, diagonal: Floats) -> Floats:
    """Returns Krippendorff's alpha for each weighting: 1 - (n - 1) sum o_ck / sum n_c n_k over different c and k."""
    n, same = margins.sum(axis=1), diagonal.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1 - (n - 1) * (n - same) / (n**2 - (margins**2).sum(axis=1)), np.float64)


def _weights(items: int, draws: int, seed: int) -> Iterator[Floats]:
    """Yields how often each bootstrap sample holds each item, float64 [B, items], in blocks of draws."""
    generator, size = np.random.default_rng(seed), max(1, _BLOCK // max(items, 1))
    for start in range(0, draws if items else 0, size):
        count = min(size, draws - start)
        chosen = generator.integers(0, items, (count, items)) + items * np.arange(count)[:, None]
        yield np.bincount(chosen.ravel(), minlength=count * items).reshape(count, items).astype(np.float64)


def _interval(value: float, samples: Floats, n: int, coverage: float, share: float, lowest: float) -> Estimate:
    """Reads the interval from the samples; ``lowest`` is the coefficient if ``share``, which agrees, were none."""
    samples = samples[np.isfinite(samples)]
    if n < _LEAST_SHARED or not len(samples) or not np.isfinite(value):
        return Estimate(value, np.nan, np.nan, n)
    low, high = np.quantile(samples, [(1 - coverage) / 2, (1 + coverage) / 2])
    least, slope = wilson(round(share * n), n, coverage), 1 - lowest
    low = min(low, value - slope * (least.value - least.low))
    high = max(high, value + slope * (least.high - least.value))
    return Estimate(value, float(low), float(min(high, 1.0)), n)
