"""Measures how well data values find wrong labels, and how fast, against pyDVL and OpenDataVal.

    python benchmarks/data_value.py --data DIR --peer-python OTHER/bin/python [--second-peer-python THIRD/bin/python]
        [--settings pol,banking] [--methods knn_shapley,tmc_shapley] [--draws 10] [--models 300] [--seed 0]
        [--rows 1000] [--features FILE]

``DIR`` holds ``banking77_train.csv``; the peers have virtual environments of their own (``pip install pydvl==0.10.0``;
``pip install opendataval==1.3.0 transformers==4.35.2``). A fifth of the training labels is replaced by another one, the
evaluation records' are right. *pol* is made by scikit-learn in the shape of OpenDataVal's data set of that name, 1,000
training rows of 26 features and 2 classes; *banking* has Banking77's messages as MiniLM's embeddings.

All programs value the same rows with the same model and the same number of draws, on one core: ``draws`` permutations,
which only OpenDataVal truncates, by a fixed rule; ``models`` bags. A second row of ours has ten times as many
permutations.

``F1`` scores OpenDataVal's rule: k-means splits the values into two clusters, and the lower one is flagged as wrong.
``lowest`` is the share of wrong labels among the lowest fifth of the values. ``rank`` is Spearman's correlation with a
reference: our values, for sampled methods those of 40 times as many draws with another seed. ``rank to ours`` is the
correlation with the values in our first row of the method. Both depend on the draws, so that equal methods with few
draws are not alike. ``times`` is the time divided by that of our first row.
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
from label_errors import embed_texts, read_banking77
from scipy.stats import spearmanr
from sklearn.cluster import KMeans
from sklearn.datasets import make_classification
from sklearn.tree import DecisionTreeClassifier
from threadpoolctl import threadpool_limits

from posttrain.attribution.data_oob import data_oob
from posttrain.attribution.knn_shapley import knn_shapley
from posttrain.attribution.ridge import RidgeUtility
from posttrain.attribution.tmc_shapley import tmc_shapley

SHARE = 0.2
RECORDS = 500
Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Valuation = tuple[str, str]

VALUATIONS: list[Valuation] = [("knn_shapley", "neighbours"), ("tmc_shapley", "ridge"), ("data_oob", "trees")]
PEER_SEED_OFFSET = 1000  # numpy's generator of seed 0 equals that of [0, 0], so that one permutation would be shared


def pol_data(rows: int, seed: int) -> Data:
    """Make training rows and evaluation records of *pol*'s shape."""
    features, labels = make_classification(
        rows + RECORDS, n_features=26, n_informative=10, n_redundant=6, class_sep=1.5, flip_y=0.0, random_state=seed
    )
    return features[:rows], labels[:rows], features[rows:], labels[rows:]


def banking_data(rows: int, seed: int, path: Path, cache: Path | None) -> Data:
    """Draw training rows and evaluation records of Banking77, with classes as equally frequent as possible."""
    texts, labels = read_banking77(path, None)
    features = embed_texts(texts, cache)
    order = np.random.default_rng(seed).permutation(len(labels))
    counts = np.zeros(labels.max() + 1, dtype=int)
    rank_in_class = np.empty(len(labels), dtype=int)
    for row in order:
        rank_in_class[row] = counts[labels[row]]
        counts[labels[row]] += 1
    selected = order[np.argsort(rank_in_class[order], kind="stable")]
    test, train = selected[:RECORDS], selected[RECORDS : RECORDS + rows]
    return features[train], labels[train], features[test], labels[test]


def plant_errors(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Replace a fifth of the labels; return the noisy labels, and bool [N], the wrong ones."""
    generator = np.random.default_rng([seed, 1])
    is_wrong = np.zeros(len(labels), dtype=bool)
    is_wrong[generator.permutation(len(labels))[: round(SHARE * len(labels))]] = True
    classes = labels.max() + 1
    noisy_labels = labels.copy()
    noisy_labels[is_wrong] = (labels[is_wrong] + generator.integers(1, classes, is_wrong.sum())) % classes
    return noisy_labels, is_wrong


def ours(valuation: Valuation, data: Data, draws: int, models: int, seed: int) -> np.ndarray:
    """Return our values; the utility's preparation is part of the time."""
    method, _ = valuation
    if method == "knn_shapley":
        return knn_shapley(*data)
    if method == "data_oob":
        return data_oob(data[0], data[1], DecisionTreeClassifier(), bags=models, seed=seed)[0]
    return tmc_shapley(RidgeUtility(*data), permutations=draws, tolerance=0, seed=seed)


def time_values(compute: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the values and the seconds that they took."""
    start = time.perf_counter()
    values = compute()
    return values, time.perf_counter() - start


def lower_cluster(values: np.ndarray) -> np.ndarray:
    """Return the lower of two clusters of the values, bool [N]."""
    clusters = KMeans(2, n_init=10, random_state=0).fit(values[:, None])
    lower: np.ndarray = clusters.labels_ == clusters.cluster_centers_.ravel().argmin()
    return lower


def quality(values: np.ndarray, is_wrong: np.ndarray) -> tuple[float, float]:
    """Return the F1 of flagging the lower cluster, and the precision of flagging as many lowest values as are wrong."""
    finite_values = np.where(np.isnan(values), np.nanmean(values), values)
    is_flagged = lower_cluster(finite_values)
    lowest = np.argsort(finite_values, kind="stable")[: is_wrong.sum()]
    f1 = 2 * (is_flagged & is_wrong).sum() / (is_flagged.sum() + is_wrong.sum())
    return float(f1), float(is_wrong[lowest].mean())


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's rank correlation over the rows that have both values."""
    is_finite = ~(np.isnan(first) | np.isnan(second))
    return float(spearmanr(first[is_finite], second[is_finite]).statistic)


class Peer:
    """A process of another program that values rows on request."""

    def __init__(self, python: str, script: str) -> None:
        path = Path(__file__).with_name("peers") / script
        self._process = subprocess.Popen([python, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read_result()  # the peer prints an empty one as soon as its libraries are loaded

    def values(self, **task: Any) -> tuple[np.ndarray, float]:
        """Return the values and the seconds that they took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        result = self._read_result()
        return np.array(result["values"]), result["seconds"]

    def _read_result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # the peers' libraries print lines of their own
                result: dict[str, Any] = json.loads(line)
                return result
        raise RuntimeError(f"the peer ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def open_peers(arguments: argparse.Namespace) -> Iterator[dict[str, Peer]]:
    """Start the peers that the arguments name, and end them."""
    peers = {"pyDVL": Peer(arguments.peer_python, "pydvl_values.py")}
    if arguments.second_peer_python:
        peers["OpenDataVal"] = Peer(arguments.second_peer_python, "opendataval_values.py")
    try:
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def run_setting(data: Data, arguments: argparse.Namespace, draws: int, models: int) -> None:
    """Plant label errors, value the rows with all programs, and print a table."""
    features, clean_labels, test_features, test_labels = data
    labels, is_wrong = plant_errors(clean_labels, arguments.seed)
    noisy_data = features, labels, test_features, test_labels
    print("| method | model | by | draws | F1 | lowest | rank | rank to ours | seconds | times |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder, open_peers(arguments) as peers:
        for name, array in zip(("features", "labels", "records", "true"), noisy_data, strict=True):
            np.save(Path(folder) / f"{name}.npy", array)
        for valuation in VALUATIONS:
            method, model = valuation
            if arguments.methods and method not in arguments.methods.split(","):
                continue
            count = models if method == "data_oob" else draws
            our_values, our_seconds = time_values(
                lambda valuation=valuation: ours(valuation, noisy_data, draws, models, arguments.seed)
            )
            runs = [("ours", count, our_values, our_seconds)]
            reference = our_values
            if method == "tmc_shapley":
                values, seconds = time_values(
                    lambda valuation=valuation: ours(valuation, noisy_data, draws * 10, models * 10, arguments.seed + 1)
                )
                runs.append(("ours", count * 10, values, seconds))
                reference = ours(valuation, noisy_data, draws * 40, models * 40, arguments.seed + 2)
            seed = arguments.seed + PEER_SEED_OFFSET
            task = {"folder": folder, "method": method, "draws": count, "seed": seed}
            for name, peer in peers.items():
                values, seconds = peer.values(**task)
                runs.append((name, count, values, seconds))
            for name, run_draws, values, seconds in runs:
                scores = [
                    *quality(values, is_wrong),
                    rank_correlation(values, reference),
                    rank_correlation(values, our_values),
                ]
                cells = [method, model, name, "" if method == "knn_shapley" else str(run_draws)]
                cells += [f"{score:.3f}" for score in scores]
                cells += [f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}", f"{seconds / our_seconds:.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Run all settings and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--second-peer-python")
    parser.add_argument("--settings", default="pol,banking")
    parser.add_argument("--methods", help="the methods to compare; all by default")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--features", type=Path, help="file that caches the embeddings")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        small = pol_data(20, 0)
        for valuation in VALUATIONS:  # a first run of each, so that no time below includes an import
            ours(valuation, small, 1, 2, 0)
        for setting in arguments.settings.split(","):
            print(f"\n**{setting}**\n", flush=True)
            if setting == "pol":
                data = pol_data(arguments.rows, arguments.seed)
            else:
                path = arguments.data / "banking77_train.csv"
                data = banking_data(arguments.rows, arguments.seed, path, arguments.features)
            run_setting(data, arguments, arguments.draws, arguments.models)


if __name__ == "__main__":
    main()
