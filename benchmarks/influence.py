"""Computes the linear datamodelling score of influence methods, ours and dattri's: how well they predict retraining.

    python benchmarks/influence.py --peer-python OTHER/bin/python [--subsets 60] [--seeds 5] [--quick]

The peer has a virtual environment of its own (``pip install torch==2.13.0 dattri==0.3.0``).

A network of 64, 32 and 10 units learns 1,000 handwritten digits (scikit-learn's), a tenth of them with a wrong label,
by 300 steps of Adam over all records, with a penalty of 0.001 times half the squared norm of the parameters, which is
also the damping. It is trained again from other seeds on random halves of the records. A method's prediction for a half
is the sum of the scores of its records. For each of 200 test digits the predictions are compared with the log-odds of
the right class under the models trained on the halves, averaged over the seeds; the score is Spearman's correlation,
the mean over test digits with its standard error (S. Park et al. 2023, arXiv:2303.14186, section 2). All methods judge
the same models, with one thread; the seconds cover everything that a method computes from the weights. Rows with 5
models average over them. The peer's conjugate gradient uses the Hessian. Among dampings from 1e-7 to 0.1 and batches of
8, 64 and 1,000 records, 0.01 and 64 are among the best for its EK-FAC.
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

from posttrain.attribution.causal_lm import CrossEntropy
from posttrain.attribution.influence import InfluenceModel, influence_functions

N_TRAIN, N_TEST, HIDDEN_UNITS, CLASSES = 1000, 200, 32, 10
STEPS, LEARNING_RATE, PENALTY = 300, 0.01, 1e-3
MODELS = 5
PROJECTION_DIMENSION = 256
PARAMETER_NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@dataclass(frozen=True)
class Digits:
    """Inputs float32 [N, 64] from 0 to 1 and classes int64 [N] of the training and test records."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    """Load the digits in a random order, with a tenth of the training labels wrong."""
    generator = np.random.default_rng(0)
    bunch = load_digits()
    order = generator.permutation(len(bunch.target))[: N_TRAIN + N_TEST]
    x = torch.tensor(bunch.data[order] / 16, dtype=torch.float32)
    y = torch.tensor(bunch.target[order])
    wrong_rows = torch.from_numpy(generator.permutation(N_TRAIN)[: N_TRAIN // 10])
    y[wrong_rows] = (y[wrong_rows] + torch.from_numpy(generator.integers(1, CLASSES, len(wrong_rows)))) % CLASSES
    return Digits(x[:N_TRAIN], y[:N_TRAIN], x[N_TRAIN:], y[N_TRAIN:])


Parameters = dict[str, Tensor]


def logits(parameters: Parameters, x: Tensor) -> Tensor:
    """Compute the logits [E, N, 10] of several models, each on inputs of its own [E, N, 64]."""
    hidden = torch.baddbmm(parameters["0.bias"][:, None], x, parameters["0.weight"].transpose(1, 2)).relu()
    return torch.baddbmm(parameters["2.bias"][:, None], hidden, parameters["2.weight"].transpose(1, 2))


def train(data: Digits, rows: Tensor, seeds: list[int]) -> Parameters:
    """Train one model on each set of rows, int64 [E, n], from its seed, all at once; return the weights [E, ...]."""
    shapes = [(HIDDEN_UNITS, 64), (HIDDEN_UNITS,), (CLASSES, HIDDEN_UNITS), (CLASSES,)]
    initial_values: dict[str, list[Tensor]] = {name: [] for name in PARAMETER_NAMES}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in zip(PARAMETER_NAMES, shapes, strict=True):
            bound = (64 if name.startswith("0") else HIDDEN_UNITS) ** -0.5
            initial_values[name].append((2 * torch.rand(shape, generator=generator) - 1) * bound)
    parameters = {name: torch.stack(values).requires_grad_() for name, values in initial_values.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE)
    x, y = data.x[rows], data.y[rows]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_sum = nn.functional.cross_entropy(logits(parameters, x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = loss_sum / rows.shape[1] + PENALTY / 2 * sum(value.square().sum() for value in parameters.values())
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


@torch.no_grad()
def margins(data: Digits, parameters: Parameters) -> np.ndarray:
    """Compute the log-odds of the right class of each test record: float64 [E, M]."""
    n_models = len(parameters["0.bias"])
    log_p = logits(parameters, data.test_x.expand(n_models, -1, -1)).double().log_softmax(-1)
    is_right = nn.functional.one_hot(data.test_y, CLASSES).bool().expand(n_models, -1, -1)
    return (log_p[is_right].view(n_models, -1) - log_p.masked_fill(is_right, -torch.inf).logsumexp(-1)).numpy()


def retrain(data: Digits, subsets: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Train on random halves; return the halves, bool [S, N], and the mean log-odds of their models, float64 [S, M]."""
    generator = np.random.default_rng(1)
    halves = np.stack([np.sort(generator.permutation(N_TRAIN)[: N_TRAIN // 2]) for _ in range(subsets)])
    total = np.zeros((subsets, N_TEST))
    for seed in range(seeds):
        model_seeds = [1000 + seed * subsets + row for row in range(subsets)]
        total += margins(data, train(data, torch.from_numpy(halves), model_seeds))
    member = np.zeros((subsets, N_TRAIN), bool)
    np.put_along_axis(member, halves, True, axis=1)
    return member, total / seeds


def datamodelling_score(scores: np.ndarray, member: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
    """Return the mean over test records of Spearman's correlation over the subsets, and its standard error."""
    predicted_ranks = rankdata(member @ scores, axis=0)
    actual_ranks = rankdata(actual, axis=0)
    predicted_ranks, actual_ranks = predicted_ranks - predicted_ranks.mean(0), actual_ranks - actual_ranks.mean(0)
    norms = np.sqrt((predicted_ranks**2).sum(0) * (actual_ranks**2).sum(0))
    correlations = np.divide((predicted_ranks * actual_ranks).sum(0), norms, out=np.zeros(len(norms)), where=norms > 0)
    return float(correlations.mean()), float(correlations.std(ddof=1) / len(correlations) ** 0.5)


def influence_model(parameters: Parameters, row: int) -> InfluenceModel:
    """Wrap one of several models."""
    network = nn.Sequential(nn.Linear(64, HIDDEN_UNITS), nn.ReLU(), nn.Linear(HIDDEN_UNITS, CLASSES))
    network.load_state_dict({name: value[row] for name, value in parameters.items()})

    def collate(records: Any) -> tuple[Tensor, ...]:
        return tuple(torch.stack(column) for column in zip(*records, strict=True))

    return InfluenceModel(network, lambda batch: network(batch[0]), CrossEntropy(), collate)


def ours(data: Digits, parameters: Parameters) -> dict[str, Callable[[], np.ndarray]]:
    """Return each method as a function that computes its scores [N, M]."""
    models = [influence_model(parameters, row) for row in range(MODELS)]
    train_rows = list(zip(data.x, data.y, strict=True))
    test_rows = list(zip(data.test_x, data.test_y, strict=True))

    def influence(count: int) -> np.ndarray:
        scores = [influence_functions(model, train_rows, test_rows, damping=PENALTY) for model in models[:count]]
        mean_scores: np.ndarray = np.mean(scores, axis=0)
        return mean_scores

    def similarity() -> np.ndarray:
        with torch.no_grad():
            states = [nn.functional.normalize(hidden_states(parameters, x), dim=1) for x in (data.x, data.test_x)]
        same_label = data.y[:, None] == data.test_y
        return torch.where(same_label, states[0] @ states[1].T, -(states[0] @ states[1].T)).double().numpy()

    return {
        "random": lambda: np.random.default_rng(2).normal(size=(N_TRAIN, N_TEST)),
        "similarity of hidden states, by label": similarity,
        "influence, EK-FAC": lambda: influence(1),
        f"influence, EK-FAC, {MODELS} models": lambda: influence(MODELS),
    }


def hidden_states(parameters: Parameters, x: Tensor) -> Tensor:
    """Compute the hidden states [N, 32] of the first model."""
    return (x @ parameters["0.weight"][0].T + parameters["0.bias"][0]).relu()


def peer(data: Digits, parameters: Parameters, python: str) -> dict[str, tuple[np.ndarray, float] | str]:
    """Run the peer; return the scores [N, M] and seconds of each of its methods, or its error message."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"x": data.x, "y": data.y, "test_x": data.test_x, "test_y": data.test_y, **parameters}
        numpy_arrays: dict[str, Any] = {name: value.numpy() for name, value in arrays.items()}
        np.savez(Path(folder, "inputs.npz"), **numpy_arrays)
        settings = {"penalty": PENALTY, "dimension": PROJECTION_DIMENSION, "models": MODELS}
        Path(folder, "settings.json").write_text(json.dumps(settings))
        script = Path(__file__).with_name("peers") / "dattri_influence.py"
        with Path(folder, "log").open("w") as log:  # the peer prints progress bars
            subprocess.run([python, str(script), folder], check=True, stdout=log, stderr=log)
        outcomes = json.loads(Path(folder, "seconds.json").read_text())
        with np.load(Path(folder, "scores.npz")) as scores:
            return {
                name: outcome if isinstance(outcome, str) else (scores[name], outcome)
                for name, outcome in outcomes.items()
            }


def main() -> None:
    """Run all methods and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5, help="trainings on each subset")
    parser.add_argument("--quick", action="store_true", help="run only this program's methods")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = digits()
    start = time.perf_counter()
    parameters = train(data, torch.arange(N_TRAIN).expand(MODELS, -1), list(range(MODELS)))
    member, actual = retrain(data, arguments.subsets, arguments.seeds)
    seconds = time.perf_counter() - start
    accuracy = (margins(data, parameters) > 0).mean()
    print(
        f"{arguments.subsets} halves, {arguments.seeds} trainings each, {seconds:.0f} s of training;"
        f" the models trained on all records are right on {accuracy:.1%} of the test digits\n"
    )
    print("| method | LDS | seconds |\n| --- | --- | --- |")
    for name, compute in ours(data, parameters).items():
        start = time.perf_counter()
        scores = compute()
        print_row(f"ours: {name}", scores, time.perf_counter() - start, member, actual)
    for name, outcome in ({} if arguments.quick else peer(data, parameters, arguments.peer_python)).items():
        if isinstance(outcome, str):
            print(f"| dattri: {name} | {outcome} | |", flush=True)
        else:
            print_row(f"dattri: {name}", *outcome, member, actual)


def print_row(name: str, scores: np.ndarray, seconds: float, member: np.ndarray, actual: np.ndarray) -> None:
    """Print a row of the table."""
    mean, error = datamodelling_score(scores, member, actual)
    print(f"| {name} | {mean:.3f} ± {error:.3f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
