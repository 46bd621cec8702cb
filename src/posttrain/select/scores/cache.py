"""Finished scores on the disk: by model, by what was computed, and in chunks of records."""

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from posttrain.store.files import make_folder, remove_tree, write_atomically
from posttrain.store.hashing import digest

log = logging.getLogger("posttrain")

KEY = "key"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Shelf:
    """The chunks of one group of scores by one model; a chunk is a table with the records' keys in ``key``.

    Attributes:
        folder: where they lie; None keeps nothing.
    """

    folder: Path | None

    def read(self) -> Iterator[pa.Table]:
        """All chunks, in the order of their names; a damaged one is named and removed, for it to be made again."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".chunk":
                path.unlink()  # what a killed writer left
                continue
            content = path.read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                log.warning("%s is damaged; scoring its records again", path)
                path.unlink()
                continue
            with pa.ipc.open_stream(content[_DIGEST:]) as reader:
                yield reader.read_all()

    def write(self, chunk: pa.Table) -> None:
        """Keep a chunk: all of it or nothing, whenever the process is killed.

        Raises:
            UserError: the disk refused.
        """
        if self.folder is None:
            return
        make_folder(self.folder)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, chunk.schema) as writer:
            writer.write_table(chunk)
        content = sink.getvalue().to_pybytes()
        path = self.folder / f"{digest(chunk[KEY].to_pylist())[:32]}.chunk"
        write_atomically(path, hashlib.sha256(content).digest() + content)


@dataclass(frozen=True)
class ScoreCache:
    """Scores by model.

    Attributes:
        folder: where they lie, a folder a model in it; None keeps nothing.
    """

    folder: Path | None = None

    def shelf(self, model: str, group: str) -> Shelf:
        """Where a model's scores of one group lie; a model without an id has no place."""
        return Shelf(self.folder / model / group if self.folder and model else None)

    def keep_only(self, models: Collection[str]) -> None:
        """Remove the scores of all other models."""
        if self.folder is None or not self.folder.is_dir():
            return
        for one in sorted(self.folder.iterdir()):
            if one.name not in models:
                remove_tree(one)
