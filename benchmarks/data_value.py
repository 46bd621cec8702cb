"""Do data values find wrong labels, and how fast? Ours against pyDVL and OpenDataVal.

    python benchmarks/data_value.py --data DIR --peer-python OTHER/bin/python [--second-peer-python THIRD/bin/python]
        [--settings pol,banking] [--methods knn_shapley,tmc_shapley] [--draws 10] [--models 300] [--seed 0]
        [--rows 1000] [--features FILE]

``DIR`` holds ``banking77_train.csv``; the peers have virtual environments of their own (``pip install pydvl==0.10.0``;
``pip install opendataval==1.3.0 transformers==4.35.2``). A fifth of the training labels is replaced by another one, the
evaluation records' are right. *pol* is made by scikit-learn in the shape of OpenDataVal's data set of that name, 1,000
training rows of 26 features and 2 classes; *banking* has Banking77's messages as MiniLM's embeddings.

Everybody values the same rows by the same model and as many draws, on one core: ``draws`` permutations, none truncated
but by OpenDataVal, whose rule is fixed; ``models`` sets or bags. A row more says what ours does with ten times as many
permutations or sets.

``F1`` is of OpenDataVal's rule: k-means parts the values in two, and the lower cluster is taken for wrong. ``lowest``
is the share of wrong labels among the lowest fifth of the values. ``rank`` is Spearman's correlation with a reference:
our values, of sampled ones from 40 times as many draws and others; ``rank to ours`` is with the values in our first row
of the method. Both depend on the draws, so that equal methods with few draws are not alike. ``times`` is the time by
that of the same row.
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from label_errors import embedded, read
from scipy.stats import spearmanr
from sklearn.cluster import KMeans
from sklearn.datasets import make_classification
from threadpoolctl import threadpool_limits

from posttrain.attribution import (
    KNNUtility,
    RidgeUtility,
    Values,
    banzhaf,
    beta_shapley,
    data_oob,
    knn_shapley,
    leave_one_out,
    tmc_shapley,
)

SHARE = 0.2
RECORDS = 500
Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Way = tuple[str, str]

WAYS: list[Way] = [
    ("knn_shapley", "neighbours"),
    ("tmc_shapley", "neighbours"),
    ("tmc_shapley", "ridge"),
    ("beta_shapley", "ridge"),
    ("banzhaf", "ridge"),
    ("leave_one_out", "ridge"),
    ("data_oob", "trees"),
]
SECOND_PEERS = [way for way in WAYS if way != ("tmc_shapley", "neighbours")]
SAMPLED = ("tmc_shapley", "beta_shapley", "banzhaf")
OTHER_SEED = 1000  # numpy's generator of seed 0 is that of [0, 0], so that one permutation would be shared


def polled(rows: int, seed: int) -> Data:
    """Training rows and evaluation records of *pol*'s shape."""
    features, labels = make_classification(
        rows + RECORDS, n_features=26, n_informative=10, n_redundant=6, class_sep=1.5, flip_y=0.0, random_state=seed
    )
    return features[:rows], labels[:rows], features[rows:], labels[rows:]


def messages(rows: int, seed: int, path: Path, cache: Path | None) -> Data:
    """Rows and records of Banking77, classes as even as they come."""
    texts, labels = read(path, None)
    features = embedded(texts, cache)
    order = np.random.default_rng(seed).permutation(len(labels))
    counts = np.zeros(labels.max() + 1, dtype=int)
    turn = np.empty(len(labels), dtype=int)
    for row in order:
        turn[row] = counts[labels[row]]
        counts[labels[row]] += 1
    chosen = order[np.argsort(turn[order], kind="stable")]
    records, trained = chosen[:RECORDS], chosen[RECORDS : RECORDS + rows]
    return features[trained], labels[trained], features[records], labels[records]


def planted(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a fifth is wrong, and which are."""
    generator = np.random.default_rng([seed, 1])
    wrong = np.zeros(len(labels), dtype=bool)
    wrong[generator.permutation(len(labels))[: round(SHARE * len(labels))]] = True
    classes = labels.max() + 1
    given = labels.copy()
    given[wrong] = (labels[wrong] + generator.integers(1, classes, wrong.sum())) % classes
    return given, wrong


def ours(way: Way, data: Data, draws: int, models: int, seed: int) -> Values:
    """Our values; the utility's preparation is part of the time."""
    method, model = way
    if method == "knn_shapley":
        return knn_shapley(*data)
    if method == "data_oob":
        return data_oob(data[0], data[1], bags=models, seed=seed)
    utility = RidgeUtility(*data) if model == "ridge" else KNNUtility(*data)
    if method == "leave_one_out":
        return leave_one_out(utility)
    if method == "banzhaf":
        return banzhaf(utility, samples=models, seed=seed)
    if method == "beta_shapley":
        return beta_shapley(utility, permutations=draws, seed=seed)
    return tmc_shapley(utility, permutations=draws, tolerance=0, seed=seed)


def timed(work: Callable[[], Values]) -> tuple[np.ndarray, float]:
    """Values and seconds."""
    start = time.perf_counter()
    values = work().values
    return values, time.perf_counter() - start


def flagged(values: np.ndarray) -> np.ndarray:
    """The lower of two clusters of the values, bool [N]."""
    clusters = KMeans(2, n_init=10, random_state=0).fit(values[:, None])
    lower: np.ndarray = clusters.labels_ == clusters.cluster_centers_.ravel().argmin()
    return lower


def quality(values: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """F1 of the lower cluster, and the share of wrong labels among as many of the lowest values as there are."""
    known = np.where(np.isnan(values), np.nanmean(values), values)
    found = flagged(known)
    lowest = np.argsort(known, kind="stable")[: wrong.sum()]
    return float(2 * (found & wrong).sum() / (found.sum() + wrong.sum())), float(wrong[lowest].mean())


def alike(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation where both are known."""
    known = ~(np.isnan(first) | np.isnan(second))
    return float(spearmanr(first[known], second[known]).statistic)


class Peer:
    """Another program that values rows when asked."""

    def __init__(self, python: str, script: str) -> None:
        path = Path(__file__).with_name("peers") / script
        self._process = subprocess.Popen([python, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # it has loaded its libraries

    def values(self, **task: Any) -> tuple[np.ndarray, float]:
        """Values and seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return np.array(found["values"]), found["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries of the peers' print lines of their own
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the peer ended with {self._process.wait()}")

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def peers(arguments: argparse.Namespace) -> Iterator[dict[str, Peer]]:
    """The peers that were named."""
    found = {"pyDVL": Peer(arguments.peer_python, "pydvl_values.py")}
    if arguments.second_peer_python:
        found["OpenDataVal"] = Peer(arguments.second_peer_python, "opendataval_values.py")
    try:
        yield found
    finally:
        for peer in found.values():
            peer.close()


def one_setting(data: Data, arguments: argparse.Namespace, draws: int, models: int) -> None:
    """Plant errors, value, and print a table."""
    features, clean, records, true = data
    labels, wrong = planted(clean, arguments.seed)
    given = features, labels, records, true
    print("| method | model | by | draws | F1 | lowest | rank | rank to ours | seconds | times |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder, peers(arguments) as others:
        for name, array in zip(("features", "labels", "records", "true"), given, strict=True):
            np.save(Path(folder) / f"{name}.npy", array)
        for way in WAYS:
            method, model = way
            if arguments.methods and method not in arguments.methods.split(","):
                continue
            count = models if method in ("banzhaf", "data_oob") else draws
            own, seconds = timed(lambda way=way: ours(way, given, draws, models, arguments.seed))
            found = [("ours", count, own, seconds)]
            reference = own
            if method in SAMPLED:
                more, longer = timed(lambda way=way: ours(way, given, draws * 10, models * 10, arguments.seed + 1))
                found.append(("ours", count * 10, more, longer))
                reference = ours(way, given, draws * 40, models * 40, arguments.seed + 2).values
            seed = arguments.seed + OTHER_SEED
            task = {"folder": folder, "method": method, "model": model, "draws": count, "seed": seed}
            for name, peer in others.items():
                if name == "pyDVL" or way in SECOND_PEERS:
                    values, taken = peer.values(**task)
                    found.append((name, count, values, taken))
            for name, drawn, values, taken in found:
                shares = [*quality(values, wrong), alike(values, reference), alike(values, own)]
                cells = [method, model, name, str(drawn) if method in (*SAMPLED, "data_oob") else ""]
                cells += [f"{share:.3f}" for share in shares]
                cells += [f"{taken:.2f}" if taken < 10 else f"{taken:.0f}", f"{taken / seconds:.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Run all settings and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--second-peer-python")
    parser.add_argument("--settings", default="pol,banking")
    parser.add_argument("--methods", help="those that are compared; all where not given")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        small = polled(20, 0)
        for way in WAYS:  # imports are no part of the times
            ours(way, small, 1, 2, 0)
        for setting in arguments.settings.split(","):
            print(f"\n**{setting}**\n", flush=True)
            if setting == "pol":
                data = polled(arguments.rows, arguments.seed)
            else:
                path = arguments.data / "banking77_train.csv"
                data = messages(arguments.rows, arguments.seed, path, arguments.features)
            one_setting(data, arguments, arguments.draws, arguments.models)


if __name__ == "__main__":
    main()
