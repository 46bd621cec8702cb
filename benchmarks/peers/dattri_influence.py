"""What dattri says of a net's training records, for ``benchmarks/influence.py``.

    dattri_influence.py FOLDER

The folder holds ``given.npz`` (``x`` float32 [N, 64], ``y`` int64 [N], ``test_x``, ``test_y``, and ``0/0.weight`` and
so on: the parameters of E models at each checkpoint, the last one trained to the end) and ``settings.json``. The answer
is ``scores.npz``, float64 [N, M] for each method, and ``seconds.json``, with an error's text for a method that failed.
Scores are turned so that helpful records have positive ones.
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
from dattri.algorithm.influence_function import (
    IFAttributorArnoldi,
    IFAttributorCG,
    IFAttributorEKFAC,
    IFAttributorExplicit,
    IFAttributorLiSSA,
)
from dattri.algorithm.tracin import TracInAttributor
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Record = tuple[Tensor, Tensor]


def as_array(scores: Tensor) -> np.ndarray:
    """Float64 [N, M]."""
    found: np.ndarray = scores.detach().double().numpy()
    return found


class Job:
    """The net, its data and what dattri is to be asked."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "settings.json").read_text())
        with np.load(folder / "given.npz") as file:
            self.given = {name: torch.from_numpy(file[name]) for name in file.files}
        width, classes = self.given["0/0.weight"].shape[1], self.given["0/2.weight"].shape[1]
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
        self.train = TensorDataset(self.given["x"], self.given["y"])
        self.test = TensorDataset(self.given["test_x"], self.given["test_y"])
        self.points = len(self.settings["rates"])

    def loaders(self, batch: int) -> tuple[Any, Any]:
        """Of training and test records, in their order."""
        return DataLoader(self.train, batch_size=batch), DataLoader(self.test, batch_size=len(self.test))

    def state(self, point: int, model: int) -> dict[str, Tensor]:
        """The parameters of a model at a checkpoint."""
        prefix = f"{point}/"
        return {name.removeprefix(prefix): self.given[name][model] for name in self.given if name.startswith(prefix)}

    def loss(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """The mean loss of a batch."""
        found = torch.func.functional_call(self.model, parameters, data[0])
        return nn.functional.cross_entropy(found, data[1].long())  # LiSSA hands on labels that are not whole numbers

    def loss_of_one(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """The loss of a record."""
        return self.loss(parameters, (data[0][None], data[1][None]))

    def log_odds(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """Those of a record's right class."""
        logs: Tensor = torch.func.functional_call(self.model, parameters, data[0][None])[0]
        right = torch.arange(len(logs)) == data[1]
        return (logs * right).sum() - logs.masked_fill(right, -torch.inf).logsumexp(0)

    def probability(self, parameters: dict[str, Tensor], data: Record) -> Tensor:
        """That of a record's right class."""
        return torch.exp(-self.loss_of_one(parameters, data))

    def influence(self, kind: Any, batch: int, points: list[dict[str, Tensor]], **settings: object) -> np.ndarray:
        """Scores by a way to invert."""
        given = points[0] if len(points) == 1 else points
        attributor = kind(AttributionTask(self.loss, self.model, given), device="cpu", **settings)
        train, test = self.loaders(batch)
        attributor.cache(train)
        return as_array(attributor.attribute(train, test))

    def tracin(self) -> np.ndarray:
        """Scores over all checkpoints of the first model."""
        states = [self.state(point, 0) for point in range(self.points)]
        task = AttributionTask(self.loss_of_one, self.model, states)
        rates = torch.tensor(self.settings["rates"])
        attributor = TracInAttributor(task, weight_list=rates, normalized_grad=False, device="cpu")
        return as_array(attributor.attribute(*self.loaders(64)))

    def trak(self, models: int) -> np.ndarray:
        """Scores over the last checkpoints of some models."""
        states = [self.state(self.points - 1, model) for model in range(models)]
        task = AttributionTask(self.log_odds, self.model, states[0] if models == 1 else states)
        projector = {"proj_dim": self.settings["dimension"], "proj_type": "rademacher", "device": "cpu"}
        attributor = TRAKAttributor(task, self.probability, projector_kwargs=projector, device="cpu")
        train, test = self.loaders(64)
        attributor.cache(train)
        return as_array(attributor.attribute(test))


def methods(job: Job) -> dict[str, Callable[[], np.ndarray]]:
    """Each method as a function that computes its scores."""
    last, whole = [job.state(job.points - 1, 0)], len(job.train)
    low, high = job.settings["penalty"], 0.1
    found: dict[str, Callable[[], np.ndarray]] = {
        "TracIn, 5 checkpoints": job.tracin,
        "TRAK, dense": lambda: job.trak(1),
        f"TRAK, dense, {job.settings['models']} models": lambda: job.trak(job.settings["models"]),
        "influence, EK-FAC": lambda: job.influence(IFAttributorEKFAC, 64, last, damping=low),
        "influence, EK-FAC, damping 0.01": lambda: job.influence(IFAttributorEKFAC, 64, last, damping=0.01),
    }
    for damping in (low, high):
        settings: dict[str, tuple[Any, dict[str, Any]]] = {
            "Arnoldi of the Hessian, rank 100 of 150": (IFAttributorArnoldi, {"proj_dim": 100, "max_iter": 150}),
            "conjugate gradient on the Hessian": (IFAttributorCG, {"max_iter": 10}),
            "LiSSA on the Hessian": (IFAttributorLiSSA, {"batch_size": 100, "recursion_depth": 300}),
            "exact Hessian": (IFAttributorExplicit, {}),
        }
        for name, (kind, own) in settings.items():
            own["damping" if kind is IFAttributorLiSSA else "regularization"] = damping
            found[f"influence, {name}, damping {damping:g}"] = partial(job.influence, kind, whole, last, **own)
    return found


def main() -> None:
    """Ask all methods and write the answers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    job = Job(folder)
    scores: dict[str, Any] = {}
    said: dict[str, float | str] = {}
    for name, compute in methods(job).items():
        start = time.perf_counter()
        try:
            scores[name] = compute()
            said[name] = time.perf_counter() - start
        except Exception as error:  # noqa: BLE001 - the peer's own errors are of all kinds, and are shown
            said[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    np.savez(folder / "scores.npz", **scores)
    (folder / "seconds.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
