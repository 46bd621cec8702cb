"""Per-record gradients, a block of records at a time: raw, transformed, projected, and cached in a folder."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from posttrain.attribution.array_cache import cached_array
from posttrain.attribution.influence.functional_model import Batch, FunctionalModel, Parameters, batch_key
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

GradientMode = Literal["auto", "vmap", "loop"]

_BLOCK_NUMBERS = 2**25  # of a block's gradients: 128 MiB in float32
_BLOCK_WORK = 2**30  # weights times records of a block, as the memory of a pass grows with both
_BLOCK_RECORDS = 8, 1024  # bounds: fewer waste the processor, more gain nothing
_VERSION = 1  # raise it when the same key would stand for other numbers


def default_block_size(model: FunctionalModel) -> int:
    """Returns the records of a block: fewer of larger models, with 2^25 numbers of gradients at most."""
    fewest, most = _BLOCK_RECORDS
    return max(1, min(_BLOCK_NUMBERS // model.size, max(fewest, min(most, _BLOCK_WORK // model.weights))))


def directions_at_once(model: FunctionalModel, block_size: int) -> int:
    """Returns how many vectors to multiply at once with the curvature of a block: 1 for a large model, up to 64."""
    return max(1, min(64, _BLOCK_WORK // (model.weights * block_size)))


def record_blocks(model: FunctionalModel, count: int, block_size: int | None = None) -> Iterator[slice]:
    """Returns the rows of each block of ``count`` records.

    Raises:
        UserError: there are none, or the block holds none.
    """
    if count == 0:
        raise UserError("there are no records", where="influence")
    size = default_block_size(model) if block_size is None else block_size
    if size < 1:
        raise UserError(f"a block holds at least one record, not {size}", where="influence")
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def record_gradients(
    model: FunctionalModel, records: Sequence[Any], block_size: int | None = None, mode: GradientMode = "auto"
) -> Iterator[tuple[slice, Tensor]]:
    """Computes the gradients of the records' losses in the trainable parameters.

    Args:
        model: the model and the loss.
        records: N records, as the model collates them.
        block_size: records at a time, which bounds the memory; `default_block_size` if None.
        mode: as `batch_gradients` takes it.

    Yields:
        Rows, and their gradients [B, P] in the model's dtype.

    Raises:
        UserError: there are no records, or a gradient is not finite.
    """
    for rows in record_blocks(model, len(records), block_size):
        gradients = batch_gradients(model, model.batch(records[rows]), mode)
        check_finite(gradients, rows.start)
        yield rows, gradients


def check_records(train: Sequence[Any], test: Sequence[Any]) -> None:
    """Raises a UserError if there are no training records or no test records."""
    for name, records in (("training", train), ("test", test)):
        if not len(records):
            raise UserError(f"there are no {name} records", where="influence")


def check_finite(gradients: Tensor, start: int) -> None:
    """Raises a UserError that names the first record, counted from ``start``, whose gradient is not finite."""
    if not bool((finite := torch.isfinite(gradients).all(1)).all()):
        wrong = int((~finite).nonzero()[0]) + start
        raise UserError("the gradient of its loss is not finite", where=f"record {wrong}", fix="look at it")


def batch_gradients(model: FunctionalModel, batch: Batch, mode: GradientMode = "auto") -> Tensor:
    """Computes the gradients [B, P] of a batch's losses, detached.

    Args:
        mode: ``vmap``: all at once by ``torch.func``; ``loop``: one record after the other, for models with operations
            that ``vmap`` does not support; ``auto``: ``vmap`` where that works.
    """
    if mode == "loop":
        return _loop_gradients(model, batch)
    if mode == "vmap":
        return _vmap_gradients(model, batch)
    try:
        return _vmap_gradients(model, batch)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise  # the caller asked for too large a block; a loop would hide that
        # If the loss itself is wrong, the loop meets the same error and raises it.
        gradients = _loop_gradients(model, batch)
        log.info("gradients are taken a record at a time, as vmap refused: %s", str(error).partition("\n")[0])
        return gradients


def _vmap_gradients(model: FunctionalModel, batch: Batch) -> Tensor:
    gradients = vmap(grad(_single_record_loss(model)), in_dims=(None, 0))(model.parameters, batch)
    return model.flat(gradients, leading=1).detach()


def _loop_gradients(model: FunctionalModel, batch: Batch) -> Tensor:
    parameters = {name: value.detach().requires_grad_() for name, value in model.parameters.items()}
    rows = []
    for row in range(len(batch[0])):
        loss = model.losses_at(parameters, tuple(tensor[row : row + 1] for tensor in batch))[0]
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        rows.append(model.flat(dict(zip(parameters, gradients, strict=True))))
    return torch.stack(rows).detach()


def _single_record_loss(model: FunctionalModel) -> Any:
    def loss(parameters: Parameters, record: Batch) -> Tensor:
        return model.losses_at(parameters, tuple(tensor[None] for tensor in record))[0]

    return loss


class Projector(Protocol):
    """A linear map to fewer dimensions, such as `posttrain.attribution.influence.projection.Projection`."""

    @property
    def dimension(self) -> int:
        """K, the dimension projected to."""
        ...

    def __repr__(self) -> str:
        """Identifies the map; part of the key of cached gradients."""
        ...

    def __call__(self, vectors: Tensor) -> Tensor:
        """Projects [B, P] to [B, K]."""
        ...


class GradientTransform(Protocol):
    """A function of gradients [B, P], applied before they are projected."""

    @property
    def key(self) -> str:
        """Identifies the function; part of the key of cached gradients."""
        ...

    def __call__(self, gradients: Tensor) -> Tensor:
        """Transforms [B, P] to [B, P]."""
        ...


@dataclass(frozen=True, eq=False)
class ProjectedGradients:
    """Projected gradients of records.

    Attributes:
        rows: [N, K], or [N, P] without a projection.
        evaluations: gradients that were computed; those read from the folder do not count.
    """

    rows: Tensor
    evaluations: int


def projected_gradients(
    model: FunctionalModel,
    records: Sequence[Any],
    projection: Projector | None = None,
    *,
    transform: GradientTransform | None = None,
    folder: Path | None = None,
    block_size: int | None = None,
    mode: GradientMode = "auto",
) -> ProjectedGradients:
    """Computes the gradient of each record's loss, transforms it, then projects it.

    With a folder each block is cached in a file of its own, so that a killed run resumes, and several processes with
    one folder share the blocks among themselves, each of which returns all rows. Another block size makes other files.

    Args:
        model: the model and the loss.
        records: N records.
        projection: projection of the gradients; None for none.
        transform: function of the gradients, such as an optimiser's preconditioning; None for none.
        folder: caches the blocks; made if missing.
        block_size: records at a time; `default_block_size` if None.
        mode: as `batch_gradients` takes it.

    Raises:
        UserError: there are no records, a gradient is not finite, or the disk refused.
    """
    blocks = list(record_blocks(model, len(records), block_size))
    width = projection.dimension if projection else model.size
    rows = torch.empty(len(records), width, dtype=model.dtype)
    computed = 0

    def compute(block: slice, batch: Batch) -> np.ndarray:
        nonlocal computed
        gradients = batch_gradients(model, batch, mode)
        check_finite(gradients, block.start)
        computed += len(gradients)
        gradients = transform(gradients) if transform else gradients
        gradients = projection(gradients) if projection else gradients
        return gradients.cpu().numpy()

    with progress_bar("taking gradients", len(records), "records") as advance:
        if folder is None:
            for block in blocks:
                rows[block] = torch.from_numpy(compute(block, model.batch(records[block])))
                advance(block.stop - block.start)
            return ProjectedGradients(rows, computed)
        make_folder(folder)
        settings = [_VERSION, model.key, repr(projection), transform.key if transform else None, str(model.dtype)]
        # First the blocks that no other process is computing, then wait for the others'.
        for wait in (False, True):
            busy = []
            for block in blocks:
                batch = model.batch(records[block])
                # By everything that the numbers depend on: weights, batch, functions, transform and projection.
                file = folder / f"{digest([*settings, batch_key(batch)])}.block"
                shape = (block.stop - block.start, width)
                array = cached_array(file, shape, partial(compute, block, batch), wait)
                if array is None:
                    busy.append(block)
                    continue
                rows[block] = torch.from_numpy(array)
                advance(block.stop - block.start)
            blocks = busy
    return ProjectedGradients(rows, computed)
