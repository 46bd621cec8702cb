"""Records tokenised a block at a time, in this process or in others."""

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.store.errors import UserError, WorkError
from posttrain.train.examples import COLUMNS, PLACE, Encoder, TooLong, examples
from posttrain.train.objectives.registry import Shape
from posttrain.train.tokens.flat import Tokens

_RECORDS = 512
_AHEAD = 4  # blocks that wait for each process
_LARGE = 8192  # records; with fewer, starting processes takes longer than they save

_encoder: Encoder | None = None  # of a process that only tokenises


@dataclass(frozen=True, eq=False)
class Block(Tokens):
    """The tokens of U records, and what else is known of them.

    Args:
        cut: bool [U].
        targets: int32 [U], see `Example`.
        margins: float32 [U].
    """

    cut: np.ndarray
    targets: np.ndarray
    margins: np.ndarray


def blocks(
    encoder: Encoder, records: pa.Table, max_length: int, shape: Shape, processes: int | None
) -> Iterator[Block]:
    """All records in their order, some at a time; what they hold does not depend on who made them.

    Args:
        processes: how many tokenise; None: as many as there are cores where that is worth it.

    Raises:
        TooLong: the first record that cannot be used is too long; those like it are counted.
        UserError: something else is wrong with it.
        WorkError: a process was killed.
    """
    records = records.select([name for name in (*COLUMNS, *PLACE) if name in records.column_names])
    parts = [records.slice(start, _RECORDS) for start in range(0, records.num_rows, _RECORDS)]
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = processes if records.num_rows >= _LARGE else 1
    if processes == 1 or len(parts) < 2:
        made: Generator[Block | UserError, None, None] = (_tried(encoder, part, max_length, shape) for part in parts)
    else:
        made = _by_processes(encoder, parts, max_length, shape, min(processes, len(parts)))
    too_long: TooLong | None = None
    with closing(made):
        for found in made:
            if isinstance(found, TooLong):
                too_long = too_long.and_others(1 + found.others) if too_long else found
            elif too_long:
                continue  # only counted from here on
            elif isinstance(found, UserError):
                raise found
            else:
                yield found
    if too_long:
        raise too_long


def _by_processes(
    encoder: Encoder, parts: list[pa.Table], max_length: int, shape: Shape, processes: int
) -> Generator[Block | UserError, None, None]:
    # Unlike the standard library's, these processes do not run the main script again, which may have no guard against
    # that and would begin a training of its own.
    from joblib.externals.loky import ProcessPoolExecutor

    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pool = ProcessPoolExecutor(processes, initializer=_begin, initargs=(encoder,), env=alone)
    left = iter(parts)

    def submit(count: int) -> list[Any]:
        return [pool.submit(_in_process, _sent(part), max_length, shape) for part in islice(left, count)]

    try:
        waiting = deque(submit(_AHEAD * processes))
        while waiting:
            found = waiting.popleft().result()
            waiting.extend(submit(1))
            yield found
    except BrokenProcessPool:
        fix = "set train.loader.processes to 1, or free some memory"
        raise WorkError(f"a process that tokenised was killed: {fix}") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)


def _sent(records: pa.Table) -> pa.Buffer:
    """Records as bytes; pickling a part of a table would take the whole of it along."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as stream:
        stream.write_table(records)
    return sink.getvalue()


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _in_process(sent: pa.Buffer, max_length: int, shape: Shape) -> Block | UserError:
    assert _encoder is not None
    return _tried(_encoder, pa.ipc.open_stream(sent).read_all(), max_length, shape)


def _tried(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> Block | UserError:
    """A block, or what is wrong with its first bad record: a block before it may hold another one."""
    try:
        return _block(encoder, records, max_length, shape)
    except UserError as error:
        return error


def _block(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> Block:
    found = examples(encoder, records, max_length, shape)
    sequences = [sequence for one in found for sequence in one.unit]
    return Block(
        np.fromiter(chain.from_iterable(sequence.ids for sequence in sequences), np.int32),
        np.fromiter(chain.from_iterable(sequence.supervised for sequence in sequences), np.bool_),
        np.array([len(sequence.ids) for sequence in sequences], np.int64),
        np.array([len(one.unit) for one in found], np.int64),
        np.array([one.cut for one in found], np.bool_),
        np.array([one.target for one in found], np.int32),
        np.array([one.margin for one in found], np.float32),
    )
