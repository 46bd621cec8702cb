"""The gradient of each record's loss, a block of records at a time."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from posttrain.select.value.influence.learner import Batch, Learner, Parameters
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")

Way = Literal["auto", "vmap", "loop"]

_NUMBERS = 2**25  # of a block's gradients
_WORK = 2**30  # weights times records of a block: what a pass keeps grows with both
_RECORDS = 8, 1024  # as many as the work allows, within these bounds


def block_size(learner: Learner) -> int:
    """Records taken at once unless the caller says: fewer of larger models, with 2^25 numbers of gradients at most."""
    fewest, most = _RECORDS
    return max(1, min(_NUMBERS // learner.size, max(fewest, min(most, _WORK // learner.weights))))


def directions_at_once(learner: Learner, block: int) -> int:
    """Vectors that are multiplied at once with the curvature of a block of records: one of a large model, up to 64."""
    return max(1, min(64, _WORK // (learner.weights * block)))


def record_blocks(learner: Learner, count: int, block: int | None = None) -> Iterator[slice]:
    """The rows of each block of ``count`` records.

    Raises:
        UserError: there are none, or the block holds none.
    """
    if count == 0:
        raise UserError("there are no records", where="influence")
    size = block_size(learner) if block is None else block
    if size < 1:
        raise UserError(f"a block holds at least one record, not {size}", where="influence")
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def record_gradients(
    learner: Learner, records: Sequence[Any], block: int | None = None, way: Way = "auto"
) -> Iterator[tuple[slice, Tensor]]:
    """The gradients of the records' losses in the parameters that count.

    Args:
        learner: the model and the loss.
        records: N records, as the learner collates them.
        block: records at a time; what bounds the memory. By default as `block_size` says.
        way: as `batch_gradients` takes it.

    Yields:
        Rows, and their gradients [B, P] in the learner's dtype.

    Raises:
        UserError: there are no records, or a gradient is not finite.
    """
    for rows in record_blocks(learner, len(records), block):
        found = batch_gradients(learner, learner.batch(records[rows]), way)
        check_finite(found, rows.start)
        yield rows, found


def check_records(train: Sequence[Any], test: Sequence[Any]) -> None:
    """Raise a UserError if there are no training records or no test records."""
    for name, records in (("training", train), ("test", test)):
        if not len(records):
            raise UserError(f"there are no {name} records", where="influence")


def check_finite(gradients: Tensor, start: int) -> None:
    """Raise a UserError that names the first record, counted from ``start``, whose gradient is not finite."""
    if not bool((finite := torch.isfinite(gradients).all(1)).all()):
        wrong = int((~finite).nonzero()[0]) + start
        raise UserError("the gradient of its loss is not finite", where=f"record {wrong}", fix="look at it")


def batch_gradients(learner: Learner, batch: Batch, way: Way = "auto") -> Tensor:
    """The gradients [B, P] of a batch's losses, detached.

    Args:
        way: ``vmap``: all at once by ``torch.func``; ``loop``: one record after the other, for models with operations
            that ``vmap`` does not know; ``auto``: at once where that is possible.
    """
    if way == "loop":
        return _by_loop(learner, batch)
    if way == "vmap":
        return _by_vmap(learner, batch)
    try:
        return _by_vmap(learner, batch)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # If the loss itself is wrong, the loop meets the same error and raises it.
        found = _by_loop(learner, batch)
        log.info("gradients are taken a record at a time, as vmap refused: %s", str(error).partition("\n")[0])
        return found


def _by_vmap(learner: Learner, batch: Batch) -> Tensor:
    found = vmap(grad(_loss_of_one(learner)), in_dims=(None, 0))(learner.parameters, batch)
    return learner.flat(found, leading=1).detach()


def _by_loop(learner: Learner, batch: Batch) -> Tensor:
    parameters = {name: value.detach().requires_grad_() for name, value in learner.parameters.items()}
    rows = []
    for row in range(len(batch[0])):
        loss = learner.losses_at(parameters, tuple(part[row : row + 1] for part in batch))[0]
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        rows.append(learner.flat(dict(zip(parameters, found, strict=True))))
    return torch.stack(rows).detach()


def _loss_of_one(learner: Learner) -> Any:
    def loss(parameters: Parameters, record: Batch) -> Tensor:
        return learner.losses_at(parameters, tuple(part[None] for part in record))[0]

    return loss
