"""Tokenise a training set once, and find it again."""

import logging
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from posttrain.store.errors import DamagedArtifact
from posttrain.store.files import writing
from posttrain.store.local_artifacts import LocalArtifacts
from posttrain.store.progress import task
from posttrain.train.examples import Encoder, Speaker
from posttrain.train.objectives.registry import Shape
from posttrain.train.tokens.fit import check_template
from posttrain.train.tokens.key import key
from posttrain.train.tokens.shard import shards
from posttrain.train.tokens.token_set import DTYPES, IDS, OFFSETS, RECORDS, SUPERVISED, UNITS, TokenSet

log = logging.getLogger("posttrain")

_KIND = "tokens"


def tokenise(
    speaker: Speaker,
    records: pa.Table,
    max_length: int,
    shape: Shape,
    folder: Path,
    processes: int | None = None,
) -> TokenSet:
    """The records' token ids, made now, or found in the folder where the same were made before.

    What is found is checked to the byte; what is damaged is made again, with a line in the log.

    Args:
        speaker: a language model, or an `Encoder`; its weights are not needed.
        records: rows of the record schema.
        max_length: longer sequences are cut at their beginning, in tokens.
        shape: what a record holds, see `posttrain.train.examples.example`.
        folder: holds any number of sets.
        processes: how many tokenise; None: as many as there are cores where that is worth it. The bytes are the same.

    Raises:
        UserError: a record cannot be used, the template does not fit the tokenizer, or the disk refused.
        WorkError: a process that tokenised was killed.
    """
    encoder = Encoder(speaker.chat, speaker.task)
    wanted = key(encoder, records, max_length, shape)
    store = LocalArtifacts(folder, folder / "tmp")
    if found := _found(store, wanted):
        return TokenSet(found)
    store.remove_abandoned()
    check_template(encoder.chat)
    with store.stage() as fresh:
        counts = _write(fresh, encoder, records, max_length, shape, processes)
        made = store.commit(fresh, _KIND, {"key": wanted, "shape": shape, "max_length": max_length, **counts})
    return TokenSet(store.path(made.id))


def _found(store: LocalArtifacts, wanted: str) -> Path | None:
    for id in store.ids():
        try:
            if store.get(id).meta.get("key") == wanted:
                return store.path(id)
        except DamagedArtifact as damage:
            log.warning("  tokenised data are thrown away: %s", damage)
            store.delete(id)
    return None


def _write(
    fresh: Path, encoder: Encoder, records: pa.Table, max_length: int, shape: Shape, processes: int | None
) -> dict[str, int]:
    """Fill a folder; returns what the manifest says of it."""
    lengths, sequences, cut, targets, margins = ([np.empty(0, dtype)] for dtype in ("i8", "i8", "?", "i4", "f4"))
    largest = supervised = 0
    with (
        writing(fresh),
        (fresh / IDS).open("wb") as ids,
        (fresh / SUPERVISED).open("wb") as mask,
        task("tokenising", records.num_rows, "records") as advance,
    ):
        for shard in shards(encoder, records, max_length, shape, processes):
            _put(ids, shard.ids, IDS)
            _put(mask, shard.supervised, SUPERVISED)
            largest = max(largest, int(shard.ids.max(initial=0)))
            supervised += int(shard.supervised.sum())
            lengths.append(shard.lengths)
            sequences.append(shard.sequences)
            cut.append(shard.cut)
            targets.append(shard.targets)
            margins.append(shard.margins)
            advance(len(shard.sequences))
    offsets, units = (np.cumsum(np.concatenate([[0], *counts])) for counts in (lengths, sequences))
    columns = {
        "id": records["id"].combine_chunks(),
        "cut": np.concatenate(cut),
        "target": np.concatenate(targets),
        "margin": np.concatenate(margins),
    }
    table = pa.table(columns)
    with writing(fresh):
        for values, name in ((offsets, OFFSETS), (units, UNITS)):
            with (fresh / name).open("wb") as file:
                _put(file, values, name)
        with pa.OSFile(str(fresh / RECORDS), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return {
        "records": records.num_rows,
        "sequences": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "supervised_tokens": supervised,
        "largest_id": largest,
    }


def _put(file: BinaryIO, values: np.ndarray, name: str) -> None:
    file.write(np.ascontiguousarray(values, DTYPES[name]).data)
