"""Which tokens of a row of several sequences attend to which, grouped so that little is padded.

All of it is NumPy: a row is planned in a thread beside the model, and once a second thread has had PyTorch start
threads of its own, OpenMP lets all of them sleep between two operations, which costs the model a fifth of its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.models import varlen

_PADDED_SHARE = 0.1  # of a group's queries may be padding
_PADDED = 128  # queries that cost no more than another group


@dataclass(frozen=True)
class Piece:
    """A run of tokens in a row.

    Args:
        start: where it begins in the row.
        length: its tokens.
        parent: number of the piece that it goes on from, which stands before it; None where a sequence begins.
    """

    start: int
    length: int
    parent: int | None = None

    @property
    def places(self) -> range:
        """Where its tokens stand in the row."""
        return range(self.start, self.start + self.length)


@dataclass(frozen=True)
class Group:
    """N pieces of at most Q tokens that are computed side by side.

    Args:
        queries: int64 [N, Q], places of their tokens in the row; 0 where there is padding.
        before: int64 [N, P], places of what they go on from; 0 where there is padding, which comes first.
        hidden: bool [N, P], where that is; None where there is none.
    """

    queries: Tensor
    before: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Plan:
    """How attention over one row of T tokens is computed.

    Args:
        groups: all pieces, by length.
        order: int64 [A], the groups' queries one after another.
        places: int64 [T], where each token of the row stands in ``order``.
        real: bool [A, 1], where ``order`` is no padding; None where there is none.
        spans: the same row for a kernel that takes all pieces at once; None where there is no such kernel.
    """

    groups: list[Group]
    order: Tensor
    places: Tensor
    real: Tensor | None
    spans: varlen.Spans | None = None


def plan(pieces: Sequence[Piece], device: torch.device | str = "cpu", *, one_group: bool = False) -> Plan:
    """Group the pieces of a row by length, so that little is padded, or all together."""
    before = _places_before(pieces)
    together: list[list[int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: (pieces[index].length, len(before[index]))):
        if not together or not (one_group or _fits(together[-1], index, pieces)):
            together.append([])
        together[-1].append(index)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    groups, orders, reals = [], [], []
    for members in together:
        queries, real = _side_by_side([pieces[index].places for index in members], right=False)
        others, known = _side_by_side([before[index] for index in members], right=True)
        groups.append(Group(tensor(queries), tensor(others), None if known.all() else tensor(~known)))
        orders.append(queries.ravel())
        reals.append(real.ravel())
    order, real = np.concatenate(orders), np.concatenate(reals)
    places = np.empty(np.count_nonzero(real), dtype=np.int64)
    places[order[real]] = np.flatnonzero(real)
    spans = None
    if torch.device(device).type == "cuda":
        spans = varlen.spans([piece.places for piece in pieces], before, device)
    return Plan(groups, tensor(order), tensor(places), None if real.all() else tensor(real[:, None]), spans)


def _places_before(pieces: Sequence[Piece]) -> list[list[int]]:
    """For each piece the places in the row of all that it goes on from."""
    before: list[list[int]] = []
    for piece in pieces:
        parent = piece.parent
        before.append([] if parent is None else [*before[parent], *pieces[parent].places])
    return before


def _side_by_side(rows: Sequence[Sequence[int]], *, right: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of places in one array, to its left or right, 0 where there is padding; and where there is none."""
    width = max(map(len, rows))
    found = np.zeros((len(rows), width), dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=bool)
    for number, row in enumerate(rows):
        at = slice(width - len(row), None) if right else slice(len(row))
        found[number, at] = row
        real[number, at] = True
    return found, real


def _fits(group: list[int], index: int, pieces: Sequence[Piece]) -> bool:
    """Whether a group stays nearly without padding when a longer piece joins it."""
    area = (len(group) + 1) * pieces[index].length
    padding = area - sum(pieces[member].length for member in group) - pieces[index].length
    return padding <= max(_PADDED, _PADDED_SHARE * area)
