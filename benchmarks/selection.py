"""Times selection from a large pool, against scikit-learn, small-text, scikit-activeml and apricot.

    python benchmarks/selection.py --peer-python OTHER/bin/python [--rows 20000,1000000] [--n 1000] [--limit 600]

The pool is synthetic: rows of 384 numbers and of length 1 around 3,000 centres with spreads of their own, and
probabilities of 20 labels. Every program gets the embeddings as they are, in a process of its own with all cores; the
seconds are those of the selection, ``GB`` is the peak of resident memory, with the pool. A program that needs more than
``--limit`` seconds, or more memory than the machine has, has no result.

``worth`` measures the quality of a selection on all rows, or on 8,192 random ones if there are more than 100,000:

- *k-means*: the mean squared distance of a row to the nearest selected one; less is better
- *facility location*: the mean cosine of a row with the most similar selected one
- *BADGE*: the mean squared distance of a gradient to the nearest selected one; less is better
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
from posttrain.select.selectors.similarity import Euclidean, OuterProducts, max_similarity

PEER_SCRIPT = Path(__file__).parent / "peers" / "active_selection.py"
METHODS = {
    "diverse": ["k_means_scikit_learn"],
    "facility_location": ["facility_location_apricot"],
    "badge": ["badge_scikit_activeml"],
}


def write_pool(folder: Path, rows: int) -> None:
    """Write the embeddings and probabilities of a synthetic pool."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(3000, 384)).astype(np.float32) * 0.6
    spreads = generator.uniform(0.2, 1, (3000, 1)).astype(np.float32)
    embeddings = np.empty((rows, 384), np.float32)
    for start in range(0, rows, 50_000):
        block = embeddings[start : start + 50_000]
        group = generator.integers(0, 3000, len(block))
        block[:] = centres[group] + generator.standard_normal(block.shape, np.float32) * spreads[group]
        block /= np.linalg.norm(block, axis=1, keepdims=True)
    np.save(folder / "embeddings.npy", embeddings)
    np.save(folder / "probabilities.npy", generator.dirichlet(np.full(20, 0.2), rows).astype(np.float32))


def ours(method: str, folder: Path, n: int) -> dict[str, Any]:
    """Select with this program; return the seconds, the peak memory and the rows."""
    embeddings, probabilities = np.load(folder / "embeddings.npy"), np.load(folder / "probabilities.npy")
    scores = {"embeddings": embeddings, "probabilities": probabilities}
    start = time.perf_counter()
    selected = select(method, scores, n, dimensions=None)
    seconds = time.perf_counter() - start
    memory = peak_megabytes()
    return {"seconds": seconds, "megabytes": memory, "rows": selected.tolist()}


def peak_megabytes() -> int:
    """Return the peak of this process's resident memory; that of getrusage would start with the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024


def run(command: list[str], limit: int) -> dict[str, Any] | str:
    """Run a process; return the JSON that it prints, or the reason why it has no result."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"over {limit} s"
    if process.returncode:
        out_of_memory = process.returncode < 0 or "Memory" in process.stderr
        return "out of memory" if out_of_memory else process.stderr.splitlines()[-1][:80]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def quality(method: str, folder: Path, selected: list[int]) -> float:
    """Return the quality of a selection."""
    embeddings, rows = np.load(folder / "embeddings.npy", mmap_mode="r"), np.array(selected)
    sample = np.arange(len(embeddings))
    if len(sample) > 100_000:
        sample = np.sort(np.random.default_rng(1).permutation(len(embeddings))[:8192])
    points = np.concatenate([embeddings[rows], embeddings[sample]])
    selected_points, sample_points = np.arange(len(rows)), np.arange(len(rows), len(points))
    if method == "facility_location":  # the rows have length 1
        return float(1 + max_similarity(Euclidean.from_rows(points), sample_points, selected_points).mean())
    if method == "badge":
        probabilities = np.load(folder / "probabilities.npy")[np.concatenate([rows, sample])]
        probabilities[np.arange(len(points)), probabilities.argmax(axis=1)] -= 1
        gradients = OuterProducts.from_rows(probabilities, points)
        return float(-2 * max_similarity(gradients, sample_points, selected_points).mean())
    return float(-2 * max_similarity(Euclidean.from_rows(points), sample_points, selected_points).mean())


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
            write_pool(folder, int(size))
            for method in arguments.methods.split(","):
                run_method(method, folder, arguments)


def run_method(method: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Run one method with all programs, and print a row for each."""
    n = str(arguments.n)
    results = {"ours": run([sys.executable, __file__, "ours", method, str(folder), n], arguments.limit)}
    for peer in METHODS[method]:
        results[peer] = run([arguments.peer_python, str(PEER_SCRIPT), peer, str(folder), n], arguments.limit)
    ours_result = results["ours"]
    for name, result in results.items():
        if isinstance(result, str) or isinstance(ours_result, str):
            print(f"| {method} | {name} | {result} | | | |", flush=True)
            continue
        value = quality(method, folder, result["rows"])
        seconds, ratio = result["seconds"], result["seconds"] / ours_result["seconds"]
        gigabytes = result["megabytes"] / 1024
        print(f"| {method} | {name} | {seconds:.1f} | {ratio:.1f} | {gigabytes:.2f} | {value:.4f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        print(json.dumps(ours(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main()
