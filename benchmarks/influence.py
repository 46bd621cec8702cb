"""Do scores foretell retraining? The linear datamodelling score of each method, ours and dattri's.

    python benchmarks/influence.py --peer-python OTHER/bin/python [--subsets 60] [--seeds 5] [--quick]

The peer has a virtual environment of its own (``pip install torch==2.13.0 dattri==0.3.0``).

A net of 64, 32 and 10 units learns 1,000 handwritten digits (scikit-learn's), a tenth of them with a wrong label, by
300 steps of Adam over all records, with a penalty of 0.001 times half the squared length of the parameters, which is
also the damping unless a row says otherwise. It is trained again from other seeds on random halves of the records, and
what a method says of a half is the sum of its records' scores. For each of 200 test digits that is ranked against the
log-odds of the right class under the models that learnt the half, a mean over the seeds; the score is Spearman's
correlation, a mean over test digits with its standard error (S. Park et al. 2023, arXiv:2303.14186, section 2). All
methods judge the same models, with one thread; the seconds are those of all that a method computes from the
checkpoints. Rows with 5 models average over them. The peer's influence functions are of the Hessian, EK-FAC's aside.
Of dampings from 1e-7 to 0.1 and batches of 8, 64 and 1,000 records, 0.01 and 64 are among the best for its EK-FAC.
"""

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; the peer inherits it

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from torch import Tensor, nn

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.ekfac import Ekfac
from posttrain.attribution.influence.ihvp.solver import Solution
from posttrain.attribution.influence.influence_functions import influence_functions
from posttrain.attribution.influence.losses import CrossEntropy
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import AdamMoments, Checkpoint, less, tracin
from posttrain.attribution.influence.trak import trak
from posttrain.store.errors import UserError

TRAIN, TEST, HIDDEN, CLASSES = 1000, 200, 32, 10
STEPS, RATE, PENALTY = 300, 0.01, 1e-3
POINTS = (60, 120, 180, 240, 300)
MODELS = 5
DIMENSION = 256
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@dataclass(frozen=True)
class Digits:
    """Inputs float32 [N, 64] from 0 to 1 and classes int64 [N], of training and of test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    """The digits in a random order; a tenth of the training labels is wrong."""
    generator = np.random.default_rng(0)
    found = load_digits()
    order = generator.permutation(len(found.target))[: TRAIN + TEST]
    x = torch.tensor(found.data[order] / 16, dtype=torch.float32)
    y = torch.tensor(found.target[order])
    wrong = torch.from_numpy(generator.permutation(TRAIN)[: TRAIN // 10])
    y[wrong] = (y[wrong] + torch.from_numpy(generator.integers(1, CLASSES, len(wrong)))) % CLASSES
    return Digits(x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:])


@dataclass(frozen=True)
class Trained:
    """Parameters and Adam's moments of several models at a step, each [E, ...]."""

    step: int
    parameters: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]


def logits(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Of several models, each with inputs of its own [E, N, 64]: [E, N, 10]."""
    hidden = torch.baddbmm(parameters["0.bias"][:, None], x, parameters["0.weight"].transpose(1, 2)).relu()
    return torch.baddbmm(parameters["2.bias"][:, None], hidden, parameters["2.weight"].transpose(1, 2))


def train(data: Digits, rows: Tensor, seeds: list[int]) -> list[Trained]:
    """Train a model on each set of rows, int64 [E, n], from each seed, side by side; the points on their way."""
    shapes = [(HIDDEN, 64), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
    drawn: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in zip(NAMES, shapes, strict=True):
            bound = (64 if name.startswith("0") else HIDDEN) ** -0.5
            drawn[name].append((2 * torch.rand(shape, generator=generator) - 1) * bound)
    parameters = {name: torch.stack(values).requires_grad_() for name, values in drawn.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=RATE)
    x, y = data.x[rows], data.y[rows]
    found = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        lost = nn.functional.cross_entropy(logits(parameters, x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = lost / rows.shape[1] + PENALTY / 2 * sum(value.square().sum() for value in parameters.values())
        torch.autograd.backward(loss)
        optimizer.step()
        if step in POINTS:
            state = {name: optimizer.state[value] for name, value in parameters.items()}
            found.append(
                Trained(
                    step,
                    {name: value.detach().clone() for name, value in parameters.items()},
                    {name: one["exp_avg"].clone() for name, one in state.items()},
                    {name: one["exp_avg_sq"].clone() for name, one in state.items()},
                )
            )
    return found


@torch.no_grad()
def margins(data: Digits, parameters: dict[str, Tensor]) -> np.ndarray:
    """Log-odds of the right class of each test record: float64 [E, M]."""
    models = len(parameters["0.bias"])
    logs = logits(parameters, data.test_x.expand(models, -1, -1)).double().log_softmax(-1)
    right = nn.functional.one_hot(data.test_y, CLASSES).bool().expand(models, -1, -1)
    return (logs[right].view(models, -1) - logs.masked_fill(right, -torch.inf).logsumexp(-1)).numpy()


def retrained(data: Digits, subsets: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Random halves, bool [S, N], and the mean log-odds of the models that learnt them, float64 [S, M]."""
    generator = np.random.default_rng(1)
    halves = np.stack([np.sort(generator.permutation(TRAIN)[: TRAIN // 2]) for _ in range(subsets)])
    total = np.zeros((subsets, TEST))
    for seed in range(seeds):
        own = [1000 + seed * subsets + row for row in range(subsets)]
        total += margins(data, train(data, torch.from_numpy(halves), own)[-1].parameters)
    member = np.zeros((subsets, TRAIN), bool)
    np.put_along_axis(member, halves, True, axis=1)
    return member, total / seeds


def datamodelling(scores: np.ndarray, member: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
    """Mean over test records of Spearman's correlation over the subsets, and its standard error."""
    said = rankdata(member @ scores, axis=0)
    found = rankdata(actual, axis=0)
    said, found = said - said.mean(0), found - found.mean(0)
    lengths = np.sqrt((said**2).sum(0) * (found**2).sum(0))
    each = np.divide((said * found).sum(0), lengths, out=np.zeros(len(lengths)), where=lengths > 0)
    return float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5)


def run(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of a batch of inputs and classes."""
    outputs: Tensor = model(batch[0])
    return outputs


class Dense:
    """The exact inverse, which a network of 2,410 weights still allows; a `Solver`."""

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        eye = torch.eye(len(b), dtype=torch.float64)
        return Solution(torch.linalg.solve(curvature.product(eye) + damping * eye, b.double()), None)


def ours(data: Digits, points: list[Trained]) -> dict[str, Callable[[], np.ndarray]]:
    """Each method as a function that computes its scores [N, M]."""
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    bare = FunctionalModel(model, run, CrossEntropy())
    models = [bare.at(one_model(points[-1].parameters, row)) for row in range(MODELS)]
    train_rows = list(zip(data.x, data.y, strict=True))
    test_rows = list(zip(data.test_x, data.test_y, strict=True))
    rates, checkpoints, before = [], [], 0
    for point in points:
        rates.append(RATE * (point.step - before))
        before = point.step
        moments = AdamMoments(bare.flat(one_model(point.first, 0)), bare.flat(one_model(point.second, 0)), point.step)
        checkpoints.append(Checkpoint(one_model(point.parameters, 0), rates[-1], moments))

    def functions(of: list[FunctionalModel], damping: float = PENALTY, **settings: Any) -> Callable[[], np.ndarray]:
        def compute() -> np.ndarray:
            found = [influence_functions(one, train_rows, test_rows, damping=damping, **settings).scores for one in of]
            averaged: np.ndarray = np.mean(found, axis=0)
            return averaged

        return compute

    def similarity() -> np.ndarray:
        with torch.no_grad():
            states = [nn.functional.normalize(model_states(models[0], x), dim=1) for x in (data.x, data.test_x)]
        same = data.y[:, None] == data.test_y
        return torch.where(same, states[0] @ states[1].T, -(states[0] @ states[1].T)).double().numpy()

    def single_record_moments() -> np.ndarray:
        of = [
            Checkpoint(one.parameters, one.rate, AdamMoments.from_records(bare.at(one.parameters), train_rows))
            for one in checkpoints
        ]
        return less(bare, of, train_rows, test_rows, projection=sparse).scores

    sparse, dense = Projection(DIMENSION), Projection(DIMENSION, 0, "dense")
    only = models[:1]
    return {
        "random": lambda: np.random.default_rng(2).normal(size=(TRAIN, TEST)),
        "similarity of hidden states, by label": similarity,
        "gradients' inner product, last checkpoint": lambda: (
            tracin(bare, checkpoints[-1:], train_rows, test_rows).scores
        ),
        "TracIn, 5 checkpoints": lambda: tracin(bare, checkpoints, train_rows, test_rows).scores,
        "LESS, 5 checkpoints, sparse": lambda: less(bare, checkpoints, train_rows, test_rows, projection=sparse).scores,
        "LESS, 5 checkpoints, sparse, moments of single records": single_record_moments,
        "TRAK, dense": lambda: trak(only, train_rows, test_rows, projection=dense).scores,
        "TRAK, sparse": lambda: trak(only, train_rows, test_rows, projection=sparse).scores,
        "TRAK, dense, 5 models": lambda: trak(models, train_rows, test_rows, projection=dense).scores,
        "influence, conjugate gradient, 10 steps": functions(only, solver=ConjugateGradient(steps=10)),
        "influence, EK-FAC": functions(only, solver=Ekfac(samples=1)),
        "influence, exact Gauss-Newton": functions(only, solver=Dense()),
        "influence, exact Hessian": functions(only, solver=Dense(), curvature="hessian"),
        "influence, exact Hessian, damping 0.1": functions(only, solver=Dense(), curvature="hessian", damping=0.1),
        "influence, EK-FAC, 5 models": functions(models, solver=Ekfac(samples=1)),
        "influence, exact Gauss-Newton, 5 models": functions(models, solver=Dense()),
    }


def one_model(values: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One of several models' tensors."""
    return {name: value[row] for name, value in values.items()}


def model_states(model: FunctionalModel, x: Tensor) -> Tensor:
    """Hidden states [N, 32]."""
    values = model.parameters
    return (x @ values["0.weight"].T + values["0.bias"]).relu()


def theirs(data: Digits, points: list[Trained], python: str) -> dict[str, tuple[np.ndarray, float] | str]:
    """The peer's scores [N, M] and seconds, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"x": data.x, "y": data.y, "test_x": data.test_x, "test_y": data.test_y}
        for number, point in enumerate(points):
            arrays |= {f"{number}/{name}": value for name, value in point.parameters.items()}
        given: dict[str, Any] = {name: value.numpy() for name, value in arrays.items()}
        np.savez(Path(folder, "given.npz"), **given)
        settings = {"penalty": PENALTY, "dimension": DIMENSION, "rates": [RATE * 60] * len(points), "models": MODELS}
        Path(folder, "settings.json").write_text(json.dumps(settings))
        peer = Path(__file__).with_name("peers") / "dattri_influence.py"
        with Path(folder, "log").open("w") as log:  # bars
            subprocess.run([python, str(peer), folder], check=True, stdout=log, stderr=log)
        said = json.loads(Path(folder, "seconds.json").read_text())
        with np.load(Path(folder, "scores.npz")) as scores:
            return {name: one if isinstance(one, str) else (scores[name], one) for name, one in said.items()}


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each subset")
    parser.add_argument("--quick", action="store_true", help="only this program's methods")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = digits()
    start = time.perf_counter()
    points = train(data, torch.arange(TRAIN).expand(MODELS, -1), list(range(MODELS)))
    member, actual = retrained(data, arguments.subsets, arguments.seeds)
    seconds = time.perf_counter() - start
    accuracy = (margins(data, points[-1].parameters) > 0).mean()
    print(
        f"{arguments.subsets} halves, {arguments.seeds} trainings each, {seconds:.0f} s of training;"
        f" the whole models are right on {accuracy:.1%} of the test digits\n"
    )
    print("| method | LDS | seconds |\n| --- | --- | --- |")
    for name, compute in ours(data, points).items():
        start = time.perf_counter()
        try:
            scores = compute()
        except UserError as error:
            print(f"| ours: {name} | {error} | |", flush=True)
            continue
        show(f"ours: {name}", scores, time.perf_counter() - start, member, actual)
    for name, one in ({} if arguments.quick else theirs(data, points, arguments.peer_python)).items():
        if isinstance(one, str):
            print(f"| dattri: {name} | {one} | |", flush=True)
        else:
            show(f"dattri: {name}", *one, member, actual)


def show(name: str, scores: np.ndarray, seconds: float, member: np.ndarray, actual: np.ndarray) -> None:
    """A row of the table."""
    mean, error = datamodelling(scores, member, actual)
    print(f"| {name} | {mean:.3f} ± {error:.3f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
