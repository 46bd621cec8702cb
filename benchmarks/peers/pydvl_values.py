"""Values training rows with pyDVL: prints a line of JSON for each line of JSON on the standard input.

    pydvl_values.py < tasks

A task names a ``folder`` with ``features.npy`` (float64 [N, D]), ``labels.npy`` (int64 [N]), ``records.npy`` and
``true.npy`` for evaluation, a ``method``, a number of ``draws``, and a ``seed``. The result has the ``values`` in the
rows' order and the ``seconds`` that they took. An empty result comes first, as soon as the libraries are loaded.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from pydvl.valuation import (
    DataOOBValuation,
    Dataset,
    KNNShapleyValuation,
    MinUpdates,
    ModelUtility,
    NoTruncation,
    PermutationSampler,
    ShapleyValuation,
    SupervisedScorer,
)
from sklearn.ensemble import BaggingClassifier
from sklearn.linear_model import RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier


def valuation(task: dict[str, Any], train: Dataset, test: Dataset) -> Any:
    """Build the valuation to fit; a bagging model is trained here."""
    method, draws, seed = task["method"], task["draws"], task["seed"]
    if method == "knn_shapley":
        return KNNShapleyValuation(KNeighborsClassifier(5), test, progress=False)
    if method == "data_oob":
        x, y = train.data()
        bagging = BaggingClassifier(DecisionTreeClassifier(), n_estimators=draws, random_state=seed)
        return DataOOBValuation(bagging.fit(x, y))
    chance = 1 / len(np.unique(test.data().y))
    scorer = SupervisedScorer("accuracy", test, default=chance)
    utility = ModelUtility(RidgeClassifier(), scorer, show_warnings=False)
    sampler = PermutationSampler(NoTruncation(), seed=seed)
    return ShapleyValuation(utility, sampler, MinUpdates(draws))


def main() -> None:
    warnings.simplefilter("ignore")
    print("{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        folder = Path(task["folder"])
        features, labels, test_features, test_labels = (
            np.load(folder / f"{name}.npy") for name in ("features", "labels", "records", "true")
        )
        train, test = Dataset(features, labels), Dataset(test_features, test_labels)
        start = time.perf_counter()
        result = valuation(task, train, test).fit(train).result
        seconds = time.perf_counter() - start
        values = np.empty(len(labels))
        values[result.indices] = result.values
        print(json.dumps({"values": values.tolist(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
