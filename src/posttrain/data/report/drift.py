"""Reports what changed from one dataset version to another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.report.distribution import Distribution
from posttrain.data.report.drift_measures import (
    Divergence,
    MeanDiscrepancy,
    PopulationStability,
    divergence,
    mean_discrepancy,
    population_stability,
)
from posttrain.data.report.ngrams import NgramChanges, Ngrams, ngram_changes, ngram_counts
from posttrain.data.report.profile import Profile
from posttrain.data.report.sample import id_hashes

Embed = Callable[[list[str]], npt.NDArray[np.float32]]
"""Embeds N texts: float32 [N, D]."""

COMPARED = 1000
"""Number of embeddings of each version that the test compares."""

WORDS = "words of inputs"

_LONGEST = 3
_HASHED = 2048
_HALVES = 1  # seed of the hash that halves versions


@dataclass(frozen=True)
class Drift:
    """Holds what changed between two versions.

    Attributes:
        records: how many the older and the newer version have.
        numbers: of every length and every fact that is a number.
        shares: of labels, languages, sources, facts in words, and the words of inputs.
        ngrams: by part of a record.
        inputs: the test on the embeddings of inputs; None where a version has too few of them.
        incomparable: what only one version has, in words.
    """

    records: tuple[int, int]
    numbers: tuple[PopulationStability, ...] = ()
    shares: tuple[Divergence, ...] = ()
    ngrams: Mapping[str, NgramChanges] = field(default_factory=dict)
    inputs: MeanDiscrepancy | None = None
    incomparable: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Names in a line what shifted and what did not.

        Such as ``labels shifted (JS 0.18), inputs did not (MMD p = 0.41)``.
        """
        findings = [
            (share.name, share.shifted, f"JS {share.divergence:.2g}") for share in self.shares if share.name != WORDS
        ]
        if self.inputs:
            findings.append(("inputs", self.inputs.shifted, f"MMD p = {self.inputs.p_value:.2g}"))
        if self.numbers:
            worst = max(self.numbers, key=lambda share: (share.level == "shifted", share.index))
            most = f"greatest PSI {worst.index:.2g}, in {worst.name.replace('_', ' ')}"
            findings.append(("numbers", worst.level == "shifted", most))
        # Shifts first; the sort is stable, so that the rest keeps its order.
        findings.sort(key=lambda share: not share[1])
        if not findings:
            return "nothing to compare"
        phrases = [f"{name} {'shifted' if shifted else 'did not'} ({why})" for name, shifted, why in findings]
        if not findings[0][1]:
            phrases[0] = phrases[0].replace(" did not ", " did not shift ", 1)
        return ", ".join(phrases)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "records": {"old": self.records[0], "new": self.records[1]},
            "population_stability": {measure.name: measure.to_json() for measure in self.numbers},
            "jensen_shannon": {measure.name: measure.to_json() for measure in self.shares},
            "ngrams": {part: measure.to_json() for part, measure in self.ngrams.items()},
            "embeddings": self.inputs.to_json() if self.inputs else None,
            "incomparable": list(self.incomparable),
        }


def measure_drift(
    old: Profile,
    new: Profile,
    embed: Embed | None = None,
    *,
    embedder: str = "",
) -> Drift:
    """Measures what changed from ``old`` to ``new``.

    Args:
        embed: makes embeddings of the inputs of `COMPARED` records of each version, chosen by the hash of their ids so
            that none is in both; by default vectors of hashed character n-grams.
        embedder: what ``embed`` is called in the report.
    """
    numbers, missing_numbers = _common_measures(_numbers(old), _numbers(new), lambda value: not value.count)
    shares, missing_shares = _common_measures(_shares(old), _shares(new), lambda value: not value)
    divergences = [divergence(name, *pair) for name, *pair in shares]
    counted = {part: _ngrams(part, old, new) for part in old.ngrams if part in new.ngrams}
    if word_counts := _word_counts(counted.get("input")):
        divergences.append(divergence(WORDS, *word_counts, independent=False))
    texts = [_disjoint_inputs(value, side) for side, value in enumerate((old, new))]
    inputs = None
    # The unbiased estimate divides by n - 1.
    if min(map(len, texts)) > 1:
        vectors = [(embed or hashed_ngrams)(part) for part in texts]
        embedder = embedder or ("given embedder" if embed else "hashed character n-grams")
        inputs = mean_discrepancy(*vectors, embedder=embedder)
    return Drift(
        records=(old.records, new.records),
        numbers=tuple(population_stability(name, *pair) for name, *pair in numbers),
        shares=tuple(divergences),
        ngrams={part: ngram_changes(value) for part, value in counted.items()},
        inputs=inputs,
        incomparable=(*missing_numbers, *missing_shares),
    )


def hashed_ngrams(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Counts hashed runs of 3 to 5 characters within words: vectors float32 [N, 2048] of length 1."""
    from sklearn.feature_extraction.text import HashingVectorizer

    # Hashed, so that both versions have the same columns without a common vocabulary.
    vectorizer = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), n_features=_HASHED, dtype=np.float32)
    return np.asarray(vectorizer.transform(texts).toarray(), dtype=np.float32)


def _numbers(profile: Profile) -> dict[str, Distribution]:
    """Lengths and scores; lengths of labels say no more than the labels."""
    lengths = {
        name: distribution
        for name, distribution in profile.lengths.items()
        if profile.open_ended or not name.startswith("answer")
    }
    return {**lengths, **profile.scores}


def _shares(profile: Profile) -> dict[str, Mapping[str, int]]:
    return {"labels": profile.labels, "languages": profile.languages, "sources": profile.sources, **profile.categories}


def _common_measures(
    old: Mapping[str, Any], new: Mapping[str, Any], empty: Callable[[Any], bool]
) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """Pairs what both versions have by name, and describes what only one has."""
    both, single = [], []
    for name in dict.fromkeys([*old, *new]):
        present = [name in profile and not empty(profile[name]) for profile in (old, new)]
        if all(present):
            both.append((name, old[name], new[name]))
        elif any(present):
            single.append(f"{name}: only the {'older' if present[0] else 'newer'} version has them")
    return both, single


def _disjoint_inputs(profile: Profile, side: int) -> list[str]:
    """Returns inputs of records whose id hashes are even for side 0, and odd for side 1."""
    # So a record of both versions is never on both sides, where equal rows would hide a change from the test.
    parity = id_hashes([row.id for row in profile.sample], _HALVES) & np.uint64(1)
    # The sample is ordered by another hash, so its first rows are a random choice.
    rows = np.flatnonzero(parity == side)[:COMPARED].tolist()
    return [profile.sample[row].input for row in rows]


def _ngrams(part: str, old: Profile, new: Profile) -> list[Ngrams]:
    texts = [[row.input if part == "input" else row.answer for row in profile.sample] for profile in (old, new)]
    return ngram_counts(texts, _LONGEST)


def _word_counts(counted: Sequence[Ngrams] | None) -> tuple[dict[str, int], dict[str, int]] | None:
    """Counts the words of inputs, older and newer; None if a version has no words."""
    if not counted or not counted[0].counts.any(axis=1).all():
        return None
    vocabulary = [counted[0].text(run) for run in range(counted[0].counts.shape[1])]
    old, new = (dict(zip(vocabulary, row.tolist(), strict=True)) for row in counted[0].counts)
    return old, new
