"""Tokenise a training set once, and find it again."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from posttrain.store.errors import DamagedArtifact
from posttrain.store.local_artifacts import LocalArtifacts
from posttrain.store.progress import task
from posttrain.train.examples import Encoder, Speaker
from posttrain.train.objectives.registry import Shape
from posttrain.train.tokens.blocks import Block, blocks
from posttrain.train.tokens.fit import check_template
from posttrain.train.tokens.key import key
from posttrain.train.tokens.token_set import TokenSet
from posttrain.train.tokens.write import SHARD_TOKENS, write_shards

log = logging.getLogger("posttrain")

_KIND = "tokens"


def tokenise(
    speaker: Speaker,
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
        shape: what a record holds, see `posttrain.train.examples.example`.
        folder: holds any number of sets.
        processes: how many tokenise; None: as many as there are cores where that is worth it. The bytes are the same.
        shard_tokens: a shard of a new set holds as many whole records as fit into so many tokens.

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
        with task("tokenising", records.num_rows, "records") as advance:
            found_blocks = _counted(blocks(encoder, records, max_length, shape, processes), advance)
            counts = write_shards(found_blocks, records, fresh, shard_tokens)
        meta = {"key": wanted, "shape": shape, "max_length": max_length, "records": records.num_rows, **counts}
        made = store.commit(fresh, _KIND, meta)
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


def _counted(made: Iterator[Block], advance: Callable[[int], None]) -> Iterator[Block]:
    for block in made:
        yield block
        advance(len(block.sequences))
