"""How long does choosing from a large pool take? Ours against scikit-learn, small-text, scikit-activeml and apricot.

    python benchmarks/selection.py --peer-python OTHER/bin/python [--rows 20000,1000000] [--n 1000] [--limit 600]

The pool is made: rows of 384 numbers and of length 1 around 3,000 centres with spreads of their own, and probabilities
of 20 labels. Everybody gets the embeddings as they are, in a process of its own with all cores; seconds are those of
the choice, ``GB`` is the largest resident memory with the pool in it. Who needs more than ``--limit`` seconds or more
memory than there is has no result.

What a choice is worth, by method:

- *k-center*: the greatest distance of a row to the nearest chosen one; less is better
- *k-means*: the mean squared distance of a row to the nearest chosen one; less is better
- *facility location*: the mean cosine of a row with the most similar chosen one
- *MMR*: the share of rows that the plain loop chooses too
- *BADGE*: the mean squared distance of a gradient to the nearest chosen one; less is better

on all rows, or on 8,192 drawn ones where there are more than 100,000 (k-center: on all).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.select.selectors.registry import select
from posttrain.select.selectors.similarity import Cosine, Euclidean, OuterProducts, max_similarity

PEER = Path(__file__).parent / "peers" / "active_selection.py"
METHODS = {
    "k_center": ["k_center_small_text", "k_center_scikit_activeml"],
    "diverse": ["k_means_scikit_learn"],
    "diverse by mini-batches": ["k_means_mini_batch"],
    "facility_location": ["facility_location_apricot"],
    "mmr": ["mmr_loop"],
    "badge": ["badge_scikit_activeml"],
}


def made(folder: Path, rows: int) -> None:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(3000, 384)).astype(np.float32) * 0.6
    spreads = generator.uniform(0.2, 1, (3000, 1)).astype(np.float32)
    embeddings = np.empty((rows, 384), np.float32)
    for start in range(0, rows, 50_000):
        part = embeddings[start : start + 50_000]
        group = generator.integers(0, 3000, len(part))
        part[:] = centres[group] + generator.standard_normal(part.shape, np.float32) * spreads[group]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    np.save(folder / "embeddings.npy", embeddings)
    np.save(folder / "probabilities.npy", generator.dirichlet(np.full(20, 0.2), rows).astype(np.float32))


def ours(method: str, folder: Path, n: int) -> dict[str, Any]:
    embeddings, probabilities = np.load(folder / "embeddings.npy"), np.load(folder / "probabilities.npy")
    scores = {"embeddings": embeddings, "probabilities": probabilities}
    name, _, way = method.partition(" by ")
    options = {"mini_batch": 8_192} if way else {}
    start = time.perf_counter()
    chosen = select(name, scores, n, dimensions=None, **options)
    seconds = time.perf_counter() - start
    memory = peak_megabytes()
    return {"seconds": seconds, "megabytes": memory, "rows": chosen.tolist()}


def peak_megabytes() -> int:
    """Largest resident memory of this program: what getrusage says begins with that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024


def run(command: list[str], limit: int) -> dict[str, Any] | str:
    """What a process answers, or why it has no answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"over {limit} s"
    if done.returncode:
        return "out of memory" if done.returncode < 0 or "Memory" in done.stderr else done.stderr.splitlines()[-1][:80]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def worth(method: str, folder: Path, chosen: list[int], plain: list[int]) -> float:
    embeddings, rows = np.load(folder / "embeddings.npy", mmap_mode="r"), np.array(chosen)
    some = np.arange(len(embeddings))
    if len(some) > 100_000 and method != "k_center":
        some = np.sort(np.random.default_rng(1).permutation(len(embeddings))[:8192])
    points = np.concatenate([embeddings[rows], embeddings[some]])
    few, all_others = np.arange(len(rows)), np.arange(len(rows), len(points))
    if method == "mmr":
        return len(set(chosen) & set(plain)) / len(plain)
    if method == "facility_location":
        return float(max_similarity(Cosine.from_rows(points), all_others, few).mean())
    if method == "badge":
        probabilities = np.load(folder / "probabilities.npy")[np.concatenate([rows, some])]
        probabilities[np.arange(len(points)), probabilities.argmax(axis=1)] -= 1
        return float(-2 * max_similarity(OuterProducts.from_rows(probabilities, points), all_others, few).mean())
    squares = -2 * max_similarity(Euclidean.from_rows(points), all_others, few)
    return float(np.sqrt(squares.max())) if method == "k_center" else float(squares.mean())


def main() -> None:
    """Run all sizes and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--rows", default="20000,1000000")
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    for size in arguments.rows.split(","):
        print(f"\n**{int(size):,} rows**\n\n| method | by | seconds | times | GB | worth |", flush=True)
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made(folder, int(size))
            for method in arguments.methods.split(","):
                one_method(method, folder, arguments)


def one_method(method: str, folder: Path, arguments: argparse.Namespace) -> None:
    n = str(arguments.n)
    found = {"ours": run([sys.executable, __file__, "ours", method, str(folder), n], arguments.limit)}
    for peer in METHODS[method]:
        found[peer] = run([arguments.peer_python, str(PEER), peer, str(folder), n], arguments.limit)
    first, last = found["ours"], list(found.values())[-1]
    for name, one in found.items():
        if isinstance(one, str) or isinstance(first, str):
            print(f"| {method} | {name} | {one} | | | |", flush=True)
            continue
        value = worth(method, folder, one["rows"], one["rows"] if isinstance(last, str) else last["rows"])
        times = one["seconds"] / first["seconds"]
        print(
            f"| {method} | {name} | {one['seconds']:.1f} | {times:.1f} | {one['megabytes'] / 1024:.2f} | {value:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        print(json.dumps(ours(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main()
