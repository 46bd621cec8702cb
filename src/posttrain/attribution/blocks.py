"""Runs numbered work in blocks over processes, and resumes from the blocks that are already on disk."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.jobs.map import open_engine
from posttrain.store.files import make_folder, read_checked, write_checked
from posttrain.store.progress import progress_bar

Floats = npt.NDArray[np.float64]

Rows = npt.NDArray[np.int64]

Arrays = dict[str, npt.NDArray[np.generic]]


def run_blocks(
    work: Callable[[range], Arrays],
    total: int,
    block_size: int,
    description: str,
    *,
    workers: int = 1,
    folder: Path | None = None,
) -> list[Arrays]:
    """Returns the work's result of each block of the numbers 0..total-1, computed now or found in the folder.

    Args:
        work: pickled if there are several workers.
        total: how many numbers there are.
        block_size: how many numbers a worker takes at a time; a killed one loses no more.
        description: of the progress bar.
        workers: number of processes; it changes no digit.
        folder: holds the finished blocks of this work alone; made if missing. None caches none.
    """
    if folder is not None:
        make_folder(folder)
    blocks = [range(start, min(start + block_size, total)) for start in range(0, total, block_size)]
    with (
        # Starting processes costs more than a single block.
        open_engine("inline" if workers == 1 or len(blocks) == 1 else "processes", workers) as engine,
        progress_bar(description, len(blocks), "block") as advance,
    ):
        results = []
        for result in engine.map(_CachedWork(work, folder), blocks):
            advance(1)
            results.append(result)
    return results


@dataclass(frozen=True)
class _CachedWork:
    work: Callable[[range], Arrays]
    folder: Path | None

    def __call__(self, block: range) -> Arrays:
        from threadpoolctl import threadpool_limits

        file = None if self.folder is None else self.folder / f"{block.start:08d}-{block.stop:08d}.block"
        # One thread: BLAS adds up in another order on another number of cores, and the last digits would differ.
        with threadpool_limits(1):
            return cached_arrays(file, lambda: self.work(block))


def cached_arrays(file: Path | None, compute: Callable[[], Arrays]) -> Arrays:
    """Reads arrays from a file; computes and writes them first if the file is missing or damaged.

    Args:
        file: written whole or not at all; None caches nothing.
        compute: returns the arrays.
    """
    if file is None:
        return compute()
    if (content := read_checked(file)) is not None:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    result = compute()
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **result)
    write_checked(file, stream.getvalue())
    return result
