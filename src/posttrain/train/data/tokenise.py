"""Tokenises a training set once, in parallel, and finds it again by its key."""

import hashlib
import json
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.store.artifacts import LocalArtifacts
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.hashing import digest, file_digest
from posttrain.store.progress import progress_bar
from posttrain.train.data.compatibility import check_template
from posttrain.train.data.config import Shape
from posttrain.train.data.encoding import (
    SOURCE_COLUMNS,
    TOKEN_COLUMNS,
    ChatEncoder,
    Encoder,
    ExampleTooLong,
    build_examples,
)
from posttrain.train.data.token_set import TokenSet
from posttrain.train.data.token_writer import SHARD_TOKENS, Block, write_shards

log = logging.getLogger("posttrain")

_KIND = "tokens"

FORMAT = 2
"""Raised by hand when other bytes are written for the same records."""

_BLOCK_RECORDS = 512

_BLOCKS_PER_PROCESS = 4  # blocks that wait for each process

_PARALLEL_FROM = 8192  # records; with fewer, starting processes takes longer than they save

_encoder: Encoder | None = None  # of a process that only tokenises


def tokenise(
    speaker: ChatEncoder,
    records: pa.Table,
    max_length: int,
    shape: Shape,
    folder: Path,
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenSet:
    """The records' token ids, made now, or found in the folder where the same were made before.

    What is found is checked to the byte; what is damaged is made again, with a line in the log.

    Args:
        speaker: a language model, or an `Encoder`; its weights are not needed.
        records: rows of the record schema.
        max_length: longer sequences are cut at their beginning, in tokens.
        shape: what a record holds, see `posttrain.train.data.encoding.build_example`.
        folder: holds any number of sets.
        processes: how many tokenise; None: as many as there are cores where that is worth it. The bytes are the same.
        shard_tokens: a shard of a new set holds as many whole records as fit into so many tokens.

    Raises:
        UserError: a record cannot be used, the template does not fit the tokenizer, or the disk refused.
        WorkError: a process that tokenised was killed.
    """
    encoder = Encoder(speaker.chat, speaker.task)
    wanted = token_set_key(encoder, records, max_length, shape)
    store = LocalArtifacts(folder, folder / "tmp")
    if found := _find(store, wanted):
        return TokenSet(found)
    store.remove_abandoned()
    check_template(encoder.chat)
    with store.temporary_folder() as fresh:
        with progress_bar("tokenising", records.num_rows, "records") as advance:
            found_blocks = _with_progress(tokenise_blocks(encoder, records, max_length, shape, processes), advance)
            counts = write_shards(found_blocks, records, fresh, shard_tokens)
        meta = {"key": wanted, "shape": shape, "max_length": max_length, "records": records.num_rows, **counts}
        made = store.commit(fresh, _KIND, meta)
    return TokenSet(store.path(made.id))


def _find(store: LocalArtifacts, wanted: str) -> Path | None:
    for id in store.ids():
        try:
            if store.get(id).meta.get("key") == wanted:
                return store.path(id)
        except DamagedArtifactError as damage:
            log.warning("  tokenised data are thrown away: %s", damage)
            store.delete(id)
    return None


def _with_progress(made: Iterator[Block], advance: Callable[[int], None]) -> Iterator[Block]:
    for block in made:
        yield block
        advance(len(block.sequences))


def token_set_key(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> str:
    """64 hex characters that two sets share whose tokens are the same."""
    import tokenizers
    import transformers

    task = encoder.task
    return digest(
        {
            "format": FORMAT,
            "versions": [transformers.__version__, tokenizers.__version__],
            "tokenizer": _tokenizer_digest(encoder.chat.tokenizer),
            "template": encoder.chat.tokenizer.chat_template,
            "stop_ids": sorted(encoder.chat.stop_ids),
            "task": {"system": task.system, "template": task.template},
            "labels": task.label_set if shape == "class" else None,
            "max_length": max_length,
            "shape": shape,
            "records": content_digest(records),
        }
    )


def content_digest(records: pa.Table) -> str:
    """Of what decides records' tokens. Ids do not do: two of one id may differ in white space or in their label."""
    names = [name for name in TOKEN_COLUMNS if name in records.column_names]
    found = hashlib.sha256(json.dumps(names).encode())
    for batch in records.select(names).combine_chunks().to_batches(max_chunksize=65_536):
        found.update(batch.serialize())
    return found.hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str:
    """A digest of the tokenizer's vocabulary, rules and special tokens, without what calling it changes."""
    named = [type(tokenizer).__name__, tokenizer.special_tokens_map]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        content: Any = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    else:
        with tempfile.TemporaryDirectory() as folder:
            content = sorted(file_digest(Path(file)) for file in tokenizer.save_pretrained(folder))
    return hashlib.sha256(json.dumps([named, content], sort_keys=True, default=str).encode()).hexdigest()


def tokenise_blocks(
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
    records = records.select([name for name in (*TOKEN_COLUMNS, *SOURCE_COLUMNS) if name in records.column_names])
    parts = [records.slice(start, _BLOCK_RECORDS) for start in range(0, records.num_rows, _BLOCK_RECORDS)]
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = processes if records.num_rows >= _PARALLEL_FROM else 1
    if processes == 1 or len(parts) < 2:
        made: Generator[Block | UserError, None, None] = (
            _try_block(encoder, part, max_length, shape) for part in parts
        )
    else:
        made = _by_processes(encoder, parts, max_length, shape, min(processes, len(parts)))
    too_long: ExampleTooLong | None = None
    with closing(made):
        for found in made:
            if isinstance(found, ExampleTooLong):
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
    pool = ProcessPoolExecutor(processes, initializer=_init_process, initargs=(encoder,), env=alone)
    left = iter(parts)

    def submit(count: int) -> list[Any]:
        return [pool.submit(_in_process, _to_ipc(part), max_length, shape) for part in islice(left, count)]

    try:
        waiting = deque(submit(_BLOCKS_PER_PROCESS * processes))
        while waiting:
            found = waiting.popleft().result()
            waiting.extend(submit(1))
            yield found
    except BrokenProcessPool:
        fix = "set train.loader.processes to 1, or free some memory"
        raise WorkError(f"a process that tokenised was killed: {fix}") from None
    finally:
        pool.shutdown(wait=True, kill_workers=True)


def _to_ipc(records: pa.Table) -> pa.Buffer:
    """Records as bytes; pickling a part of a table would take the whole of it along."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as stream:
        stream.write_table(records)
    return sink.getvalue()


def _init_process(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _in_process(sent: pa.Buffer, max_length: int, shape: Shape) -> Block | UserError:
    assert _encoder is not None
    return _try_block(_encoder, pa.ipc.open_stream(sent).read_all(), max_length, shape)


def _try_block(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> Block | UserError:
    """A block, or what is wrong with its first bad record: a block before it may hold another one."""
    try:
        return _block(encoder, records, max_length, shape)
    except UserError as error:
        return error


def _block(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> Block:
    found = build_examples(encoder, records, max_length, shape)
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
