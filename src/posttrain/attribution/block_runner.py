"""Runs numbered work in blocks over processes, and resumes from the blocks that are already on disk."""

import io
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import Rows, Utility, check_finite, utility_key
from posttrain.attribution.values import Floats
from posttrain.jobs.engines import EngineName, open_engine
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, read_checked, write_checked
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks of work over processes and caches the finished ones in a folder.

    Attributes:
        workers: number of processes; 1 is this one alone. It changes no digit.
        folder: holds finished blocks; None caches none.
    """

    workers: int = 1
    folder: Path | None = None

    def for_method(self, key: Callable[[], str], **settings: str | int | float) -> "BlockRunner":
        """Returns a runner with a subfolder of its own for one piece of work.

        Args:
            key: returns the key of the data; called only if there is a folder, as it may hash gigabytes.
            settings: everything else that the results depend on, except for the numbers of blocks.

        Raises:
            UserError: the number of workers is not positive, there is no key, or the disk refused.
        """
        if self.workers < 1:
            raise UserError(f"{self.workers} workers cannot work", fix="give at least 1")
        if self.folder is None:
            return self
        # By everything that the numbers depend on: a block of other data or settings is never taken for this one's.
        folder = self.folder / digest({"key": key(), "settings": settings})
        make_folder(folder)
        return BlockRunner(self.workers, folder)

    def run(
        self, work: Callable[[range], Arrays], total: int, block_size: int, description: str
    ) -> Generator[tuple[range, Arrays], None, None]:
        """Yields each block of the numbers 0..total-1, in order, with the work's result or the one saved earlier.

        Close the iterator to skip the rest; blocks that other processes are computing then are lost.

        Args:
            work: pickled if there are several workers.
            block_size: how many numbers a worker takes at a time; a killed one loses no more.
        """
        blocks = [range(start, min(start + block_size, total)) for start in range(0, total, block_size)]
        # Starting processes costs more than a single block.
        name: EngineName = "inline" if self.workers == 1 or len(blocks) == 1 else "processes"
        with (
            open_engine(name, self.workers) as engine,
            progress_bar(description, len(blocks), "block") as advance,
            # An engine may return a plain iterator, which cannot be closed before it ends.
            closing(_as_generator(engine.map(_CachedWork(work, self.folder), blocks))) as results,
        ):
            for block, result in zip(blocks, results, strict=True):
                advance(1)
                yield block, result


@dataclass(frozen=True)
class _CachedWork:
    work: Callable[[range], Arrays]
    folder: Path | None

    def __call__(self, block: range) -> Arrays:
        from threadpoolctl import threadpool_limits

        file = None if self.folder is None else self.folder / f"{block.start:08d}-{block.stop:08d}.block"
        if file is not None and (content := read_checked(file)) is not None:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        # One thread: BLAS adds up in another order on another number of cores, and the last digits would differ.
        with threadpool_limits(1):
            result = self.work(block)
        if file is not None:
            stream = io.BytesIO()
            np.savez(stream, allow_pickle=False, **result)
            write_checked(file, stream.getvalue())
        return result


def _as_generator(results: Iterator[Arrays]) -> Generator[Arrays, None, None]:
    yield from results


@dataclass(frozen=True)
class CoalitionScores:
    """Scores numbered sets of players; work for `BlockRunner.run`.

    Attributes:
        coalition: returns the players of a number's set.
    """

    utility: Utility
    coalition: Callable[[int], Rows]

    def __call__(self, block: range) -> Arrays:
        return {"scores": np.array([check_finite(self.utility(self.coalition(number))) for number in block])}


@dataclass(frozen=True)
class _EmptyAndGrandCoalition:
    players: int

    def __call__(self, number: int) -> Rows:
        return np.arange(self.players if number else 0)


def empty_and_grand_scores(utility: Utility, players: int, runner: BlockRunner) -> tuple[float, float]:
    """Scores the set of no players and the set of all: two evaluations, which all methods share in one folder."""
    # A folder of its own: every method needs the two, and each may cost a training.
    shared = runner.for_method(lambda: utility_key(utility), method="ends", players=players)
    scores = coalition_scores(shared, CoalitionScores(utility, _EmptyAndGrandCoalition(players)), 2, 2, "whole set")
    return float(scores[0]), float(scores[1])


def coalition_scores(
    runner: BlockRunner, work: CoalitionScores, total: int, block_size: int, description: str
) -> Floats:
    """Scores the sets 0..total-1: float64 [total]."""
    scores = np.empty(total)
    for block, result in runner.run(work, total, block_size, description):
        scores[block.start : block.stop] = result["scores"]
    return scores
