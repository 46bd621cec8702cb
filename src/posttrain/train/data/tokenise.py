"""Tokenises a training set once, in parallel, and finds it again by its key."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.jobs.map import ProcessEngine
from posttrain.jobs.process import available_cores
from posttrain.store.artifacts import LocalArtifacts
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.hashing import digest, file_digest
from posttrain.store.progress import progress_bar
from posttrain.train.data.compatibility import check_template
from posttrain.train.data.config import RecordShape
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

FORMAT = 4
"""Raised by hand when other bytes are written for the same records."""

_BLOCK_RECORDS = 512

_PARALLEL_FROM = 8192  # records; with fewer, starting processes takes longer than they save


def tokenise(
    source: ChatEncoder,
    records: pa.Table,
    max_length: int,
    shape: RecordShape,
    folder: Path,
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenSet:
    """Tokenises records, or loads the token set that was made of the same before.

    A cached set is checked to the byte; a damaged one is made again, with a line in the log.

    Args:
        source: a language model, or an `Encoder`; its weights are not needed.
        records: rows of the record schema.
        max_length: longer sequences are cut at their beginning, in tokens.
        shape: contents of a record, see `posttrain.train.data.encoding.build_example`.
        folder: folder of any number of sets.
        processes: number of processes; None: one per core, if there are enough records. The bytes are the same.
        shard_tokens: tokens of a shard of a new set, which holds whole records.

    Raises:
        UserError: a record cannot be used, the template does not fit the tokenizer, or the disk refused.
        WorkError: a tokenising process was killed.
    """
    encoder = Encoder(source.chat, source.task)
    key = token_set_key(encoder, records, max_length, shape)
    store = LocalArtifacts(folder, folder / "tmp")
    if cached := _find(store, key):
        return TokenSet(cached)
    # A process killed while it wrote leaves an unfinished folder.
    store.remove_abandoned()
    # Not before the cache was looked at: a set that exists was checked when it was made.
    check_template(encoder.chat)
    with store.temporary_folder() as fresh:
        with progress_bar("tokenising", records.num_rows, "records") as advance:
            blocks = _with_progress(tokenise_blocks(encoder, records, max_length, shape, processes), advance)
            counts = write_shards(blocks, records, fresh, shard_tokens)
        meta = {"key": key, "shape": shape, "max_length": max_length, "records": records.num_rows, **counts}
        artifact = store.commit(fresh, _KIND, meta)
    return TokenSet(store.path(artifact.id))


def _find(store: LocalArtifacts, key: str) -> Path | None:
    for id in store.ids():
        try:
            if store.get(id).meta.get("key") == key:
                return store.path(id)
        except DamagedArtifactError as damage:
            log.warning("  tokenised data are thrown away: %s", damage)
            store.delete(id)
    return None


def _with_progress(blocks: Iterator[Block], advance: Callable[[int], None]) -> Iterator[Block]:
    for block in blocks:
        yield block
        advance(len(block.sequences))


def token_set_key(encoder: Encoder, records: pa.Table, max_length: int, shape: RecordShape) -> str:
    """Returns 64 hex characters, the same for two sets with the same tokens."""
    import tokenizers
    import transformers

    task = encoder.task
    return digest(
        {
            "format": FORMAT,
            # A new version of the tokenizers may split text in another way.
            "versions": [transformers.__version__, tokenizers.__version__],
            "tokenizer": _tokenizer_digest(encoder.chat.tokenizer),
            "template": encoder.chat.tokenizer.chat_template,
            "stop_ids": sorted(encoder.chat.stop_ids),
            "task": {"system": task.system, "template": task.full_template},
            # Only a classifier's targets depend on the labels: adding one must not throw other sets away.
            "labels": task.label_set if shape == "class" else None,
            "max_length": max_length,
            "shape": shape,
            "records": content_digest(records),
        }
    )


def content_digest(records: pa.Table) -> str:
    """Digests the columns that decide records' tokens."""
    # Ids do not do: two records of one id may differ in white space or in their label.
    names = [name for name in TOKEN_COLUMNS if name in records.column_names]
    sha256 = hashlib.sha256(json.dumps(names).encode())
    for batch in records.select(names).combine_chunks().to_batches(max_chunksize=65_536):
        sha256.update(batch.serialize())
    return sha256.hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str:
    """Digests the tokenizer's vocabulary, rules and special tokens."""
    named = [type(tokenizer).__name__, tokenizer.special_tokens_map]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # Truncation and padding are set by whoever called the tokenizer last, and change no token here.
        content: Any = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    else:
        with tempfile.TemporaryDirectory() as folder:
            content = sorted(file_digest(Path(file)) for file in tokenizer.save_pretrained(folder))
    return hashlib.sha256(json.dumps([named, content], sort_keys=True, default=str).encode()).hexdigest()


def tokenise_blocks(
    encoder: Encoder, records: pa.Table, max_length: int, shape: RecordShape, processes: int | None
) -> Iterator[Block]:
    """Tokenises all records in their order, a block at a time; the blocks do not depend on the number of processes.

    Args:
        processes: number of processes; None: one per core, if there are enough records.

    Raises:
        TooLong: the first record that cannot be used is too long; those like it are counted.
        UserError: it has another fault.
        WorkError: a process was killed.
    """
    records = records.select([name for name in (*TOKEN_COLUMNS, *SOURCE_COLUMNS) if name in records.column_names])
    parts = [records.slice(start, _BLOCK_RECORDS) for start in range(0, records.num_rows, _BLOCK_RECORDS)]
    if processes is None:
        processes = available_cores() if records.num_rows >= _PARALLEL_FROM else 1
    if processes == 1 or len(parts) < 2:
        blocks: Generator[Block | UserError, None, None] = (
            _try_block(encoder, part, max_length, shape) for part in parts
        )
    else:
        blocks = _by_processes(encoder, parts, max_length, shape, min(processes, len(parts)))
    too_long: ExampleTooLong | None = None
    with closing(blocks):
        for block in blocks:
            if isinstance(block, ExampleTooLong):
                too_long = too_long.and_others(1 + block.others) if too_long else block
            elif too_long:
                continue  # only further long records are counted from here on
            elif isinstance(block, UserError):
                raise block
            else:
                yield block
    if too_long:
        raise too_long


def _by_processes(
    encoder: Encoder, parts: list[pa.Table], max_length: int, shape: RecordShape, processes: int
) -> Generator[Block | UserError, None, None]:
    function = partial(_read_block, encoder, max_length, shape)
    try:
        with ProcessEngine(processes) as engine:
            yield from engine.map(function, map(_to_ipc, parts))
    except WorkError:
        fix = "set train.loader.processes to 1, or free some memory"
        raise WorkError(f"a process that tokenised was killed: {fix}") from None


def _to_ipc(records: pa.Table) -> pa.Buffer:
    """Serialises records."""
    # Pickle would take the whole table along with a slice of it.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as stream:
        stream.write_table(records)
    return sink.getvalue()


def _read_block(encoder: Encoder, max_length: int, shape: RecordShape, sent: pa.Buffer) -> Block | UserError:
    return _try_block(encoder, pa.ipc.open_stream(sent).read_all(), max_length, shape)


def _try_block(encoder: Encoder, records: pa.Table, max_length: int, shape: RecordShape) -> Block | UserError:
    """Returns a block, or the error of its first bad record."""
    # Returned and not raised: an earlier block that is still in work may have an error, which comes first.
    try:
        return _block(encoder, records, max_length, shape)
    except UserError as error:
        return error


def _block(encoder: Encoder, records: pa.Table, max_length: int, shape: RecordShape) -> Block:
    encoded = build_examples(encoder, records, max_length, shape)
    sequences = [sequence for example in encoded for sequence in example.unit]
    return Block(
        np.fromiter(chain.from_iterable(sequence.ids for sequence in sequences), np.int32),
        np.fromiter(chain.from_iterable(sequence.supervised for sequence in sequences), np.bool_),
        np.array([len(sequence.ids) for sequence in sequences], np.int64),
        np.array([len(example.unit) for example in encoded], np.int64),
        np.array([example.cut for example in encoded], np.bool_),
        np.array([example.target for example in encoded], np.int32),
    )
