"""The base of trials that train models: their measurement on held-out records, their costs and their limits."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.latency import measure_latency, read_tokens
from posttrain.evaluate.suite import SuiteResult, run_suite
from posttrain.jobs.memory import peak_memory
from posttrain.models.language_model import DTYPES, LanguageModel
from posttrain.models.loading import load_tokenizer, model_file_errors
from posttrain.models.precision import choose_precision
from posttrain.models.shape import meta_model, read_config
from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig
from posttrain.train.data.encoding import encode
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.shape import trained_config
from posttrain.tune.context import Infeasible
from posttrain.tune.objectives import Measured
from posttrain.tune.trainings.config import LOSS, MODEL_COSTS, TRAINING_COSTS

_RECORDS, _REPEATS = 32, 5  # of a measurement of latency

_SAVED_BYTES = 2  # of a number, as trained models are saved in bfloat16


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial:
    """A function of a study whose trials are models that are measured on held-out records.

    Args:
        base: the config as JSON values, which a trial's settings are laid over.
        model: the source of the initial model.
        records: RECORD rows to train on.
        held_out: RECORD rows to measure on.
        suite: the scorer of the answers.
        metrics: what is measured.
        limits: the most that a model may have or take, by names of `MODEL_COSTS` and `TRAINING_COSTS`.
    """

    base: Mapping[str, Any]
    model: str
    records: pa.Table
    held_out: pa.Table
    suite: SuiteConfig
    metrics: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)

    def shape_costs(self, train: TrainConfig) -> dict[str, float]:
        """Returns the costs that follow from a model's shape; empty where none is asked for.

        Raises:
            Infeasible: the model is over a limit.
        """
        names = {*self.metrics, *self.limits}.intersection(MODEL_COSTS)
        costs = shape_costs(Path(self.model), train) if names else {}
        check_limits(costs, self.limits)
        return costs

    def measure(self, shape_costs: Mapping[str, float], lm: LanguageModel) -> Measured:
        """Returns the metrics of a model, of several a list.

        Args:
            shape_costs: the costs that follow from its shape.
            lm: the model.
        """
        costs = dict(shape_costs)
        if "latency" in self.metrics:
            costs["latency"] = measure_model_latency(lm, self.held_out)
        result = run_suite(lm, self.held_out, self.suite, "held_out")
        values = [costs[name] if name in MODEL_COSTS else metric_value(result, name) for name in self.metrics]
        return values[0] if len(values) == 1 else values

    def check_latency(self, load: Callable[[], LanguageModel]) -> None:
        """Raises `Infeasible` if the latency of a model is over its limit; loads none where there is no limit."""
        if "latency" in self.limits:
            check_limits({"latency": measure_model_latency(load(), self.held_out)}, self.limits)

    def check_memory(self) -> None:
        """Raises `Infeasible` if this process has had more memory in use than the limit since its trial began."""
        check_limits(dict(zip(TRAINING_COSTS, map(float, peak_memory()), strict=True)), self.limits)


def metric_value(result: SuiteResult, metric: str) -> float:
    """Returns a metric of a suite's result; of ``loss`` the mean negative log-likelihood, in nats.

    It is that of a token where the suite counts tokens, else that of a record.
    """
    if metric != LOSS:
        return result.metrics[metric]
    count = result.counts.get("tokens", result.counts["records"])
    return -result.counts["log_likelihood_sum"] / max(1.0, count)


def shape_costs(folder: Path, train: TrainConfig) -> dict[str, float]:
    """Returns the costs of the model that a training makes, before it is trained; no weight is read.

    Args:
        folder: holds the config of the model to start from.
        train: settings of the training.

    Returns:
        ``parameters``: weights of the merged model, a tied head counted once; ``adapter_parameters``: those of its LoRA
        adapter, with method ``lora``, and with gates the most that stay; ``model_bytes``: bytes of the saved tensors.

    Raises:
        UserError: the model cannot have the shape that the training asks for.
    """
    config = trained_config(read_config(str(folder)), train)
    model = meta_model(config)
    # By identity: a tied head is the embedding.
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()
    costs = {
        "parameters": float(sum(weight.numel() for weight in model.parameters())),
        "model_bytes": float(
            sum(
                math.prod(tensor.shape) * (_SAVED_BYTES if tensor.is_floating_point() else tensor.element_size())
                for tensor in tensors
            )
        ),
    }
    if train.method == "lora":
        share = 1.0 if train.lora.gates is None else train.lora.gates
        costs["adapter_parameters"] = float(math.floor(share * ModelSpec.from_config(config, train).table()["adapter"]))
    return costs


def untrained_model(folder: Path, train: TrainConfig, task: TaskConfig) -> LanguageModel:
    """Returns a model of the shape that a training makes, with random weights: its latency is that of the trained one.

    Args:
        folder: holds the config and the tokenizer of the model to start from.
        train: settings of the training.
        task: task of the model.

    Raises:
        UserError: the model cannot have the shape that the training asks for.
    """
    from transformers import AutoModelForCausalLM

    what = "describes no causal language model"
    factory: Any = AutoModelForCausalLM
    with model_file_errors(what, str(folder)), torch.random.fork_rng([]):
        dtype = DTYPES[choose_precision()]
        config = trained_config(read_config(str(folder)), train)
        model = factory.from_config(config, dtype=dtype, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LanguageModel(model.to(device).eval(), load_tokenizer(str(folder), what), task)


def measure_model_latency(lm: LanguageModel, records: pa.Table) -> float:
    """Returns the seconds of a forward pass over one record, the median over up to 32 records.

    The first pass is not timed, and each record is passed up to ten times, of which the fastest counts. An adapter that
    is not merged yet is left out, as the merged model has the same shape without it.
    """
    units, _ = encode(lm, records.slice(0, _RECORDS), 2**30)
    sequences = [unit[0].ids for unit in units]
    without: Any = lm.model.disable_adapter() if hasattr(lm.model, "disable_adapter") else nullcontext()
    with without:
        return measure_latency({"model": lm}, sequences, _REPEATS, answer=read_tokens)["model"]["latency_p50"]


def check_limits(costs: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Raises `Infeasible` for the first cost that is over its limit."""
    for name, limit in limits.items():
        if name in costs and costs[name] > limit:
            raise Infeasible(f"{name} {_format(costs[name])} is over the limit, {_format(limit)}")


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value.is_integer() else f"{value:.4g}"
