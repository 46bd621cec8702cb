"""Measures the precision, recall and speed of near-duplicate clusters: ours, datasketch's and text-dedup's.

    python benchmarks/near_duplicates.py --data DIR --peer-python OTHER/bin/python
        [--records 25000] [--threshold 0.8] [--repeats 3]

DIR holds ``gsm8k_{train,test}.jsonl`` and ``banking77_{train,test}.csv``. The peers have a virtual environment of their
own (``pip install datasketch==2.0.0 datasets ftfy bitarray click-option-group``, then ``pip install --no-deps
text-dedup==0.4.0``, with the constraints of this project).

Three in five records are real texts: questions, answers and messages. The others are copies of these with planted
edits: a share of the words from 5 % to 100 %, in steps of 5 %, is replaced by words of other texts, in half of the
copies in one stretch and in the others at random positions, and every tenth copy has only one typo. The truth is found
by brute force: the exact Jaccard similarity of the sets of 5-character runs for all pairs of records, as products of
sparse matrices, and the connected components of the pairs at or above the threshold. Precision and recall count pairs
of records in one cluster.

All three use the same shingles, each in a process of its own on one processor core, one after the other in each repeat;
the peers get normalised texts, ours normalises them within its time. datasketch: 128 permutations, its LSH index for
the threshold, and the union of every text with all results of its query. text-dedup: its defaults (250 permutations)
with its banding for the threshold, and its union-find. Neither peer verifies its candidates. The table gives medians of
the repeats, in seconds of processor time, which other work on the machine hardly changes.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.records.record import fold_case

NGRAM = 5
_BLOCK_ROWS = 250
_PEER_SCRIPTS = {"datasketch": "datasketch_clusters.py", "text-dedup": "text_dedup_clusters.py"}

Labels = npt.NDArray[np.int64]


def real_texts(folder: Path) -> list[str]:
    """Return the questions and answers of GSM8K and the messages of Banking77."""
    texts = []
    for split in ("train", "test"):
        lines = (folder / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()
        texts += [json.loads(line)[field] for line in lines for field in ("question", "answer")]
        with (folder / f"banking77_{split}.csv").open(encoding="utf-8", newline="") as file:
            texts += [row["text"] for row in csv.DictReader(file)]
    return texts


def plant_duplicates(texts: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return ``count`` records, shuffled: three in five are among ``texts``, the others are copies with edits."""
    generator = np.random.default_rng(seed)
    originals = [texts[row] for row in generator.permutation(len(texts))[: count * 3 // 5]]
    vocabulary = " ".join(originals).split()
    copies = []
    for number in range(count - len(originals)):
        words = originals[int(generator.integers(len(originals)))].split()
        if number % 10 == 0:
            text = " ".join(words)
            position = int(generator.integers(max(1, len(text))))
            copies.append(text[:position] + text[position + 1 :])
            continue
        overlap = 0.05 * (number % 20)
        edits = round((1 - overlap) * len(words))
        if number // 20 % 2:
            start = int(generator.integers(len(words) - edits + 1))
            positions = np.arange(start, start + edits)
        else:
            positions = generator.permutation(len(words))[:edits]
        for position in positions.tolist():
            words[position] = vocabulary[int(generator.integers(len(vocabulary)))]
        copies.append(" ".join(words))
    all_texts = originals + copies
    return [all_texts[row] for row in generator.permutation(len(all_texts))]


def truth(texts: Sequence[str], threshold: float) -> Labels:
    """Return the components [N] of the pairs with at least this similarity, by comparing all pairs of texts."""
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import connected_components

    shingle_ids: dict[str, int] = {}
    indices: list[int] = []
    starts = [0]
    for text in map(fold_case, texts):
        shingles = {text[start : start + NGRAM] for start in range(max(1, len(text) - NGRAM + 1))}
        indices += [shingle_ids.setdefault(shingle, len(shingle_ids)) for shingle in shingles]
        starts.append(len(indices))
    rows = csr_array((np.ones(len(indices), np.int32), indices, starts), shape=(len(texts), len(shingle_ids)))
    columns, sizes = rows.T.tocsr(), np.diff(starts)
    left_rows, right_rows = [], []
    for start in range(0, len(texts), _BLOCK_ROWS):
        intersections = (rows[start : start + _BLOCK_ROWS] @ columns).tocoo()
        i, j = intersections.row + start, intersections.col
        is_similar = intersections.data / (sizes[i] + sizes[j] - intersections.data) >= threshold
        left_rows.append(i[is_similar])
        right_rows.append(j[is_similar])
    i, j = np.concatenate(left_rows), np.concatenate(right_rows)
    return np.asarray(connected_components(coo_array((np.ones(len(i)), (i, j)), shape=(len(texts),) * 2))[1], np.int64)


def quality(clusters: Labels, expected: Labels) -> dict[str, float]:
    """Return precision, recall and F1 of the pairs of records in one cluster."""

    def count_pairs(*labels: Labels) -> int:
        sizes = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
        return int((sizes * (sizes - 1) // 2).sum())

    hits, cluster_pairs, true_pairs = count_pairs(clusters, expected), count_pairs(clusters), count_pairs(expected)
    precision, recall = hits / max(1, cluster_pairs), hits / max(1, true_pairs)
    return {"precision": precision, "recall": recall, "f1": 2 * hits / max(1, cluster_pairs + true_pairs)}


def ours(source: str, threshold: float, target: str) -> None:
    """Cluster with this program, in a process of its own."""
    from posttrain.data.similarity.near_duplicates import near_duplicates

    texts = json.loads(Path(source).read_text(encoding="utf-8"))
    near_duplicates(["a first call, so that the time below includes no imports"])
    start = time.process_time()
    clusters = near_duplicates(texts, threshold)
    seconds = time.process_time() - start
    Path(target).write_text(json.dumps({"seconds": seconds, "clusters": clusters.tolist()}), encoding="utf-8")


def run(command: Sequence[str], target: Path) -> dict[str, Any]:
    """Run a contender on one core; return the JSON that it wrote."""
    core = min(os.sched_getaffinity(0))
    subprocess.run(command, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return result


def main() -> None:
    """Run all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--records", type=int, default=25_000)
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    texts = plant_duplicates(real_texts(arguments.data), arguments.records)
    start = time.perf_counter()
    true_clusters = truth(texts, arguments.threshold)
    print(f"{len(texts)} records, {np.mean([len(text) for text in texts]):.0f} characters each on average.")
    print(f"Brute force over all pairs took {time.perf_counter() - start:.0f} s.\n")
    with tempfile.TemporaryDirectory() as folder:
        raw_file, folded_file, clusters_file = (
            Path(folder, name) for name in ("raw.json", "folded.json", "clusters.json")
        )
        raw_file.write_text(json.dumps(texts), encoding="utf-8")
        folded_file.write_text(json.dumps([fold_case(text) for text in texts]), encoding="utf-8")
        commands = {
            "ours": [sys.executable, __file__, "--ours", str(raw_file), str(arguments.threshold), str(clusters_file)]
        }
        for name, script in _PEER_SCRIPTS.items():
            path = str(Path(__file__).parent / "peers" / script)
            settings = [str(folded_file), str(arguments.threshold), str(NGRAM), str(clusters_file)]
            commands[name] = [arguments.peer_python, path, *settings]
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                results[name].append(run(command, clusters_file))
    speeds = {
        name: len(texts) / statistics.median(result["seconds"] for result in repeats)
        for name, repeats in results.items()
    }
    print("| | records/s | ours is faster by | precision | recall | F1 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, repeats in results.items():
        scores = quality(np.array(repeats[0]["clusters"]), true_clusters)
        values = " | ".join(f"{scores[key]:.4f}" for key in ("precision", "recall", "f1"))
        print(f"| {name} | {speeds[name]:,.0f} | {speeds['ours'] / speeds[name]:.1f}x | {values} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(sys.argv[2], float(sys.argv[3]), sys.argv[4])
    else:
        main()
