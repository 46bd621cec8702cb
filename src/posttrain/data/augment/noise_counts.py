"""How often words stand alone and beside each other in a corpus: what noising goes by."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.store.text import read_text


@dataclass(frozen=True)
class NoiseCounts:
    """Counts of the V words of a corpus; words are what whitespace separates, as they are written.

    Attributes:
        words: sorted, [V].
        counts: occurrences c(x), int64 [V].
        followed: occurrences with a word behind them, c(x, .), int64 [V].
        followers: different words that follow x, N1+(x, .), int64 [V].
        predecessors: different words that come before x, N1+(., x), int64 [V].
    """

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    followed: npt.NDArray[np.int64]
    followers: npt.NDArray[np.int64]
    predecessors: npt.NDArray[np.int64]


def count_words(texts: Iterable[str]) -> NoiseCounts:
    """The counts of some texts; no bigram spans two of them."""
    counts: Counter[str] = Counter()
    followed: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    for text in texts:
        found = text.split()
        counts.update(found)
        followed.update(found[:-1])
        pairs.update(itertools.pairwise(found))
    followers, predecessors = Counter(first for first, _ in pairs), Counter(second for _, second in pairs)
    words = tuple(sorted(counts))
    columns = (
        np.array([count[word] for word in words], dtype=np.int64)
        for count in (counts, followed, followers, predecessors)
    )
    return NoiseCounts(words, *columns)


def write_counts(counts: NoiseCounts, file: Path) -> None:
    """Write counts as JSON: ``{"words": [[word, count, followed, followers, predecessors], ...]}``.

    Raises:
        UserError: the disk refused.
    """
    columns = (
        counts.counts.tolist(),
        counts.followed.tolist(),
        counts.followers.tolist(),
        counts.predecessors.tolist(),
    )
    rows = list(zip(counts.words, *columns, strict=True))
    write_atomically(file, json.dumps({"words": rows}, ensure_ascii=False).encode())


@lru_cache(maxsize=2)
def read_counts(file: Path) -> NoiseCounts:
    """What `write_counts` wrote.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        rows = json.loads(read_text(file, str(file)))["words"]
        words = tuple(str(row[0]) for row in rows)
        numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(len(rows), 4)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(
            "holds no counts", where=str(file), fix="write it with write_counts(count_words(texts))"
        ) from None
    if not words or numbers.min() < 0 or numbers[:, 0].min() < 1:
        raise _none_there(file)
    return NoiseCounts(words, *numbers.T)


def _none_there(file: Path) -> UserError:
    return UserError("holds no counts", where=str(file), fix="write it with write_counts(count_words(texts))")
