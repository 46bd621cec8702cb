"""Incremental steps give the same result for a grown set as for the whole set at once."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.steps.apply import TableCorpus
from posttrain.data.steps.duplicates import Minhash
from posttrain.data.steps.step import GlobalResult, GlobalStep, PreviousState
from posttrain.testing.steps import table_of

pytestmark = pytest.mark.slow

_LETTERS = np.random.default_rng(0).choice(list("abcdefghijklmnop"), (60, 5))
WORDS = ["".join(letters) for letters in _LETTERS]


def text(rng: np.random.Generator, length: int) -> str:
    return " ".join(WORDS[number] for number in rng.integers(0, len(WORDS), length))


def edit(rng: np.random.Generator, original: str) -> str:
    """Replaces up to two words of ``original`` and sometimes adds text before and after it."""
    parts = original.split()
    for position in rng.integers(0, len(parts), rng.integers(0, 3)):
        parts[position] = WORDS[rng.integers(len(WORDS))]
    context = [text(rng, int(rng.integers(1, 40))) if rng.random() < 0.3 else "" for _ in range(2)]
    return f"{context[0]} {' '.join(parts)} {context[1]}".strip()


def corpus(seed: int) -> tuple[pa.Table, pa.Table]:
    """Training and evaluation records, many of which share something."""
    rng = np.random.default_rng(seed)
    originals = [text(rng, int(rng.integers(3, 60))) for _ in range(30)]
    # A few long records need more than one Bloom filter.
    training = [edit(rng, originals[rng.integers(30)]) for _ in range(120)] + [text(rng, 900) for _ in range(3)]
    rng.shuffle(training)
    wording = text(rng, 14)
    held_out = [f"{wording} {item}" if rng.random() < 0.5 else item for item in originals]
    groups = [None if rng.random() < 0.9 else f"user {rng.integers(3)}" for _ in range(len(training))]
    rows = [{"text": item} | ({"group": group} if group else {}) for item, group in zip(training, groups, strict=True)]
    rows.append({"text": f"{wording} {text(rng, 20)}"})
    return table_of(*rows), table_of(*[{"text": item, "group": f"user {n % 5}"} for n, item in enumerate(held_out)])


def decide(
    step: GlobalStep, training: pa.Table, evaluation: pa.Table, dead: Sequence[int], previous: PreviousState | None
) -> GlobalResult:
    corpus = TableCorpus(training, step, evaluation, previous)
    corpus.alive[list(dead)] = False
    return step.decide(corpus)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_a_grown_set_gives_the_result_of_the_whole_set(threshold: float, seed: int) -> None:
    training, evaluation = corpus(seed)
    step = Minhash(threshold=threshold)
    expected = decide(step, training, evaluation, [5, 60], None)
    assert len(expected.rejections) > 5
    earlier = decide(step, training.slice(0, 90), evaluation, [5, 60], None)
    assert earlier.state is not None
    assert earlier.state.num_rows == 90
    grown = decide(step, training, evaluation, [5, 60], PreviousState(earlier.state, unchanged=True))
    assert grown == expected


def test_removed_and_restored_rows_are_decided_again() -> None:
    training, evaluation = corpus(0)
    step = Minhash(threshold=0.6)
    earlier = decide(step, training.slice(0, 90), evaluation, [1, 2], None)
    assert earlier.state is not None
    grown = decide(step, training, evaluation, [2, 3], PreviousState(earlier.state, unchanged=False))
    assert grown == decide(step, training, evaluation, [2, 3], None)
