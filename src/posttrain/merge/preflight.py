"""Checks models before a merge: architectures that differ, a base that is not an ancestor, models that are equal."""

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from posttrain.merge.plan import MergePlan, TensorPlan
from posttrain.merge.sources import WeightSource, block_rows
from posttrain.merge.tensor_reader import TensorInput
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")

_ROWS = 4  # of each tensor, spread over it

_WIDEST = 1 << 14  # elements of a row that are looked at, where it is a vector of the vocabulary's size, say

# Keys of config.json in which models of one architecture may not differ, the vocabulary aside.
_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts",
)

# Keys that change what the same weights compute.
_BEHAVIOUR_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "rms_norm_eps", "sliding_window"),
    *("layer_types", "no_rope_layers"),
)

FOREIGN_COSINE = 0.5
"""Weights with a smaller cosine have another initialisation; fine-tuning stays above 0.99."""

_LARGEST_CHANGE = 1.0  # norm of the task vectors by that of the weights; fine-tuning stays far below 0.1


def check_architectures(sources: Sequence[WeightSource]) -> None:
    """Checks that the models are of one architecture and size; warns where their configs let them compute differently.

    Raises:
        UserError: two differ.
    """
    first, *others = sources
    for source in others:
        for key in _SHAPE_KEYS:
            value, reference = _value_of(source, key), _value_of(first, key)
            # Older versions of transformers left out what is the default; shapes are compared anyway.
            if value is not None and reference is not None and value != reference:
                raise UserError(
                    f"`{source.name}` has the {key} {value} and `{first.name}` {reference}",
                    where="models",
                    fix="only models of one architecture and size merge; others can answer together, as an ensemble",
                )
        for key in _BEHAVIOUR_KEYS:
            value, reference = _value_of(source, key), _value_of(first, key)
            if value is not None and reference is not None and value != reference:
                log.warning("%s has the %s %s and %s %s", source.name, key, value, first.name, reference)


def _value_of(source: WeightSource, key: str) -> Any:
    nested = source.config.get("text_config")
    return source.config.get(key, nested.get(key) if isinstance(nested, Mapping) else None)


def check_weights(plan: MergePlan) -> None:
    """Checks a sample of the weights.

    It warns of models that are equal in the sample, of models of different initialisation, and of task vectors that are
    larger than the base's weights: the base is not what the models were trained from.

    Raises:
        UserError: a tensor of integers differs between models.
    """
    changes: dict[tuple[str, str], list[float]] = {}  # squared norms of task vector and base
    equal: dict[tuple[str, str], bool] = {}
    products: dict[tuple[str, str], list[float]] = {}  # inner product of two models' matrices, squared norms of both
    sampled = 0
    for tensor in plan.tensors:
        if tensor.method is None:
            _check_equal(tensor)
            continue
        samples = {
            entry: _sample(entry) for entry in dict.fromkeys([*tensor.inputs, *([tensor.base] if tensor.base else [])])
        }
        sampled += max((len(sample) for sample in samples.values()), default=0)
        for first, second in combinations(samples, 2):
            names = first.source.name, second.source.name
            if names[0] != names[1]:
                equal[names] = equal.get(names, True) and torch.equal(samples[first], samples[second])
        reference = tensor.base or tensor.inputs[0]
        for entry in tensor.inputs if len(tensor.shape) > 1 else ():  # norms are nearly alike in all models
            own, other = samples[entry], samples[reference]
            sums = products.setdefault((entry.source.name, reference.source.name), [0.0] * 3)
            for at, (left, right) in enumerate(((own, other), (own, own), (other, other))):
                sums[at] += float(left @ right)
        if tensor.base is not None:
            base = samples[tensor.base]
            for entry in tensor.inputs:
                norms = changes.setdefault((entry.source.name, tensor.base.source.name), [0.0, 0.0])
                scale = tensor.elements / max(len(base), 1)
                norms[0] += scale * float((samples[entry] - base).square().sum())
                norms[1] += scale * float(base.square().sum())
    for names, same in equal.items():
        if same and sampled:
            log.warning(
                "%s and %s look like the same model: all %s weights of a sample are equal", *names, f"{sampled:,}"
            )
    foreign = {}
    for pair, (inner, *squares) in products.items():
        if math.prod(squares) > 0 and (cosine := inner / math.sqrt(math.prod(squares))) < FOREIGN_COSINE:
            foreign[pair] = " " + foreign_warning(*pair, cosine, plan.recipe.align != "none")
    for (model, base_name), (change, size) in changes.items():
        ratio = math.sqrt(change / size) if size > 0 else math.inf if change > 0 else 0.0
        if ratio > _LARGEST_CHANGE:
            log.warning(
                "%s differs from %s by %.3g times the norm of its weights: was it trained from this base?%s",
                *(model, base_name, ratio, foreign.pop((model, base_name), "")),
            )
    for warning in foreign.values():
        log.warning("%s", warning.strip())


def foreign_warning(model: str, other: str, cosine: float, aligned: bool) -> str:
    """Returns the warning of two models whose weights have the cosine of another initialisation."""
    state = "are still unlike" if aligned else "have other initialisations"
    advice = "Let" if aligned else "Align them first with --align weights, or let"
    return (
        f"The weights of {model} and {other} {state} (cosine {cosine:.2f}): averaging them gives noise. "
        f"{advice} them answer together, as an ensemble."
    )


def _sample(entry: TensorInput) -> Tensor:
    """Returns some rows of a tensor, float64 and flat."""
    shape = entry.source.shapes()[entry.tensor]
    elements, columns = math.prod(shape), shape[-1] if shape else 1
    if not elements:
        return torch.empty(0, dtype=torch.float64)
    rows = elements // columns
    parts = []
    for row in sorted({step * rows // _ROWS for step in range(_ROWS)}):
        part = torch.empty(columns, dtype=entry.source.dtype(entry.tensor))
        entry.source.read(entry.tensor, row * columns, part)
        parts.append(part[:_WIDEST].double())
    return torch.cat(parts)


def _check_equal(tensor: TensorPlan) -> None:
    columns = tensor.shape[-1] if tensor.shape else 1
    step = columns * block_rows(max(columns, 1))
    first, *others = tensor.inputs
    if not others:
        return
    for start in range(0, tensor.elements, step or 1):
        count = min(step, tensor.elements - start)
        reference = torch.empty(count, dtype=tensor.dtype)
        first.source.read(first.tensor, start, reference)
        for entry in others:
            other = torch.empty_like(reference)
            entry.source.read(entry.tensor, start, other)
            if not torch.equal(reference, other):
                raise UserError(
                    f"tensor {tensor.name} holds integers that differ between `{first.source.name}` and "
                    f"`{entry.source.name}`",
                    where="models",
                    fix="they cannot be merged",
                )
