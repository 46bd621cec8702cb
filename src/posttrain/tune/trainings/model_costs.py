"""The costs of a trained model: its weights and bytes, which follow from its shape, and its latency."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from posttrain.evaluate.latency import measure_latency, read_tokens
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

_RECORDS, _REPEATS = 32, 5  # of a measurement of latency

_SAVED_BYTES = 2  # of a number, as trained models are saved in bfloat16


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
        share = 1.0 if train.lora.gates is None else train.lora.gates.share
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
