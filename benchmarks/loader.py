"""Packed tokens a second out of the memory map, in one process: ours and its peers.

    python benchmarks/loader.py --peer-python OTHER/bin/python
        [--tokens 40000000] [--mean 300] [--row 4096] [--batch 256] [--shard-tokens 268435456] [--repeats 5]

The peers have a virtual environment of their own: ``pip install torch transformers datasets`` with the constraints of
this project, ``pip install --no-deps mosaicml-streaming==0.13.0``, and what that imports.

The same sequences for all: random ids, lengths from a log-normal distribution, the last two fifths of each supervised.
They are on the disk (and in the page cache after a first pass) in each contender's own format, and are met in one
shuffled order, in rows of at most ``--row`` tokens without padding, with labels, positions and the number of the
sequence for each token, all int32 arrays (the flattening collator: int64 tensors). The time is that of a whole pass
over the rows after a first one; the last token of each row is looked at. Each contender runs in a process of its own on
one core, all one after the other in each repeat; seconds are of processor time, which other work on the machine hardly
changes, and all of it is the contender's own, as nothing waits for a disk.

ours: posttrain's `RowLoader`, without a thread and with one. The training's own batches (`BatchLoader`), which come
with a plan of the attention in rows whose beginnings are shared, are there to compare, and so are tokens gathered
without being packed. datasets + flattening: a memory-mapped Hugging Face data set, torch's DataLoader and transformers'
DataCollatorWithFlattening, which packs as it loads. The other two are given rows that were packed before the time is
taken, so that sequences are never mixed anew: a memory-mapped data set of such rows in NumPy format, and MosaicML
Streaming's shards of them.

MB/s are of the ids, 4 bytes a token; all four arrays are four times as many.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PEERS = {
    "datasets + flattening": "flattening",
    "datasets, rows packed before": "packed",
    "MosaicML Streaming, rows packed before": "streaming",
}
_OURS = {
    "ours": "rows",
    "ours, with a thread": "ahead",
    "ours, tokens alone": "tokens",
    "ours, the training's batches": "training",
}


def sequences(tokens: int, mean: float, seed: int = 0) -> dict[str, np.ndarray]:
    """About so many tokens: ids int32 [T], supervised bool [T], lengths int64 [S]."""
    draws = np.random.default_rng(seed)
    lengths = np.clip(draws.lognormal(np.log(mean) - 0.125, 0.5, round(tokens / mean)), 4, 4000).astype(np.int64)
    ends = np.cumsum(lengths)
    left = np.repeat(ends, lengths) - np.arange(ends[-1])  # tokens up to the sequence's end
    ids = draws.integers(0, 50_000, ends[-1], dtype=np.int32)
    return {"ids": ids, "supervised": left <= np.repeat(lengths * 2 // 5, lengths), "lengths": lengths}


def write_set(found: dict[str, np.ndarray], folder: Path, shard_tokens: int) -> Path:
    """The sequences as a set of ours."""
    import pyarrow as pa

    from posttrain.store.artifacts import LocalArtifacts
    from posttrain.train.data.token_writer import Block, write_shards

    count = len(found["lengths"])
    one = np.ones(count, np.int64)
    rest = np.zeros(count, np.bool_), np.full(count, -1, np.int32), np.zeros(count, np.float32)
    block = Block(found["ids"], found["supervised"], found["lengths"], one, *rest)
    store = LocalArtifacts(folder, folder / "tmp")
    with store.temporary_folder() as fresh:
        records = pa.table({"id": [str(row) for row in range(count)]})
        made = store.commit(fresh, "tokens", write_shards([block], records, fresh, shard_tokens))
    return store.path(made.id)


def ours(kind: str, source: Path, row: int, batch: int) -> None:
    """Print the tokens a second of each of two passes, the first being there to warm up."""
    from posttrain.train.data.batch_sampler import BatchSampler
    from posttrain.train.data.config import LoaderConfig, PhaseConfig
    from posttrain.train.data.loader import BatchLoader
    from posttrain.train.data.row_loader import RowLoader
    from posttrain.train.data.token_set import TokenSet

    units = TokenSet(source)
    order = BatchSampler(len(units), batch, 0, [PhaseConfig(epochs=2)])
    config = LoaderConfig(workers=1 if kind in ("ahead", "training") else 0)

    def taken() -> Iterator[int]:
        if kind == "tokens":
            for step in range(order.steps):
                found = units.take(order.rows(step))
                yield len(found.ids)
        elif kind == "training":
            with BatchLoader(units, order, row, config=config) as training:
                for made in training:
                    yield sum(one.tokens for one in made.packed)
        else:
            with RowLoader(units, order, row, config=config) as rows:
                for made in rows:
                    for one in made.packed:
                        assert one["positions"][-1] >= 0
                    yield len(made.packed.ids)

    steps, tokens, start = order.steps // 2, 0, 0.0
    for step, count in enumerate(taken()):
        if step == steps - 1:
            tokens, start = 0, time.process_time()
        elif step >= steps:
            tokens += count
    print(json.dumps({"tokens_per_second": tokens / (time.process_time() - start)}))


def measured(command: list[str]) -> float:
    """Tokens a second of a contender, having run on one core."""
    core = max(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


def main() -> None:
    """Run all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python")
    parser.add_argument("--peers", nargs="*", choices=list(_PEERS.values()), default=list(_PEERS.values()))
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--mean", type=float, default=300)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256, help="Sequences a step.")
    parser.add_argument("--shard-tokens", type=int, default=2**28)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = sequences(arguments.tokens, arguments.mean)
        source = write_set(found, Path(folder, "ours"), arguments.shard_tokens)
        row, batch = str(arguments.row), str(arguments.batch)
        commands = {
            name: [sys.executable, __file__, "--ours", kind, str(source), row, batch] for name, kind in _OURS.items()
        }
        if arguments.peer_python:
            np.savez(Path(folder, "sequences.npz"), **found)
            script = str(Path(__file__).parent / "peers" / "loader_rows.py")
            for name, kind in _PEERS.items():
                if kind in arguments.peers:
                    peer = [arguments.peer_python, script, kind, folder, row]
                    subprocess.run([*peer, "--write"], check=True, stdout=subprocess.DEVNULL)
                    commands[name] = peer
        count = len(found["lengths"])
        print(f"{count:,} sequences, {len(found['ids']) / count:.0f} tokens each on average, rows of {row} tokens.\n")
        del found
        speeds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                speeds[name].append(measured(command))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print("| | million tokens/s | MB/s of ids | MB/s of all arrays | lowest to highest | ours is faster by |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, median in medians.items():
        low, high = min(speeds[name]) * 4 / 1e6, max(speeds[name]) * 4 / 1e6
        print(
            f"| {name} | {median / 1e6:.1f} | {median * 4 / 1e6:,.0f} | {median * 16 / 1e6:,.0f} |"
            f" {low:,.0f}–{high:,.0f} | {medians['ours'] / median:.1f}x |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
