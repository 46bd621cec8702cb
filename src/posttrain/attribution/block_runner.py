"""Runs numbered work in blocks over processes, and resumes from the blocks that are already on disk."""

import hashlib
import io
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import Floats, Rows, Utility, check_finite, utility_key
from posttrain.jobs.engines import EngineName, open_engine
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class BlockRunner:
    """Where work is done and kept.

    Attributes:
        workers: processes; 1 is this one alone. Their number changes no digit.
        folder: for finished blocks; None keeps none.
    """

    workers: int = 1
    folder: Path | None = None

    def of(self, key: Callable[[], str], **settings: str | int | float) -> "BlockRunner":
        """The place of one piece of work: a folder of its own within this one's.

        Args:
            key: of the data; asked for only where there is a folder.
            settings: all else that the work's results depend on, but for the numbers of blocks.

        Raises:
            UserError: the number of workers is not positive, there is no key, or the disk refused.
        """
        if self.workers < 1:
            raise UserError(f"{self.workers} workers cannot work", fix="give at least 1")
        if self.folder is None:
            return self
        folder = self.folder / digest({"key": key(), "settings": settings})
        make_folder(folder)
        return BlockRunner(self.workers, folder)

    def blocks(
        self, work: Callable[[range], Arrays], total: int, size: int, description: str
    ) -> Generator[tuple[range, Arrays], None, None]:
        """Each block of the numbers 0..total-1, in order, and what the work made of it or had made of it before.

        Close the iterator to leave the rest undone; blocks that other processes are at then are lost.

        Args:
            work: pickled where there are several workers; runs with one thread, so that no sum depends on the cores.
            size: of a block: what a worker takes at a time, and what is lost at most when it is killed.
        """
        parts = [range(begin, min(begin + size, total)) for begin in range(0, total, size)]
        name: EngineName = "inline" if self.workers == 1 or len(parts) == 1 else "processes"
        with (
            open_engine(name, self.workers) as engine,
            progress_bar(description, len(parts), "block") as advance,
            closing(_as_generator(engine.map(_SavedWork(work, self.folder), parts))) as results,
        ):
            for part, result in zip(parts, results, strict=True):
                advance(1)
                yield part, result


@dataclass(frozen=True)
class _SavedWork:
    work: Callable[[range], Arrays]
    folder: Path | None

    def __call__(self, part: range) -> Arrays:
        from threadpoolctl import threadpool_limits

        path = None if self.folder is None else self.folder / f"{part.start:08d}-{part.stop:08d}.block"
        if path is not None and (found := _read_block(path)) is not None:
            return found
        with threadpool_limits(1):
            result = self.work(part)
        if path is not None:
            content = io.BytesIO()
            np.savez(content, allow_pickle=False, **result)
            arrays = content.getvalue()
            write_atomically(path, hashlib.sha256(arrays).digest() + arrays)
        return result


def _read_block(path: Path) -> Arrays | None:
    """A block saved before; None where there is none or it is damaged."""
    if not path.exists():
        return None
    content = path.read_bytes()
    length = hashlib.sha256().digest_size
    if hashlib.sha256(content[length:]).digest() != content[:length]:
        log.warning("%s is damaged; doing its work again", path)
        return None
    with np.load(io.BytesIO(content[length:]), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _as_generator(results: Iterator[Arrays]) -> Generator[Arrays, None, None]:
    """The same as a generator, which can be closed."""
    yield from results


@dataclass(frozen=True)
class CoalitionScores:
    """Scores of numbered sets; work for `Place.blocks`.

    Attributes:
        rows_of: the players of a number's set.
    """

    utility: Utility
    rows_of: Callable[[int], Rows]

    def __call__(self, part: range) -> Arrays:
        return {"scores": np.array([check_finite(self.utility(self.rows_of(number))) for number in part])}


@dataclass(frozen=True)
class _EmptyAndGrandCoalition:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.arange(self.players if number else 0)


def empty_and_grand_scores(utility: Utility, players: int, place: BlockRunner) -> tuple[float, float]:
    """The scores of no players and of all: two evaluations, which every method finds again in a folder."""
    place = place.of(lambda: utility_key(utility), method="ends", players=players)
    scores = coalition_scores(place, CoalitionScores(utility, _EmptyAndGrandCoalition(players)), 2, 2, "whole set")
    return float(scores[0]), float(scores[1])


def coalition_scores(place: BlockRunner, work: CoalitionScores, total: int, block: int, description: str) -> Floats:
    """Scores of the sets 0..total-1, float64 [total]."""
    scores = np.empty(total)
    for part, found in place.blocks(work, total, block, description):
        scores[part.start : part.stop] = found["scores"]
    return scores
