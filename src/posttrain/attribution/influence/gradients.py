"""Per-record gradients, a block of records at a time: raw, transformed, projected, and cached in a folder."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

_BLOCK_NUMBERS = 2**25  # of a block's gradients

_BLOCK_WORK = 2**30  # weights times records of a block: what a pass keeps grows with both

_BLOCK_RECORDS = 8, 1024  # as many as the work allows, within these bounds

_VERSION = 1  # raised when the same key would stand for other numbers


def block_size(learner: FunctionalModel) -> int:
    """Records taken at once unless the caller says: fewer of larger models, with 2^25 numbers of gradients at most."""
    fewest, most = _BLOCK_RECORDS
    return max(1, min(_BLOCK_NUMBERS // learner.size, max(fewest, min(most, _BLOCK_WORK // learner.weights))))


def directions_at_once(learner: FunctionalModel, block: int) -> int:
    """Vectors that are multiplied at once with the curvature of a block of records: one of a large model, up to 64."""
    return max(1, min(64, _BLOCK_WORK // (learner.weights * block)))


def record_blocks(learner: FunctionalModel, count: int, block: int | None = None) -> Iterator[slice]:
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
    learner: FunctionalModel, records: Sequence[Any], block: int | None = None, way: GradientMode = "auto"
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


def batch_gradients(learner: FunctionalModel, batch: Batch, way: GradientMode = "auto") -> Tensor:
    """The gradients [B, P] of a batch's losses, detached.

    Args:
        way: ``vmap``: all at once by ``torch.func``; ``loop``: one record after the other, for models with operations
            that ``vmap`` does not know; ``auto``: at once where that is possible.
    """
    if way == "loop":
        return _loop_gradients(learner, batch)
    if way == "vmap":
        return _vmap_gradients(learner, batch)
    try:
        return _vmap_gradients(learner, batch)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # If the loss itself is wrong, the loop meets the same error and raises it.
        found = _loop_gradients(learner, batch)
        log.info("gradients are taken a record at a time, as vmap refused: %s", str(error).partition("\n")[0])
        return found


def _vmap_gradients(learner: FunctionalModel, batch: Batch) -> Tensor:
    found = vmap(grad(_single_record_loss(learner)), in_dims=(None, 0))(learner.parameters, batch)
    return learner.flat(found, leading=1).detach()


def _loop_gradients(learner: FunctionalModel, batch: Batch) -> Tensor:
    parameters = {name: value.detach().requires_grad_() for name, value in learner.parameters.items()}
    rows = []
    for row in range(len(batch[0])):
        loss = learner.losses_at(parameters, tuple(part[row : row + 1] for part in batch))[0]
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        rows.append(learner.flat(dict(zip(parameters, found, strict=True))))
    return torch.stack(rows).detach()


def _single_record_loss(learner: FunctionalModel) -> Any:
    def loss(parameters: Parameters, record: Batch) -> Tensor:
        return learner.losses_at(parameters, tuple(part[None] for part in record))[0]

    return loss


class Projector(Protocol):
    """A linear map to fewer numbers, such as `posttrain.attribution.influence.projection.Projection`."""

    @property
    def dimension(self) -> int:
        """K."""
        ...

    def __repr__(self) -> str:
        """Tells two maps apart."""
        ...

    def __call__(self, vectors: Tensor) -> Tensor:
        """[B, P] to [B, K]."""
        ...


class GradientTransform(Protocol):
    """What is done to gradients [B, P] before they are projected."""

    @property
    def key(self) -> str:
        """Tells two changes apart."""
        ...

    def __call__(self, gradients: Tensor) -> Tensor:
        """[B, P]."""
        ...


@dataclass(frozen=True, eq=False)
class ProjectedGradients:
    """Projected gradients.

    Attributes:
        rows: [N, K], or [N, P] where nothing projected them.
        evaluations: gradients that were computed for them; those found in the folder are not among them.
    """

    rows: Tensor
    evaluations: int


def projected_gradients(
    learner: FunctionalModel,
    records: Sequence[Any],
    projection: Projector | None = None,
    *,
    change: GradientTransform | None = None,
    folder: Path | None = None,
    block: int | None = None,
    way: GradientMode = "auto",
) -> ProjectedGradients:
    """The gradient of each record's loss, changed, then projected.

    With a folder each block is kept in a file of its own, written whole or not at all, under a name made of all that
    its numbers hang on: the weights, the batch, the names of the functions, the change and the projection. So what was
    killed goes on where it was, and several processes with one folder share the blocks out among themselves, each of
    which holds all rows in the end. Another block size makes other files.

    Args:
        learner: the model and the loss.
        records: N records.
        projection: none when None.
        change: such as an optimiser's preconditioning.
        folder: made if missing.
        block: records at a time, as `posttrain.attribution.influence.gradients.record_blocks` takes it.
        way: as `posttrain.attribution.influence.gradients.batch_gradients` takes it.

    Raises:
        UserError: there are no records, a gradient is not finite, or the disk refused.
    """
    parts = list(record_blocks(learner, len(records), block))
    width = projection.dimension if projection else learner.size
    rows = torch.empty(len(records), width, dtype=learner.dtype)
    computed = 0

    def compute(part: slice, batch: Batch) -> np.ndarray:
        nonlocal computed
        found = batch_gradients(learner, batch, way)
        check_finite(found, part.start)
        computed += len(found)
        found = change(found) if change else found
        found = projection(found) if projection else found
        return found.cpu().numpy()

    with progress_bar("taking gradients", len(records), "records") as advance:
        if folder is None:
            for part in parts:
                rows[part] = torch.from_numpy(compute(part, learner.batch(records[part])))
                advance(part.stop - part.start)
            return ProjectedGradients(rows, computed)
        make_folder(folder)
        settings = [_VERSION, learner.key, repr(projection), change.key if change else None, str(learner.dtype)]
        for wait in (False, True):  # first what nobody else is at
            left = []
            for part in parts:
                batch = learner.batch(records[part])
                file = folder / f"{digest([*settings, batch_key(batch)])}.block"
                shape = (part.stop - part.start, width)
                found = cached_array(file, shape, lambda part=part, batch=batch: compute(part, batch), wait)  # type: ignore[misc]
                if found is None:
                    left.append(part)
                    continue
                rows[part] = torch.from_numpy(found)
                advance(part.stop - part.start)
            parts = left
    return ProjectedGradients(rows, computed)
