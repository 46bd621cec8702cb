"""Rows of packed tokens from a peer's loader: loader_rows.py KIND FOLDER ROW [--write].

FOLDER holds ``sequences.npz``: ids int32 [T], supervised bool [T], lengths int64 [S]. With ``--write`` the peer's own
files are made, without it they are read for two passes, and the tokens a second of the second are printed.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_IGNORED = -100
_NAMES = ("ids", "labels", "positions", "segments")


def order(count: int) -> np.ndarray:
    """The sequences' order."""
    return np.random.default_rng(0).permutation(count)


def cut(lengths: np.ndarray, row: int) -> list[list[int]]:
    """The sequences of each row, the next row beginning where one does not fit."""
    found: list[list[int]] = [[]]
    filled = 0
    for number in order(len(lengths)).tolist():
        if found[-1] and filled + lengths[number] > row:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += int(lengths[number])
    return found


def packed_before(folder: Path, row: int) -> Iterator[dict[str, np.ndarray]]:
    """The rows with their labels, positions and segments, int32."""
    data = np.load(folder / "sequences.npz")
    ids, supervised, lengths = data["ids"], data["supervised"], data["lengths"]
    labels = np.where(supervised, ids, _IGNORED).astype(np.int32)
    ends = np.cumsum(lengths)
    for numbers in cut(lengths, row):
        parts = [slice(ends[one] - lengths[one], ends[one]) for one in numbers]
        yield {
            "ids": np.concatenate([ids[part] for part in parts]),
            "labels": np.concatenate([labels[part] for part in parts]),
            "positions": np.concatenate([np.arange(lengths[one], dtype=np.int32) for one in numbers]),
            "segments": np.repeat(np.arange(len(numbers), dtype=np.int32), lengths[numbers]),
        }


def _first(samples: list[Any]) -> Any:
    return samples[0]


class Flattening:
    """Hugging Face datasets, torch's DataLoader, and the collator of transformers that packs."""

    def write(self, folder: Path, row: int) -> None:
        import datasets

        data = np.load(folder / "sequences.npz")
        labels = np.where(data["supervised"], data["ids"], _IGNORED).astype(np.int32)
        ends = np.cumsum(data["lengths"])[:-1]
        columns = {"input_ids": np.split(data["ids"], ends), "labels": np.split(labels, ends)}
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "flattening"))

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        import datasets
        from transformers import DataCollatorWithFlattening

        found = datasets.load_from_disk(str(folder / "flattening"))
        rows = cut(np.load(folder / "sequences.npz")["lengths"], row)
        loader = DataLoader(found, batch_sampler=rows, collate_fn=DataCollatorWithFlattening(return_seq_idx=True))
        while True:
            for made in loader:
                assert made["position_ids"][0, -1] >= 0
                yield made["input_ids"].shape[1]
            yield -1


class Packed:
    """Hugging Face datasets of rows that were packed before, in NumPy format."""

    def write(self, folder: Path, row: int) -> None:
        import datasets

        made: dict[str, list[np.ndarray]] = {name: [] for name in _NAMES}
        for one in packed_before(folder, row):
            for name in _NAMES:
                made[name].append(one[name])
        datasets.Dataset.from_dict(made).save_to_disk(str(folder / "packed"))

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        import datasets

        found = datasets.load_from_disk(str(folder / "packed")).with_format("numpy")
        loader = DataLoader(found, batch_size=1, sampler=order(len(found)).tolist(), collate_fn=_first)
        while True:
            for made in loader:
                assert made["positions"][-1] >= 0
                yield len(made["ids"])
            yield -1


class Streaming:
    """MosaicML Streaming's shards of rows that were packed before, in local files without compression."""

    def write(self, folder: Path, row: int) -> None:
        from streaming import MDSWriter

        columns = dict.fromkeys(_NAMES, "ndarray:int32")
        with MDSWriter(out=str(folder / "streaming"), columns=columns) as writer:
            for one in packed_before(folder, row):
                writer.write(one)

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        from streaming import StreamingDataset

        found = StreamingDataset(local=str(folder / "streaming"), shuffle=True, shuffle_seed=0, batch_size=1)
        loader = DataLoader(found, batch_size=1, collate_fn=_first)
        while True:
            for made in loader:
                assert made["positions"][-1] >= 0
                yield len(made["ids"])
            yield -1


_KINDS = {"flattening": Flattening, "packed": Packed, "streaming": Streaming}


def main() -> None:
    """Write the peer's files, or time a pass over them."""
    kind, folder, row = _KINDS[sys.argv[1]](), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if "--write" in sys.argv:
        kind.write(folder, row)
        return
    passes, tokens, start = 0, 0, 0.0
    for count in kind.passes(folder, row):
        if count >= 0:
            tokens += count
            continue
        passes += 1
        if passes == 2:
            print(json.dumps({"tokens_per_second": tokens / (time.process_time() - start)}), flush=True)
            return
        tokens, start = 0, time.process_time()


if __name__ == "__main__":
    main()
