"""Steps that remember: what they decide of a grown set is what they decide of it at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.steps.apply import TableCorpus
from posttrain.data.steps.duplicates import Minhash
from posttrain.data.steps.step import GlobalResult, GlobalStep, PreviousState
from posttrain.testing.steps import table_of

pytestmark = pytest.mark.slow

_LETTERS = np.random.default_rng(0).choice(list("abcdefghijklmnop"), (60, 5))
WORDS = ["".join(letters) for letters in _LETTERS]


@dataclass(frozen=True)
class Grown(TableCorpus):
    """A corpus of which the step has seen the first rows before."""

    before: PreviousState | None = None

    def known(self) -> PreviousState | None:
        return self.before


def text(rng: np.random.Generator, length: int) -> str:
    return " ".join(WORDS[number] for number in rng.integers(0, len(WORDS), length))


def edited(rng: np.random.Generator, original: str) -> str:
    """``original`` with a word or two changed, in front of others or behind them at times."""
    parts = original.split()
    for place in rng.integers(0, len(parts), rng.integers(0, 3)):
        parts[place] = WORDS[rng.integers(len(WORDS))]
    around = [text(rng, int(rng.integers(1, 40))) if rng.random() < 0.3 else "" for _ in range(2)]
    return f"{around[0]} {' '.join(parts)} {around[1]}".strip()


def corpus(seed: int) -> tuple[pa.Table, pa.Table]:
    """Training and evaluation records, many of which share something."""
    rng = np.random.default_rng(seed)
    originals = [text(rng, int(rng.integers(3, 60))) for _ in range(30)]
    # A few long records take more than one bitmap.
    training = [edited(rng, originals[rng.integers(30)]) for _ in range(120)] + [text(rng, 900) for _ in range(3)]
    rng.shuffle(training)
    wording = text(rng, 14)
    held_out = [f"{wording} {item}" if rng.random() < 0.5 else item for item in originals]
    groups = [None if rng.random() < 0.9 else f"user {rng.integers(3)}" for _ in range(len(training))]
    rows = [{"text": item} | ({"group": group} if group else {}) for item, group in zip(training, groups, strict=True)]
    rows.append({"text": f"{wording} {text(rng, 20)}"})
    return table_of(*rows), table_of(*[{"text": item, "group": f"user {n % 5}"} for n, item in enumerate(held_out)])


def decided(
    step: GlobalStep, training: pa.Table, evaluation: pa.Table, dead: Sequence[int], before: PreviousState | None
) -> GlobalResult:
    grown = Grown(training, step, evaluation, before)
    grown.alive[list(dead)] = False
    return step.decide(grown)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "step",
    [
        Decontaminate(),
        Decontaminate(threshold=0.5, contained=0.6, ngram=4, ignore_above=3),
        Decontaminate(ngram=None),
        Decontaminate(threshold=None, share=0.2),
        Decontaminate(contained=None, threshold=0.6),
        Minhash(threshold=0.6),
    ],
    ids=["default", "low", "alike", "words", "whole", "minhash"],
)
def test_a_grown_set_is_decided_about_as_at_once(step: GlobalStep, seed: int) -> None:
    training, evaluation = corpus(seed)
    rng = np.random.default_rng(seed)
    at_once = decided(step, training, evaluation, [5, 60], None)
    assert len(at_once.rejections) > 5
    first = evaluation.take(pa.array(np.sort(rng.permutation(evaluation.num_rows)[:24])))
    small = decided(step, training.slice(0, 90), first, [5, 60], None)
    assert small.state is not None
    assert small.state.num_rows == 90
    grown = decided(step, training, evaluation, [5, 60], PreviousState(small.state, unchanged=True))
    assert grown == at_once


def test_rows_that_have_gone_or_come_back_are_decided_about_anew() -> None:
    training, evaluation = corpus(0)
    step = Decontaminate(threshold=0.5, ngram=4)
    small = decided(step, training.slice(0, 90), evaluation.slice(0, 20), [1, 2], None)
    assert small.state is not None
    grown = decided(step, training, evaluation, [2, 3], PreviousState(small.state, unchanged=False))
    assert grown == decided(step, training, evaluation, [2, 3], None)


def test_what_was_looked_for_and_is_gone_makes_a_search_from_scratch() -> None:
    training, evaluation = corpus(1)
    small = decided(Decontaminate(), training.slice(0, 90), evaluation, [], None)
    assert small.state is not None
    fewer = evaluation.slice(3)
    assert decided(Decontaminate(), training, fewer, [], PreviousState(small.state, unchanged=True)) == decided(
        Decontaminate(), training, fewer, [], None
    )
