"""Projected gradients of records, which a folder can keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.select.value.influence.gradients import Way, batch_gradients, check_finite, record_blocks
from posttrain.select.value.influence.kept import content_key, kept
from posttrain.select.value.influence.learner import Batch, Learner
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest
from posttrain.store.progress import task

_VERSION = 1  # raised when the same key would stand for other numbers


class Narrowing(Protocol):
    """A linear map to fewer numbers, such as `posttrain.select.value.influence.projection.Projection`."""

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


class Change(Protocol):
    """What is done to gradients [B, P] before they are projected."""

    @property
    def key(self) -> str:
        """Tells two changes apart."""
        ...

    def __call__(self, gradients: Tensor) -> Tensor:
        """[B, P]."""
        ...


@dataclass(frozen=True, eq=False)
class Features:
    """Projected gradients.

    Attributes:
        rows: [N, K], or [N, P] where nothing projected them.
        evaluations: gradients that were computed for them; those found in the folder are not among them.
    """

    rows: Tensor
    evaluations: int


def features(
    learner: Learner,
    records: Sequence[Any],
    projection: Narrowing | None = None,
    *,
    change: Change | None = None,
    folder: Path | None = None,
    block: int | None = None,
    way: Way = "auto",
) -> Features:
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
        block: records at a time, as `posttrain.select.value.influence.gradients.record_blocks` takes it.
        way: as `posttrain.select.value.influence.gradients.batch_gradients` takes it.

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

    with task("taking gradients", len(records), "records") as advance:
        if folder is None:
            for part in parts:
                rows[part] = torch.from_numpy(compute(part, learner.batch(records[part])))
                advance(part.stop - part.start)
            return Features(rows, computed)
        make_folder(folder)
        settings = [_VERSION, learner.key, repr(projection), change.key if change else None, str(learner.dtype)]
        for wait in (False, True):  # first what nobody else is at
            left = []
            for part in parts:
                batch = learner.batch(records[part])
                file = folder / f"{digest([*settings, content_key(batch)])}.block"
                shape = (part.stop - part.start, width)
                found = kept(file, shape, lambda part=part, batch=batch: compute(part, batch), wait)  # type: ignore[misc]
                if found is None:
                    left.append(part)
                    continue
                rows[part] = torch.from_numpy(found)
                advance(part.stop - part.start)
            parts = left
    return Features(rows, computed)
