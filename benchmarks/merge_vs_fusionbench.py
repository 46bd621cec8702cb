"""Compares merges by Fisher information and by RegMean with FusionBench's: weights, seconds and peak memory.

    python benchmarks/merge_vs_fusionbench.py --peer-python OTHER/bin/python --dir DIR
        [--parts weights times] [--shape 35m] [--records 32] [--repeats 3] [--peer-repeats 1]

FusionBench has a virtual environment of its own (``pip install fusion-bench==0.2.33``). ``peers/fusionbench_merge.py``
calls its functions ``regmean_merging`` and ``fisher_merging``, which take any model, with one record a batch; no module
of it is replaced. Both programs get the same models, and FusionBench the token ids that ours computes.

FusionBench's definitions, and the options with which ours agree:

- RegMean divides each Gram matrix by the number of its rows, which are the tokens that the model reads, padding
  included. Ours sums: equal for models with the same records, and otherwise with a ``weight`` of 1 / rows. What is no
  linear layer becomes the plain mean there, and here the weighted one: a rule sets its weight to 1. The factor of
  off-diagonal elements is the same: ``reduce_non_diagonal_ratio`` (1.0 by default there), ours ``alpha`` (0.9).
- Fisher information is the squared gradient of a batch's sum, added over batches and divided by the number of examples;
  ours is of single examples. These are equal for batches of one.
- Its gradient for classifiers is that of sum sqrt(p) log p over labels and examples, whose square has products of
  different labels and is not the Fisher information; none of our options agrees. For one output it is that of the
  model's loss: with minus the log-likelihood of the answer it is our empirical Fisher information (``answers: data``).
- It adds 1e-6 to each element (``minimal_fisher_weight``), which ours does not; ``floor`` is a least value instead.
  Here it adds 1e-30: with 0 it divides 0 by 0 where no model has information, which ours gives the mean.
- It divides each model's information by its L2 norm (``normalize_fisher_weight``). Ours does with ``weight`` 1 / norm;
  ``normalize`` divides by the trace.

``weights`` merges tiny models in float32, and prints the largest difference to FusionBench in float32 and in float64,
and that between these two. ``times`` merges two random models with a file of records each, and prints seconds, CPU
seconds and peak memory, start included; FusionBench's start alone stands in a row of its own. It keeps the squared
gradients of every batch until the end of a model, so that the memory of its Fisher information grows with the records.
Ours runs with an empty cache of statistics, and again with a full one.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from equal_to_mergekit import add_noise, weights
from merge_vs_mergekit import SHAPES, measure, warm, write_models
from safetensors.torch import load_file, save_file

from posttrain.merge.statistics import fisher_information
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.tune.merges.data import draw_examples, merge_on_data, read_records

PEER = Path(__file__).with_name("peers") / "fusionbench_merge.py"
MODELS = ("a", "b")

# As many tokens as a tiny model is wide, or more: of fewer, the inputs of the first layer would have no inverse.
_CHARACTERS = "".join(map(chr, range(32, 127)))


@dataclass(frozen=True)
class Case:
    """A merge that both programs do.

    Attributes:
        method: ``regmean`` or ``fisher``.
        parameters: of our recipe.
        options: of FusionBench's function.
        statistics: of our recipe.
        shared: both models have the records of the first.
        scale: weight of a model, so that it agrees: the inverse of its ``rows`` or of its ``norm``.
        gradient: of FusionBench's Fisher information.
        untied: the output head has weights of its own.
    """

    method: str
    parameters: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    shared: bool = False
    scale: str = ""
    gradient: str = "answer"
    untied: bool = False


_PLAIN_FISHER = {"normalize_fisher_weight": False, "minimal_fisher_weight": 1e-30}
_REGMEAN = Case("regmean", {"alpha": 0.9}, {"reduce_non_diagonal_ratio": 0.9}, scale="rows")
_FISHER = Case("fisher", options=_PLAIN_FISHER)

CASES = {
    "regmean, the same records": Case("regmean", {"alpha": 0.9}, {"reduce_non_diagonal_ratio": 0.9}, shared=True),
    "regmean, records of each, weight 1 / rows": _REGMEAN,
    "regmean, output head of its own": Case(
        "regmean", {"alpha": 0.9}, {"reduce_non_diagonal_ratio": 0.9}, scale="rows", untied=True
    ),
    "regmean, off-diagonals whole": Case("regmean", {"alpha": 1.0}, {"reduce_non_diagonal_ratio": 1.0}, scale="rows"),
    "fisher, of the answers": _FISHER,
    "fisher, weight 1 / L2 norm": Case(
        "fisher", options={"normalize_fisher_weight": True, "minimal_fisher_weight": 1e-30}, scale="norm"
    ),
    "defaults of both, regmean": Case("regmean"),
    "defaults of both, fisher of the answers": Case("fisher"),
    "defaults of both, fisher of labels and sampled": Case(
        "fisher", statistics={"answers": "sampled"}, gradient="labels"
    ),
}
TIMED = {"regmean": _REGMEAN, "fisher": _FISHER}


class Workplace:
    """Two models with records, and both programs' inputs.

    Args:
        folder: holds the models ``a`` and ``b``; records, recipes and results go there too.
        records: number of records of each model.
        length: characters of the longest prompt, and of the longest answer.
    """

    def __init__(self, folder: Path, records: int, length: int) -> None:
        self.folder = folder
        for seed, name in enumerate(MODELS):
            draw = random.Random(seed)
            rows = [
                {
                    key: "".join(draw.choices(_CHARACTERS, k=draw.randint(length // 2, length)))
                    for key in ("prompt", "completion")
                }
                for _ in range(records)
            ]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.rows = {name: self._write_token_ids(name) for name in MODELS}

    def _write_token_ids(self, name: str) -> int:
        """Writes the token ids of a file of records as our statistics read them; returns the tokens that count."""
        lm = load_language_model(self.folder / name, TaskConfig(), "float32")
        examples = draw_examples(read_records(f"{name}.jsonl", self.folder, {}), 1 << 30, 0, name)
        rows = []
        for turns, answer in examples:
            before, after = lm.prompt_ids(turns), lm.answer_ids(answer)
            rows.append({"input_ids": [*before, *after[:-1]], "answer_ids": after})
        (self.folder / f"{name}.json").write_text(json.dumps(rows))
        return sum(len(row["input_ids"]) for row in rows)

    def weight(self, case: Case, name: str) -> float:
        """Returns the weight with which our definition is FusionBench's."""
        if case.scale == "norm":
            lm = load_language_model(self.folder / name, TaskConfig(), "float32")
            examples = draw_examples(read_records(f"{name}.jsonl", self.folder, {}), 1 << 30, 0, name)
            squares = [tensor.double().square().sum() for tensor in fisher_information(lm, examples).tensors.values()]
            return float(sum(squares) ** -0.5)
        return 1 / self.rows[name] if case.scale == "rows" else 1.0

    def recipe(self, case: Case) -> Path:
        """Writes our recipe."""
        models = [
            {
                "model": name,
                "data": "a.jsonl" if case.shared else f"{name}.jsonl",
                "weight": self.weight(case, name),
            }
            for name in MODELS
        ]
        recipe = {
            "method": case.method,
            "models": models,
            "parameters": case.parameters,
            "statistics": case.statistics,
            "dtype": "float32",
        }
        if case.method == "regmean":
            recipe["layers"] = [{"match": "embed_tokens|norm", "method": "linear", "weight": [1.0, 1.0]}]
        file = self.folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return file

    def peer_settings(self, case: Case, out: Path, dtype: str = "float32") -> dict[str, Any]:
        """Returns FusionBench's settings."""
        return {
            "method": case.method,
            "models": [str(self.folder / name) for name in MODELS],
            "records": [str(self.folder / ("a.json" if case.shared else f"{name}.json")) for name in MODELS],
            "out": str(out),
            "dtype": dtype,
            "options": case.options,
            "gradient": case.gradient,
        }


def write_tiny_models(folder: Path, *, untied: bool) -> None:
    """Writes two tiny Llamas in float32, with a head of its own where wanted."""
    for seed, name in enumerate(MODELS):
        file = write_tiny_model(folder / name, seed=seed, width=64) / "model.safetensors"
        if untied:
            tensors = load_file(file)
            save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
            config = folder / name / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
        add_noise(file, seed)  # the head's differs from the embedding's


def peer_command(python: str, settings: list[dict[str, Any]], folder: Path) -> list[str]:
    """Writes the settings of merges; returns FusionBench's command."""
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    return [python, str(PEER), str(file)]


def largest_difference(a: Path, b: Path) -> float:
    """Returns the largest difference of any weight of two models."""
    first, second = weights(a), weights(b)
    if first.keys() != second.keys():
        sys.exit(f"names that differ: {sorted(first.keys() ^ second.keys())[:5]}")
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def compare_weights(folder: Path, python: str) -> None:
    """Merges tiny models by each case with both programs, and prints the differences."""
    workplaces = {}
    shutil.rmtree(folder, ignore_errors=True)
    for untied in (False, True):
        work = folder / ("untied" if untied else "tied")
        write_tiny_models(work, untied=untied)
        workplaces[untied] = Workplace(work, records=32, length=120)
    types = ("float32", "float64")
    settings = [
        workplaces[case.untied].peer_settings(case, folder / f"{title}, {dtype}", dtype)
        for title, case in CASES.items()
        for dtype in types
    ]
    result = subprocess.run(peer_command(python, settings, folder), capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"FusionBench failed:\n{result.stderr[-2000:]}")
    for title, case in CASES.items():
        ours, (theirs, exact) = folder / title, (folder / f"{title}, {dtype}" for dtype in types)
        merge_on_data(workplaces[case.untied].recipe(case), ours)
        row = {
            "ours and FusionBench's": largest_difference(ours, theirs),
            "ours and FusionBench's in float64": largest_difference(ours, exact),
            "FusionBench's and its own in float64": largest_difference(theirs, exact),
        }
        print(json.dumps({"case": title} | row), flush=True)


def timed(command: list[str], log: Path) -> dict[str, float]:
    """Runs a command; returns its seconds, those of the processors, and the most GB that its processes held."""
    before = os.times()
    seconds, memory = measure(command, log)
    after = os.times()
    used = sum(after[2:4]) - sum(before[2:4])  # of children that have ended, user and system
    return {"seconds": seconds, "CPU seconds": used, "GB": memory}


def compare_times(folder: Path, options: argparse.Namespace) -> None:
    """Merges random models with both programs in turn, and prints seconds, memory and the weights' difference."""
    folder.mkdir(parents=True, exist_ok=True)
    # In a process of its own: the kernel counts a parent's memory as the child's until the child has begun.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(write_models, folder, options.shape).result()
    work = Workplace(folder, options.records, options.length)
    warm(folder)
    log, ours, theirs, cache = (folder / name for name in ("log.txt", "ours", "theirs", "cache"))
    os.environ["XDG_CACHE_HOME"] = str(cache)
    start = timed(peer_command(options.peer_python, [], folder), log)
    print(json.dumps({"start of FusionBench, without a merge": start}), flush=True)
    for title, case in TIMED.items():
        command = [sys.executable, "-m", "posttrain", "merge", str(work.recipe(case)), "--out", str(ours)]
        peer = peer_command(options.peer_python, [work.peer_settings(case, theirs)], folder)
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "ours, again": [], "FusionBench": []}
        for repeat in range(max(options.repeats, options.peer_repeats)):
            if repeat < options.repeats:
                shutil.rmtree(cache, ignore_errors=True)
                for name in ("ours", "ours, again"):
                    shutil.rmtree(ours, ignore_errors=True)
                    runs[name].append(timed(command, log))
            if repeat < options.peer_repeats:
                shutil.rmtree(theirs, ignore_errors=True)
                runs["FusionBench"].append(timed(peer, log))
        medians = {
            name: {key: round(statistics.median(run[key] for run in rows), 2) for key in rows[0]}
            for name, rows in runs.items()
        }
        row = {"method": title, "largest difference": largest_difference(ours, theirs), "load": os.getloadavg()}
        print(json.dumps(row | {"medians": medians, "runs": runs}), flush=True)


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="Python of FusionBench's environment")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=("weights", "times"), default=["weights", "times"])
    parser.add_argument("--shape", choices=SHAPES, default="35m")
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--length", type=int, default=200, help="most characters of a prompt, and of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-repeats", type=int, default=1)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(options.dir / "cache")
    if "weights" in options.parts:
        compare_weights(options.dir / "tiny", options.peer_python)
    if "times" in options.parts:
        compare_times(options.dir / options.shape, options)


if __name__ == "__main__":
    main()
