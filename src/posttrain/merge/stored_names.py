"""Names of a loaded model's parameters in its files, where transformers renames tensors or fuses experts."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from posttrain.merge.statistics import ModelStatistics

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def with_stored_names(statistics: ModelStatistics, model: Any, stored: Collection[str]) -> ModelStatistics:
    """Returns the Gram matrices under the names that the model's files have for its matrices, too.

    Args:
        statistics: Gram matrices, by the names of parameters.
        model: the transformers model.
        stored: names of the tensors in its files.
    """
    tensors, shared, experts = dict(statistics.tensors), dict(statistics.shared), dict(statistics.experts)
    first = list(statistics.inputs_first)
    parameters = dict(model.named_parameters())
    prefix = f"{model.base_model_prefix}."
    for name in [*statistics.tensors, *statistics.shared]:
        shape, owner = parameters[name].shape, statistics.shared.get(name, name)
        if name in stored and len(shape) == 2:
            continue
        if (short := name.removeprefix(prefix)) != name and short in stored:  # files of a decoder alone lack the prefix
            shared[short] = owner
            first += [short] * (name in first)
            continue
        names = _names_in_files(model, name, shape)
        if name in stored and name not in names:
            tensors.pop(name, None)  # transposed in the files
        for tensor, number in names.items():
            if number is not None:
                experts[tensor] = owner, number
            elif tensor != name:
                shared[tensor] = owner
    shared = {name: owner for name, owner in shared.items() if owner in tensors}
    experts = {name: (owner, number) for name, (owner, number) in experts.items() if owner in tensors}
    return replace(statistics, tensors=tensors, shared=shared, experts=experts, inputs_first=first)


def _names_in_files(model: Any, name: str, shape: torch.Size) -> dict[str, int | None]:
    """Returns the tensors that a parameter is saved as, each with the number of the expert that it is of."""
    from transformers.core_model_loading import revert_weight_conversion

    # The number of its column in each element: it shows which tensors have the parameter's columns, in its order.
    columns = torch.arange(shape[-1])
    saved = revert_weight_conversion(model, {name: columns.expand(shape)})
    names = {}
    for tensor, values in saved.items():
        expert = _EXPERT.search(tensor) if len(shape) == 3 and values.dim() == 2 else None
        if values.dim() in (2, len(shape)) and torch.equal(values.reshape(-1, values.shape[-1])[0], columns):
            names[tensor] = int(expert[1]) if expert else None
    return names
