"""Values training rows with OpenDataVal: prints a line of JSON for each line of JSON on the standard input.

    opendataval_values.py < tasks

Tasks and results are those of ``pydvl_values.py``.
"""

import contextlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opendataval.dataval import DataOob, DataShapley, KNNShapley
from opendataval.dataval.margcontrib import TMCSampler
from opendataval.metrics import accuracy
from opendataval.model import ClassifierSkLearnWrapper
from sklearn.linear_model import RidgeClassifier
from sklearn.tree import DecisionTreeClassifier


class Ridge(RidgeClassifier):
    """Returns its prediction as a probability of 1, as OpenDataVal computes accuracy from probabilities."""

    def predict_proba(self, features: Any) -> np.ndarray:
        return (self.predict(features)[:, None] == self.classes_).astype(np.float32)


def evaluator(task: dict[str, Any]) -> Any:
    """Build the task's method with its number of draws."""
    method, draws, state = task["method"], task["draws"], np.random.RandomState(task["seed"])
    if method == "knn_shapley":
        return KNNShapley(k_neighbors=5, random_state=state)
    if method == "data_oob":
        return DataOob(num_models=draws, random_state=state)
    return DataShapley(TMCSampler(mc_epochs=draws, random_state=state))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        folder = Path(task["folder"])
        features, test_features = (
            torch.tensor(np.load(folder / f"{name}.npy")).float() for name in ("features", "records")
        )
        labels, test_labels = (torch.tensor(np.load(folder / f"{name}.npy")) for name in ("labels", "true"))
        classes = int(test_labels.max()) + 1
        one_hot, test_one_hot = (torch.nn.functional.one_hot(array, classes).float() for array in (labels, test_labels))
        base = DecisionTreeClassifier if task["method"] == "data_oob" else Ridge
        model = ClassifierSkLearnWrapper(base, classes)
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            method = evaluator(task).input_data(features, one_hot, test_features, test_one_hot)
            if task["method"] != "knn_shapley":
                method.input_model_metric(model, accuracy)
            values = method.train_data_values().data_values
        seconds = time.perf_counter() - start
        print(json.dumps({"values": np.asarray(values, dtype=float).tolist(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
