"""The drift report: what changed from one dataset version to another."""

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
"""Embeddings float32 [N, D] of N texts."""

COMPARED = 1000
"""Embeddings of each version that the test compares."""

WORDS = "words of inputs"

_LONGEST = 3
_HASHED = 2048
_HALVES = 1  # seed of the hash that halves versions


@dataclass(frozen=True)
class Drift:
    """What changed.

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
        """What shifted and what did not, in a line: ``labels shifted (JS 0.18), inputs did not (MMD p = 0.41)``."""
        told = [(one.name, one.shifted, f"JS {one.divergence:.2g}") for one in self.shares if one.name != WORDS]
        if self.inputs:
            told.append(("inputs", self.inputs.shifted, f"MMD p = {self.inputs.p_value:.2g}"))
        if self.numbers:
            worst = max(self.numbers, key=lambda one: (one.level == "shifted", one.index))
            most = f"greatest PSI {worst.index:.2g}, in {worst.name.replace('_', ' ')}"
            told.append(("numbers", worst.level == "shifted", most))
        told.sort(key=lambda one: not one[1])
        if not told:
            return "nothing to compare"
        said = [f"{name} {'shifted' if shifted else 'did not'} ({why})" for name, shifted, why in told]
        if not told[0][1]:
            said[0] = said[0].replace(" did not ", " did not shift ", 1)
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "records": {"old": self.records[0], "new": self.records[1]},
            "population_stability": {one.name: one.to_json() for one in self.numbers},
            "jensen_shannon": {one.name: one.to_json() for one in self.shares},
            "ngrams": {part: one.to_json() for part, one in self.ngrams.items()},
            "embeddings": self.inputs.to_json() if self.inputs else None,
            "incomparable": list(self.incomparable),
        }


def measure_drift(
    old: Profile,
    new: Profile,
    embed: Embed | None = None,
    *,
    embedder: str = "",
    embeddings: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None,
    compared: int = COMPARED,
    permutations: int = 999,
    seed: int = 0,
) -> Drift:
    """What changed from ``old`` to ``new``.

    Args:
        embed: makes embeddings of the inputs of ``compared`` records of each version, chosen by the hash of their ids
            so that none is in both; vectors of hashed character n-grams where neither this nor ``embeddings`` is given.
        embedder: what ``embed`` or ``embeddings`` are called in the report.
        embeddings: float32 [N, D] and [M, D] that were made before, of samples that have no record in common.
        permutations: of the test; its p-value cannot be below ``1 / (permutations + 1)``.
        seed: of the permutations.
    """
    numbers, missing_numbers = _common_measures(_numbers(old), _numbers(new), lambda one: not one.count)
    shares, missing_shares = _common_measures(_shares(old), _shares(new), lambda one: not one)
    divergences = [divergence(name, *pair) for name, *pair in shares]
    counted = {part: _ngrams(part, old, new) for part in old.ngrams if part in new.ngrams}
    if words := _word_counts(counted.get("input")):
        divergences.append(divergence(WORDS, *words, independent=False))
    if embeddings is None:
        texts = [_disjoint_inputs(one, side, compared) for side, one in enumerate((old, new))]
        made = [(embed or hashed_ngrams)(part) if len(part) > 1 else np.zeros((0, 1), np.float32) for part in texts]
        embeddings = (made[0], made[1])
        embedder = embedder or ("given embedder" if embed else "hashed character n-grams")
    inputs = None
    if min(map(len, embeddings)) > 1:
        inputs = mean_discrepancy(*embeddings, permutations=permutations, seed=seed, embedder=embedder)
    return Drift(
        records=(old.records, new.records),
        numbers=tuple(population_stability(name, *pair) for name, *pair in numbers),
        shares=tuple(divergences),
        ngrams={part: ngram_changes(one) for part, one in counted.items()},
        inputs=inputs,
        incomparable=(*missing_numbers, *missing_shares),
    )


def hashed_ngrams(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Vectors float32 [N, 2048] of length 1 that count hashed runs of 3 to 5 characters within words."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), n_features=_HASHED, dtype=np.float32)
    return np.asarray(vectorizer.transform(texts).toarray(), dtype=np.float32)


def _numbers(one: Profile) -> dict[str, Distribution]:
    """Lengths and scores; the lengths of labels say no more than the labels."""
    lengths = {name: told for name, told in one.lengths.items() if one.open_ended or not name.startswith("answer")}
    return {**lengths, **one.scores}


def _shares(one: Profile) -> dict[str, Mapping[str, int]]:
    return {"labels": one.labels, "languages": one.languages, "sources": one.sources, **one.categories}


def _common_measures(
    old: Mapping[str, Any], new: Mapping[str, Any], empty: Callable[[Any], bool]
) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """What both have by name, and in words what only one of them has."""
    both, single = [], []
    for name in dict.fromkeys([*old, *new]):
        there = [name in one and not empty(one[name]) for one in (old, new)]
        if all(there):
            both.append((name, old[name], new[name]))
        elif any(there):
            single.append(f"{name}: only the {'older' if there[0] else 'newer'} version has them")
    return both, single


def _disjoint_inputs(one: Profile, side: int, compared: int) -> list[str]:
    """Inputs of records with even ids' hashes for side 0, with odd ones for side 1.

    What both versions hold so never stands on both sides, where equal rows would hide a change from the test.
    """
    parity = id_hashes([row.id for row in one.sample], _HALVES) & np.uint64(1)
    rows = np.flatnonzero(parity == side)[:compared].tolist()
    return [one.sample[row].input for row in rows]


def _ngrams(part: str, old: Profile, new: Profile) -> list[Ngrams]:
    texts = [[row.input if part == "input" else row.answer for row in one.sample] for one in (old, new)]
    return ngram_counts(texts, _LONGEST)


def _word_counts(counted: Sequence[Ngrams] | None) -> tuple[dict[str, int], dict[str, int]] | None:
    """Counts of the words of inputs, older and newer; None where a version has no words."""
    if not counted or not counted[0].counts.any(axis=1).all():
        return None
    words = [counted[0].text(run) for run in range(counted[0].counts.shape[1])]
    old, new = (dict(zip(words, row.tolist(), strict=True)) for row in counted[0].counts)
    return old, new
