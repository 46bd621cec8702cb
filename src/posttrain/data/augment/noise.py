"""Noising as smoothing (Xie et al. 2017, "Data Noising as Smoothing in Neural Network Language Models", 1703.02573)."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from posttrain.data.augment.method import Generators, Method
from posttrain.data.augment.noise_counts import NoiseCounts, read_counts
from posttrain.data.augment.replace import replace
from posttrain.store.hashing import file_digest

_WORD = re.compile(r"\S+")


class Noise(Method):
    """Words replaced by a blank, or by words drawn from the corpus' counts, each with a probability of its own.

    The probabilities of section 3.3, where x is the word and ``rate`` is gamma 0:

    - ``blank``: ``rate`` for every word, which stands for interpolation with a uniform blank.
    - ``unigram``: ``rate`` for every word, another drawn by c(x): linear interpolation with the unigram.
    - ``back_off``: ``rate N1+(x, .) / c(x, .)``, as absolute discounting backs off where many words follow; another
      drawn by N1+(., x), as Kneser-Ney's lower order is: words that come after many others are likelier to come here.
    """

    method: Literal["noise"] = "noise"
    kind: Literal["blank", "unigram", "back_off"] = Field(
        "blank", description="What words are replaced by, and how often."
    )
    rate: float = Field(0.1, gt=0, lt=1, description="Gamma 0: how often a word is replaced.")
    blank: str = Field("_", min_length=1, description="What `blank` writes in a word's place.")
    counts: Path | None = Field(None, description="Of unigram and back_off: a file written by write_counts.")

    @model_validator(mode="after")
    def _counts_are_there(self) -> Self:
        if (self.kind == "blank") != (self.counts is None):
            raise ValueError("unigram and back_off need `counts`, blank has none")
        return self

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"counts": root / self.counts.expanduser()}) if self.counts else self

    def check(self) -> None:
        if self.counts is not None:
            read_counts(self.counts)

    def key(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "counts": file_digest(self.counts) if self.counts else None}

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._noised(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def probability(self, words: list[str]) -> npt.NDArray[np.float64]:
        """Gamma of each word, float64 [N]; a word that was never counted, or never followed, gets ``rate``."""
        gamma = np.full(len(words), self.rate)
        if self.kind == "back_off" and self.counts is not None:
            known = _index(self.counts)
            rows = np.array([known.get(word, -1) for word in words], dtype=np.int64)
            counts, seen = read_counts(self.counts), rows >= 0
            followed = counts.followed[rows[seen]]
            share = counts.followers[rows[seen]] / np.maximum(followed, 1)
            gamma[seen] = self.rate * np.where(followed > 0, share, 1.0)
        return gamma

    def _noised(self, text: str, rng: np.random.Generator) -> str | None:
        places = list(_WORD.finditer(text))
        hits = np.flatnonzero(rng.random(len(places)) < self.probability([place[0] for place in places]))
        if not hits.size:
            return None
        if self.counts is None:
            new = [self.blank] * hits.size
        else:
            counts = read_counts(self.counts)
            drawn = np.searchsorted(_cumulated(self.counts, self.kind), rng.random(hits.size), side="right")
            new = [counts.words[row] for row in drawn.tolist()]
        return replace(text, [places[at] for at in hits.tolist()], new)


def proposal(counts: NoiseCounts, kind: str) -> npt.NDArray[np.float64]:
    """The distribution that replacements are drawn from, float64 [V]."""
    weights = counts.predecessors if kind == "back_off" and counts.predecessors.any() else counts.counts
    return np.asarray(weights / weights.sum(), dtype=np.float64)


@lru_cache(maxsize=4)
def _cumulated(file: Path, kind: str) -> npt.NDArray[np.float64]:
    cumulated = np.cumsum(proposal(read_counts(file), kind))
    cumulated[-1] = 1.0  # rounding must leave no draw without a word
    return np.asarray(cumulated, dtype=np.float64)


@lru_cache(maxsize=2)
def _index(file: Path) -> dict[str, int]:
    return {word: row for row, word in enumerate(read_counts(file).words)}
