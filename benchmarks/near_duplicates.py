"""Near duplicates: how many of the true pairs, and how many records a second? Ours, datasketch and text-dedup.

    python benchmarks/near_duplicates.py --data DIR --peer-python OTHER/bin/python
        [--records 25000] [--threshold 0.8] [--repeats 3]

DIR holds ``gsm8k_{train,test}.jsonl`` and ``banking77_{train,test}.csv``. The peers have a virtual environment of their
own (``pip install datasketch==2.0.0 datasets ftfy bitarray click-option-group``, then ``pip install --no-deps
text-dedup==0.4.0``, with the constraints of this project).

Three in five records are real texts: questions, answers and messages. The others are copies of these with planted
edits: a share of the words from 5 % to 100 %, in steps of 5 %, is replaced by words of other texts, in half of the
copies in one stretch and in the others here and there, and every tenth copy has but one typo. The truth is brute force:
the exact Jaccard similarity of the sets of 5-character runs for all pairs of records, as products of sparse matrices,
and the connected components of the pairs at or above the threshold. Precision and recall count pairs of records in one
cluster.

All three work on the same shingles, each in a process of its own on one processor core, one after the other in each
repeat; the peers get texts that are normalised already, ours does that itself within its time. datasketch: 128
permutations, its LSH index for the threshold, and the union of every text with all that its query gives. text-dedup:
its defaults (250 permutations) with its banding for the threshold, and its union-find. Neither verifies its candidates.
Reported are medians of the repeats, in seconds of processor time, which other work on the machine hardly changes.
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

from posttrain.data.records.identity import fold_case

NGRAM = 5
_ROWS_A_BLOCK = 250
_PEERS = {"datasketch": "datasketch_clusters.py", "text-dedup": "text_dedup_clusters.py"}

Labels = npt.NDArray[np.int64]


def real_texts(folder: Path) -> list[str]:
    """Questions and answers of GSM8K, messages of Banking77."""
    found = []
    for part in ("train", "test"):
        lines = (folder / f"gsm8k_{part}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [json.loads(line)[side] for line in lines for side in ("question", "answer")]
        with (folder / f"banking77_{part}.csv").open(encoding="utf-8", newline="") as file:
            found += [row["text"] for row in csv.DictReader(file)]
    return found


def planted(texts: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """``count`` records, shuffled: three in five are ``texts``, the others copies with edits."""
    draws = np.random.default_rng(seed)
    originals = [texts[row] for row in draws.permutation(len(texts))[: count * 3 // 5]]
    words = " ".join(originals).split()
    copies = []
    for number in range(count - len(originals)):
        parts = originals[int(draws.integers(len(originals)))].split()
        if number % 10 == 0:
            text = " ".join(parts)
            place = int(draws.integers(max(1, len(text))))
            copies.append(text[:place] + text[place + 1 :])
            continue
        overlap = 0.05 * (number % 20)
        edits = round((1 - overlap) * len(parts))
        if number // 20 % 2:
            start = int(draws.integers(len(parts) - edits + 1))
            places = np.arange(start, start + edits)
        else:
            places = draws.permutation(len(parts))[:edits]
        for place in places.tolist():
            parts[place] = words[int(draws.integers(len(words)))]
        copies.append(" ".join(parts))
    everything = originals + copies
    return [everything[row] for row in draws.permutation(len(everything))]


def truth(texts: Sequence[str], threshold: float) -> Labels:
    """Components [N] of the pairs with at least this similarity, by comparing all pairs of texts."""
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import connected_components

    numbers: dict[str, int] = {}
    members: list[int] = []
    starts = [0]
    for text in map(fold_case, texts):
        runs = {text[start : start + NGRAM] for start in range(max(1, len(text) - NGRAM + 1))}
        members += [numbers.setdefault(run, len(numbers)) for run in runs]
        starts.append(len(members))
    rows = csr_array((np.ones(len(members), np.int32), members, starts), shape=(len(texts), len(numbers)))
    columns, sizes = rows.T.tocsr(), np.diff(starts)
    left, right = [], []
    for start in range(0, len(texts), _ROWS_A_BLOCK):
        shared = (rows[start : start + _ROWS_A_BLOCK] @ columns).tocoo()
        i, j = shared.row + start, shared.col
        alike = shared.data / (sizes[i] + sizes[j] - shared.data) >= threshold
        left.append(i[alike])
        right.append(j[alike])
    i, j = np.concatenate(left), np.concatenate(right)
    return np.asarray(connected_components(coo_array((np.ones(len(i)), (i, j)), shape=(len(texts),) * 2))[1], np.int64)


def quality(found: Labels, true: Labels) -> dict[str, float]:
    """Precision, recall and F1 of the pairs of records in one cluster."""

    def pairs(*labels: Labels) -> int:
        sizes = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
        return int((sizes * (sizes - 1) // 2).sum())

    both, ours, theirs = pairs(found, true), pairs(found), pairs(true)
    precision, recall = both / max(1, ours), both / max(1, theirs)
    return {"precision": precision, "recall": recall, "f1": 2 * both / max(1, ours + theirs)}


def ours(source: str, threshold: float, target: str) -> None:
    """Cluster with this program, in a process of its own."""
    from posttrain.data.duplicates.near_duplicates import near_duplicates

    texts = json.loads(Path(source).read_text(encoding="utf-8"))
    near_duplicates(["imports what it needs"])
    start = time.process_time()
    clusters = near_duplicates(texts, threshold, NGRAM)
    seconds = time.process_time() - start
    Path(target).write_text(json.dumps({"seconds": seconds, "clusters": clusters.tolist()}), encoding="utf-8")


def run(command: Sequence[str], target: Path) -> dict[str, Any]:
    """What a contender wrote, having run on one core."""
    core = min(os.sched_getaffinity(0))
    subprocess.run(command, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    answer: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return answer


def main() -> None:
    """Run all contenders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--records", type=int, default=25_000)
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    texts = planted(real_texts(arguments.data), arguments.records)
    start = time.perf_counter()
    true = truth(texts, arguments.threshold)
    print(f"{len(texts)} records, {np.mean([len(text) for text in texts]):.0f} characters each on average.")
    print(f"Brute force over all pairs took {time.perf_counter() - start:.0f} s.\n")
    with tempfile.TemporaryDirectory() as folder:
        raw, folded, target = (Path(folder, name) for name in ("raw.json", "folded.json", "clusters.json"))
        raw.write_text(json.dumps(texts), encoding="utf-8")
        folded.write_text(json.dumps([fold_case(text) for text in texts]), encoding="utf-8")
        commands = {"ours": [sys.executable, __file__, "--ours", str(raw), str(arguments.threshold), str(target)]}
        for name, script in _PEERS.items():
            place = str(Path(__file__).parent / "peers" / script)
            given = [str(folded), str(arguments.threshold), str(NGRAM), str(target)]
            commands[name] = [arguments.peer_python, place, *given]
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                answers[name].append(run(command, target))
    speeds = {
        name: len(texts) / statistics.median(answer["seconds"] for answer in found) for name, found in answers.items()
    }
    print("| | records/s | ours is faster by | precision | recall | F1 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, found in answers.items():
        one = quality(np.array(found[0]["clusters"]), true)
        values = " | ".join(f"{one[key]:.4f}" for key in ("precision", "recall", "f1"))
        print(f"| {name} | {speeds[name]:,.0f} | {speeds['ours'] / speeds[name]:.1f}x | {values} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(sys.argv[2], float(sys.argv[3]), sys.argv[4])
    else:
        main()
