"""Reads rows of packed tokens with a peer's loader: loader_rows.py KIND FOLDER ROW [--write].

FOLDER holds ``sequences.npz``: ids int32 [T], supervised bool [T], lengths int64 [S]. With ``--write`` the script
writes the peer's own files; without it it reads them in two passes, and prints the tokens a second of the second.
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

_IGNORE_INDEX = -100
_NAMES = ("ids", "labels", "positions", "segments")


def order(count: int) -> np.ndarray:
    """Return the shuffled order of the sequences."""
    return np.random.default_rng(0).permutation(count)


def split_into_rows(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Return the sequences of each row; one that does not fit begins the next row."""
    rows: list[list[int]] = [[]]
    row_tokens = 0
    for sequence in order(len(lengths)).tolist():
        if rows[-1] and row_tokens + lengths[sequence] > max_tokens:
            rows.append([])
            row_tokens = 0
        rows[-1].append(sequence)
        row_tokens += int(lengths[sequence])
    return rows


def prepacked_rows(folder: Path, max_tokens: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows with their labels, positions and segments, int32."""
    data = np.load(folder / "sequences.npz")
    ids, supervised, lengths = data["ids"], data["supervised"], data["lengths"]
    labels = np.where(supervised, ids, _IGNORE_INDEX).astype(np.int32)
    ends = np.cumsum(lengths)
    for sequences in split_into_rows(lengths, max_tokens):
        spans = [slice(ends[sequence] - lengths[sequence], ends[sequence]) for sequence in sequences]
        yield {
            "ids": np.concatenate([ids[span] for span in spans]),
            "labels": np.concatenate([labels[span] for span in spans]),
            "positions": np.concatenate([np.arange(lengths[sequence], dtype=np.int32) for sequence in sequences]),
            "segments": np.repeat(np.arange(len(sequences), dtype=np.int32), lengths[sequences]),
        }


def _first(samples: list[Any]) -> Any:
    return samples[0]


class Flattening:
    """Loads with Hugging Face datasets, torch's DataLoader, and the packing collator of transformers."""

    def write(self, folder: Path, row: int) -> None:
        import datasets

        data = np.load(folder / "sequences.npz")
        labels = np.where(data["supervised"], data["ids"], _IGNORE_INDEX).astype(np.int32)
        ends = np.cumsum(data["lengths"])[:-1]
        columns = {"input_ids": np.split(data["ids"], ends), "labels": np.split(labels, ends)}
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "flattening"))

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        import datasets
        from transformers import DataCollatorWithFlattening

        dataset = datasets.load_from_disk(str(folder / "flattening"))
        rows = split_into_rows(np.load(folder / "sequences.npz")["lengths"], row)
        loader = DataLoader(dataset, batch_sampler=rows, collate_fn=DataCollatorWithFlattening(return_seq_idx=True))
        while True:
            for batch in loader:
                assert batch["position_ids"][0, -1] >= 0
                yield batch["input_ids"].shape[1]
            yield -1


class Prepacked:
    """Loads rows that were packed before with Hugging Face datasets, in NumPy format."""

    def write(self, folder: Path, row: int) -> None:
        import datasets

        columns: dict[str, list[np.ndarray]] = {name: [] for name in _NAMES}
        for arrays in prepacked_rows(folder, row):
            for name in _NAMES:
                columns[name].append(arrays[name])
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "packed"))

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        import datasets

        dataset = datasets.load_from_disk(str(folder / "packed")).with_format("numpy")
        loader = DataLoader(dataset, batch_size=1, sampler=order(len(dataset)).tolist(), collate_fn=_first)
        while True:
            for arrays in loader:
                assert arrays["positions"][-1] >= 0
                yield len(arrays["ids"])
            yield -1


class Streaming:
    """Loads rows that were packed before with MosaicML Streaming, from local shards without compression."""

    def write(self, folder: Path, row: int) -> None:
        from streaming import MDSWriter

        columns = dict.fromkeys(_NAMES, "ndarray:int32")
        with MDSWriter(out=str(folder / "streaming"), columns=columns) as writer:
            for arrays in prepacked_rows(folder, row):
                writer.write(arrays)

    def passes(self, folder: Path, row: int) -> Iterator[int]:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=str(folder / "streaming"), shuffle=True, shuffle_seed=0, batch_size=1)
        loader = DataLoader(dataset, batch_size=1, collate_fn=_first)
        while True:
            for arrays in loader:
                assert arrays["positions"][-1] >= 0
                yield len(arrays["ids"])
            yield -1


_KINDS = {"flattening": Flattening, "packed": Prepacked, "streaming": Streaming}


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
