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
    """64 hex characters that tell a batch's numbers."""
    made = hashlib.sha256()
    for part in batch:
        made.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        made.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def stack_records(records: Sequence[Any]) -> Batch:
    """Records that are tuples of tensors or numbers of equal shapes, as a batch."""
    columns = zip(*records, strict=True)
    return tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns)


@dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A model, what it gives for a batch and what that costs each record; the same for training and test records.

    Only the parameters that require a gradient count, such as those of an adapter, in the order of
    ``model.named_parameters()``; a vector [P] holds them one after the other. The model is always run as in evaluation.

    Args:
        model: the network; its weights are never written to.
        outputs: the model's outputs [B, ...] for a batch of B records. It must reach the weights through the model's
            modules, and may not mix records.
        losses: the summed loss [B] of each record, of the outputs and the batch. For the Gauss-Newton matrix it must be
            convex in the outputs; EK-FAC also needs its ``roots`` (see `posttrain.attribution.influence.losses`).
        collate: makes a batch of records.
        parameters: the values of the parameters that count; a copy of those that the model has when empty.

    Raises:
        UserError: no parameter requires a gradient.
    """

    model: nn.Module
    outputs: Callable[[nn.Module, Batch], Tensor]
    losses: Callable[[Tensor, Batch], Tensor]
    collate: Callable[[Sequence[Any]], Batch] = stack_records
    parameters: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        if not own:
            raise UserError(
                "no parameter of the model requires a gradient",
                where="influence",
                fix="put an adapter on, or call requires_grad_()",
            )
        if not self.parameters:
            # A copy: training may go on.
            object.__setattr__(self, "parameters", {name: value.detach().clone() for name, value in own.items()})
        shapes = {name: value.shape for name, value in own.items()}
        if {name: value.shape for name, value in self.parameters.items()} != shapes:
            raise UserError(
                "the parameters given are not those of the model that require a gradient", where="influence"
            )

    def at(self, parameters: Mapping[str, Tensor]) -> Self:
        """The same with other values of the parameters that count, such as a checkpoint's; more may be in the mapping.

        Raises:
            UserError: one is missing or has another shape.
        """
        if missing := [name for name in self.parameters if name not in parameters]:
            raise UserError(f"the checkpoint lacks {len(missing)} parameters, the first is {missing[0]}")
        return replace(self, parameters={name: parameters[name].detach() for name in self.parameters})

    @property
    def size(self) -> int:
        """P, the number of numbers that count."""
        return sum(prod(value.shape) for value in self.parameters.values())

    @property
    def weights(self) -> int:
        """The numbers of the whole model, those that do not count among them."""
        return sum(value.numel() for value in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors: float64 where the parameters are, else float32."""
        exact = all(value.dtype == torch.float64 for value in self.parameters.values())
        return torch.float64 if exact else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(iter(self.parameters.values())).device

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter stands in a vector [P]."""
        found, start = {}, 0
        for name, value in self.parameters.items():
            found[name] = slice(start, start + prod(value.shape))
            start += prod(value.shape)
        return found

    def batch(self, records: Sequence[Any]) -> Batch:
        """The records collated, where the model lies."""
        return tuple(part.to(self.device) for part in self.collate(records))

    def outputs_at(self, parameters: Parameters, batch: Batch) -> Tensor:
        """[B, ...], as a function of the parameters that ``torch.func`` can transform."""
        renamed = {f"model.{name}": value for name, value in parameters.items()}
        found: Tensor = functional_call(self._callable, renamed, (batch,))
        return found

    def losses_at(self, parameters: Parameters, batch: Batch) -> Tensor:
        """[B], as a function of the parameters that ``torch.func`` can transform."""
        return self.losses(self.outputs_at(parameters, batch), batch)

    def flat(self, parameters: Mapping[str, Tensor], leading: int = 0) -> Tensor:
        """One vector [..., P] of a tensor for each parameter, behind ``leading`` dimensions that they share."""
        parts = [parameters[name].flatten(leading).to(self.dtype) for name in self.parameters]
        return torch.cat(parts, -1)

    def unflat(self, vector: Tensor) -> Parameters:
        """The tensors of a vector [P], each in its parameter's shape and dtype."""
        return {
            name: vector[part].view(self.parameters[name].shape).to(self.parameters[name].dtype)
            for name, part in self.slices.items()
        }

    @cached_property
    def key(self) -> str:
        """64 hex characters that tell the model's weights, the parameters' values and the functions' names."""
        made = hashlib.sha256()
        others = {name: value for name, value in self.model.state_dict().items() if name not in self.parameters}
        for name, value in (*others.items(), *self.parameters.items()):
            made.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            made.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for part in (self.model, self.outputs, self.losses):
            # A function goes by its name, an object by its class and, where it is a dataclass, its settings.
            name = getattr(part, "__qualname__", None) or (
                f"{type(part).__qualname__} {part!r}" if hasattr(part, "__dataclass_fields__") else type(part).__name__
            )
            made.update(f"{type(part).__module__ if part is self.model else part.__module__} {name}\n".encode())
        return made.hexdigest()

    @cached_property
    def _callable(self) -> "_FunctionalModule":
        return _FunctionalModule(self.model, self.outputs)


class _FunctionalModule(nn.Module):
    """``functional_call`` calls modules; this one calls the function that calls the model."""

    def __init__(self, model: nn.Module, outputs: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.training = False
        self.model = model
        self._outputs = outputs

    def forward(self, batch: Batch) -> Tensor:
        with _eval_mode(self.model):
            return self._outputs(self.model, batch)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: True for module in model.modules() if module.training}
    if modes:
        model.eval()
    try:
        yield
    finally:
        for module in modes:
            module.training = True
