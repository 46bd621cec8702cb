"""Computes dattri's scores of a network's training records, for ``benchmarks/influence.py``.

    dattri_influence.py FOLDER

The folder holds ``inputs.npz`` (``x`` float32 [N, 64], ``y`` int64 [N], ``test_x``, ``test_y``, and ``0.weight`` and so
on: the parameters of E models) and ``settings.json``. The results are ``scores.npz``, float64 [N, M] for each method,
and ``seconds.json``, with the error message of a method that failed. Scores are positive for helpful records.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorEKFAC
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Record = tuple[Tensor, Tensor]


def as_array(scores: Tensor) -> np.ndarray:
    """Convert the scores to a float64 array [N, M]."""
    array: np.ndarray = scores.detach().double().numpy()
    return array


class Job:
    """The network, its data and the calls of dattri's methods."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "settings.json").read_text())
        with np.load(folder / "inputs.npz") as file:
            self.arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        width, classes = self.arrays["0.weight"].shape[1], self.arrays["2.weight"].shape[1]
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
        self.train = TensorDataset(self.arrays["x"], self.arrays["y"])
        self.test = TensorDataset(self.arrays["test_x"], self.arrays["test_y"])

    def loaders(self, batch: int) -> tuple[Any, Any]:
        """Return loaders of the training and test records, in their order."""
        return DataLoader(self.train, batch_size=batch), DataLoader(self.test, batch_size=len(self.test))

    def state(self, model: int) -> dict[str, Tensor]:
        """Return the parameters of a model."""
        return {name: value[model] for name, value in self.arrays.items() if name[0].isdigit()}

    def loss(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """Compute the mean loss of a batch."""
        logits = torch.func.functional_call(self.model, parameters, data[0])
        return nn.functional.cross_entropy(logits, data[1])

    def record_loss(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """Compute the loss of a record."""
        return self.loss(parameters, (data[0][None], data[1][None]))

    def log_odds(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """Compute the log-odds of a record's right class."""
        logits: Tensor = torch.func.functional_call(self.model, parameters, data[0][None])[0]
        is_right = torch.arange(len(logits)) == data[1]
        return (logits * is_right).sum() - logits.masked_fill(is_right, -torch.inf).logsumexp(0)

    def probability(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """Compute the probability of a record's right class."""
        return torch.exp(-self.record_loss(parameters, data))

    def influence(self, attributor_class: Any, batch: int, **settings: object) -> np.ndarray:
        """Compute influence scores of the first model with one of dattri's solvers."""
        task = AttributionTask(self.loss, self.model, self.state(0))
        attributor = attributor_class(task, device="cpu", **settings)
        train, test = self.loaders(batch)
        attributor.cache(train)
        return as_array(attributor.attribute(train, test))

    def trak(self, models: int) -> np.ndarray:
        """Compute scores over the first ``models`` models."""
        states = [self.state(model) for model in range(models)]
        task = AttributionTask(self.log_odds, self.model, states[0] if models == 1 else states)
        projector = {"proj_dim": self.settings["dimension"], "proj_type": "rademacher", "device": "cpu"}
        attributor = TRAKAttributor(task, self.probability, projector_kwargs=projector, device="cpu")
        train, test = self.loaders(64)
        attributor.cache(train)
        return as_array(attributor.attribute(test))


def methods(job: Job) -> dict[str, Callable[[], np.ndarray]]:
    """Return each method as a function that computes its scores."""
    result = {
        "TRAK, dense": partial(job.trak, 1),
        f"TRAK, dense, {job.settings['models']} models": partial(job.trak, job.settings["models"]),
        "influence, EK-FAC, damping 0.01": partial(job.influence, IFAttributorEKFAC, 64, damping=0.01),
        "influence, EK-FAC": partial(job.influence, IFAttributorEKFAC, 64, damping=job.settings["penalty"]),
    }
    for damping in (job.settings["penalty"], 0.1):
        result[f"influence, conjugate gradient on the Hessian, damping {damping:g}"] = partial(
            job.influence, IFAttributorCG, len(job.train), max_iter=10, regularization=damping
        )
    return result


def main() -> None:
    """Run all methods and write their scores and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    job = Job(folder)
    scores: dict[str, Any] = {}
    outcomes: dict[str, float | str] = {}
    for name, compute in methods(job).items():
        start = time.perf_counter()
        try:
            scores[name] = compute()
            outcomes[name] = time.perf_counter() - start
        except Exception as error:  # noqa: BLE001 - the peer raises errors of all kinds; the table shows them
            outcomes[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    np.savez(folder / "scores.npz", **scores)
    (folder / "seconds.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
