"""What OpenDataVal says that training rows are worth: a line of JSON for each line of JSON on the standard input.

    opendataval_values.py < tasks

Tasks and answers are those of ``pydvl_values.py``. Its trainings take weights, which nearest neighbours do not, so that
``neighbours`` is no model here.
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
from opendataval.dataval import BetaShapley, DataBanzhaf, DataOob, DataShapley, KNNShapley, LeaveOneOut
from opendataval.dataval.margcontrib import TMCSampler
from opendataval.metrics import accuracy
from opendataval.model import ClassifierSkLearnWrapper
from sklearn.linear_model import RidgeClassifier
from sklearn.tree import DecisionTreeClassifier


class Ridge(RidgeClassifier):
    """Its prediction as a probability of 1, as accuracy is computed from probabilities here."""

    def predict_proba(self, features: Any) -> np.ndarray:
        return (self.predict(features)[:, None] == self.classes_).astype(np.float32)


def evaluator(task: dict[str, Any]) -> Any:
    """The method with as many draws as asked for."""
    method, draws, state = task["method"], task["draws"], np.random.RandomState(task["seed"])
    if method == "knn_shapley":
        return KNNShapley(k_neighbors=5, random_state=state)
    if method == "data_oob":
        return DataOob(num_models=draws, random_state=state)
    if method == "leave_one_out":
        return LeaveOneOut(random_state=state)
    if method == "banzhaf":
        return DataBanzhaf(num_models=draws, random_state=state)
    sampler = TMCSampler(mc_epochs=draws, random_state=state)
    return BetaShapley(sampler, alpha=16, beta=1) if method == "beta_shapley" else DataShapley(sampler)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        folder = Path(task["folder"])
        features, records = (torch.tensor(np.load(folder / f"{name}.npy")).float() for name in ("features", "records"))
        labels, true = (torch.tensor(np.load(folder / f"{name}.npy")) for name in ("labels", "true"))
        classes = int(true.max()) + 1
        one_hot, true_hot = (torch.nn.functional.one_hot(one, classes).float() for one in (labels, true))
        base = DecisionTreeClassifier if task["method"] == "data_oob" else Ridge
        model = ClassifierSkLearnWrapper(base, classes)
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            one = evaluator(task).input_data(features, one_hot, records, true_hot)
            if task["method"] != "knn_shapley":
                one.input_model_metric(model, accuracy)
            values = one.train_data_values().data_values
        seconds = time.perf_counter() - start
        print(json.dumps({"values": np.asarray(values, dtype=float).tolist(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
