"""A model and its per-record loss as functions of the parameters, for ``torch.func``."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.store.errors import UserError

Batch = tuple[Tensor, ...]
"""Records side by side: tensors whose first dimension is the record."""

Parameters = dict[str, Tensor]


def batch_key(batch: Batch) -> str:
    """Returns 64 hex characters that identify a batch's numbers."""
    checksum = hashlib.sha256()
    for tensor in batch:
        checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def stack_records(records: Sequence[Any]) -> Batch:
    """Stacks records that are tuples of tensors or numbers of equal shapes."""
    columns = zip(*records, strict=True)
    return tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns)


@dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A network's outputs and per-record losses as functions of its trainable parameters.

    Only the parameters that require a gradient count, such as those of an adapter, in the order of
    ``module.named_parameters()``; a vector [P] holds them one after the other. The module always runs in evaluation
    mode.

    Args:
        module: the network; its weights are never written to.
        outputs: the module's outputs [B, ...] for a batch of B records. It must reach the weights through the module's
            submodules, and may not mix records.
        losses: the summed loss [B] of each record, of the outputs and the batch. For the Gauss-Newton matrix it must be
            convex in the outputs; EK-FAC also needs its ``roots`` (see `posttrain.attribution.influence.losses`).
        collate: makes a batch of records.
        parameters: values of the parameters that count; a copy of the module's own if empty.

    Raises:
        UserError: no parameter requires a gradient.
    """

    module: nn.Module
    outputs: Callable[[nn.Module, Batch], Tensor]
    losses: Callable[[Tensor, Batch], Tensor]
    collate: Callable[[Sequence[Any]], Batch] = stack_records
    parameters: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        if not own:
            raise UserError(
                "no parameter of the model requires a gradient",
                where="influence",
                fix="put an adapter on, or call requires_grad_()",
            )
        if not self.parameters:
            # A copy, as training may continue and change the module's own.
            object.__setattr__(self, "parameters", {name: value.detach().clone() for name, value in own.items()})
        shapes = {name: value.shape for name, value in own.items()}
        if {name: value.shape for name, value in self.parameters.items()} != shapes:
            raise UserError("the parameters are not those of the model that require a gradient", where="influence")

    def at(self, parameters: Mapping[str, Tensor]) -> Self:
        """Returns the model with other parameter values, such as a checkpoint's; the mapping may hold more names.

        Raises:
            UserError: one is missing or has another shape.
        """
        if missing := [name for name in self.parameters if name not in parameters]:
            raise UserError(f"the checkpoint lacks {len(missing)} parameters, the first is {missing[0]}")
        return replace(self, parameters={name: parameters[name].detach() for name in self.parameters})

    @property
    def size(self) -> int:
        """P, the number of trainable weights."""
        return sum(prod(value.shape) for value in self.parameters.values())

    @property
    def weights(self) -> int:
        """The number of all weights, frozen ones included."""
        return sum(value.numel() for value in self.module.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors: float64 if the parameters are, else float32."""
        exact = all(value.dtype == torch.float64 for value in self.parameters.values())
        return torch.float64 if exact else torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    @property
    def slices(self) -> dict[str, slice]:
        """The slice of each parameter in a vector [P]."""
        slices, start = {}, 0
        for name, value in self.parameters.items():
            slices[name] = slice(start, start + prod(value.shape))
            start += prod(value.shape)
        return slices

    def batch(self, records: Sequence[Any]) -> Batch:
        """Collates records on the model's device."""
        return tuple(tensor.to(self.device) for tensor in self.collate(records))

    def outputs_at(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Computes the outputs [B, ...]; ``torch.func`` can transform it in the parameters."""
        # `functional_call` finds parameters by their path below the module that it calls.
        renamed = {f"module.{name}": value for name, value in parameters.items()}
        outputs: Tensor = functional_call(self._callable, renamed, (batch,))
        return outputs

    def losses_at(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Computes the losses [B]; ``torch.func`` can transform it in the parameters."""
        return self.losses(self.outputs_at(parameters, batch), batch)

    def flat(self, parameters: Mapping[str, Tensor], leading: int = 0) -> Tensor:
        """Concatenates a tensor for each parameter to a vector [..., P], behind ``leading`` shared dimensions."""
        tensors = [parameters[name].flatten(leading).to(self.dtype) for name in self.parameters]
        return torch.cat(tensors, -1)

    def unflat(self, vector: Tensor) -> Parameters:
        """Splits a vector [P] into tensors, each in its parameter's shape and dtype."""
        return {
            name: vector[where].view(self.parameters[name].shape).to(self.parameters[name].dtype)
            for name, where in self.slices.items()
        }

    @cached_property
    def key(self) -> str:
        """64 hex characters that identify the weights, the parameters' values and the functions' names."""
        checksum = hashlib.sha256()
        others = {name: value for name, value in self.module.state_dict().items() if name not in self.parameters}
        for name, value in (*others.items(), *self.parameters.items()):
            checksum.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            checksum.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for component in (self.module, self.outputs, self.losses):
            kind = type(component)
            # A function goes by its name, an object by its class and, if it is a dataclass, its settings: the repr of
            # any other object may hold its address, which no other process would find again.
            name = getattr(component, "__qualname__", None) or (
                f"{kind.__qualname__} {component!r}" if hasattr(component, "__dataclass_fields__") else kind.__name__
            )
            home = kind.__module__ if component is self.module else component.__module__
            checksum.update(f"{home} {name}\n".encode())
        return checksum.hexdigest()

    @cached_property
    def _callable(self) -> "_FunctionalModule":
        return _FunctionalModule(self.module, self.outputs)


class _FunctionalModule(nn.Module):
    """Wraps the outputs function in a module, as ``functional_call`` takes modules only."""

    def __init__(self, module: nn.Module, outputs: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        # Set, not `eval()`, which would switch the user's module for good.
        self.training = False
        self.module = module
        self._outputs = outputs

    def forward(self, batch: Batch) -> Tensor:
        with _eval_mode(self.module):
            return self._outputs(self.module, batch)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    # Only the submodules that trained are switched back: some may be frozen in evaluation mode on purpose.
    training = [submodule for submodule in module.modules() if submodule.training]
    if training:
        module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True
