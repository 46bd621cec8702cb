"""Measures the packed tokens a second of loaders that read from a memory map in one process: ours and its peers.

    python benchmarks/loader.py --peer-python OTHER/bin/python
        [--tokens 40000000] [--mean 300] [--row 4096] [--batch 256] [--shard-tokens 268435456] [--repeats 5]

The peers have a virtual environment of their own: ``pip install torch transformers datasets`` with the constraints of
this project, ``pip install --no-deps mosaicml-streaming==0.13.0``, and what that imports.

All contenders read the same sequences: random ids, lengths from a log-normal distribution, the last two fifths of each
supervised. The sequences are on the disk (and in the page cache after a first pass) in each contender's own format. The
loader yields them in one shuffled order, in rows of at most ``--row`` tokens without padding, with labels, positions
and the index of the sequence for each token, all int32 arrays (the flattening collator: int64 tensors). The time is
that of a whole pass over the rows after a first one; the benchmark reads the last token of each row. Each contender
runs in a process of its own on one core, all one after the other in each repeat. Seconds are processor time, which
other work on the machine hardly changes; all of it is the contender's own, as nothing waits for a disk.

ours: posttrain's `RowLoader`, without a thread and with one. For comparison there are the training's own batches
(`BatchLoader`), which include an attention plan for rows with shared prefixes, and tokens gathered without packing.
datasets + flattening: a memory-mapped Hugging Face data set, torch's DataLoader and transformers'
DataCollatorWithFlattening, which packs as it loads. The other two read rows that were packed before the timing, so that
sequences are never mixed anew: a memory-mapped data set of such rows in NumPy format, and MosaicML Streaming's shards
of them.

MB/s count the ids, 4 bytes a token; all four arrays together are four times as many.
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
    """Make sequences of about so many tokens: ids int32 [T], supervised bool [T], lengths int64 [S]."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(mean) - 0.125, 0.5, round(tokens / mean)), 4, 4000).astype(np.int64)
    ends = np.cumsum(lengths)
    distance_to_end = np.repeat(ends, lengths) - np.arange(ends[-1])
    ids = generator.integers(0, 50_000, ends[-1], dtype=np.int32)
    return {"ids": ids, "supervised": distance_to_end <= np.repeat(lengths * 2 // 5, lengths), "lengths": lengths}


def write_set(arrays: dict[str, np.ndarray], folder: Path, shard_tokens: int) -> Path:
    """Write the sequences as a token set of posttrain's; return its folder."""
    import pyarrow as pa

    from posttrain.store.artifacts import LocalArtifacts
    from posttrain.train.data.token_writer import Block, write_shards

    count = len(arrays["lengths"])
    ones = np.ones(count, np.int64)
    defaults = np.zeros(count, np.bool_), np.full(count, -1, np.int32), np.zeros(count, np.float32)
    block = Block(arrays["ids"], arrays["supervised"], arrays["lengths"], ones, *defaults)
    store = LocalArtifacts(folder, folder / "tmp")
    with store.temporary_folder() as scratch:
        records = pa.table({"id": [str(row) for row in range(count)]})
        artifact = store.commit(scratch, "tokens", write_shards([block], records, scratch, shard_tokens))
    return store.path(artifact.id)


def ours(kind: str, source: Path, row: int, batch: int) -> None:
    """Read all batches of two passes, and print the tokens a second of the second; the first warms up."""
    from posttrain.train.data.batch_sampler import BatchSampler
    from posttrain.train.data.config import LoaderConfig, PhaseConfig
    from posttrain.train.data.loader import BatchLoader
    from posttrain.train.data.row_loader import RowLoader
    from posttrain.train.data.token_set import TokenSet

    token_set = TokenSet(source)
    sampler = BatchSampler(len(token_set), batch, 0, [PhaseConfig(epochs=2)])
    config = LoaderConfig(workers=1 if kind in ("ahead", "training") else 0)

    def token_counts() -> Iterator[int]:
        if kind == "tokens":
            for step in range(sampler.steps):
                block = token_set.take(sampler.rows(step))
                yield len(block.ids)
        elif kind == "training":
            with BatchLoader(token_set, sampler, row, config=config) as batches:
                for batch in batches:
                    yield sum(micro_batch.tokens for micro_batch in batch.packed)
        else:
            with RowLoader(token_set, sampler, row, config=config) as row_batches:
                for row_batch in row_batches:
                    for packed_row in row_batch.packed:
                        assert packed_row["positions"][-1] >= 0
                    yield len(row_batch.packed.ids)

    steps, tokens, start = sampler.steps // 2, 0, 0.0
    for step, count in enumerate(token_counts()):
        if step == steps - 1:
            tokens, start = 0, time.process_time()
        elif step >= steps:
            tokens += count
    print(json.dumps({"tokens_per_second": tokens / (time.process_time() - start)}))


def run(command: list[str]) -> float:
    """Run a contender on one core; return its tokens a second."""
    core = max(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return float(json.loads(process.stdout.splitlines()[-1])["tokens_per_second"])


def main() -> None:
    """Run all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python")
    parser.add_argument("--peers", nargs="*", choices=list(_PEERS.values()), default=list(_PEERS.values()))
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--mean", type=float, default=300)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256, help="sequences a step")
    parser.add_argument("--shard-tokens", type=int, default=2**28)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arrays = sequences(arguments.tokens, arguments.mean)
        source = write_set(arrays, Path(folder, "ours"), arguments.shard_tokens)
        row, batch = str(arguments.row), str(arguments.batch)
        commands = {
            name: [sys.executable, __file__, "--ours", kind, str(source), row, batch] for name, kind in _OURS.items()
        }
        if arguments.peer_python:
            np.savez(Path(folder, "sequences.npz"), **arrays)
            script = str(Path(__file__).parent / "peers" / "loader_rows.py")
            for name, kind in _PEERS.items():
                if kind in arguments.peers:
                    peer = [arguments.peer_python, script, kind, folder, row]
                    subprocess.run([*peer, "--write"], check=True, stdout=subprocess.DEVNULL)
                    commands[name] = peer
        count = len(arrays["lengths"])
        print(f"{count:,} sequences, {len(arrays['ids']) / count:.0f} tokens each on average, rows of {row} tokens.\n")
        del arrays
        speeds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                speeds[name].append(run(command))
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
