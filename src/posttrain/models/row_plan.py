"""Which tokens of a row of several sequences attend to which, grouped so that little is padded.

All of it is NumPy: a row is planned in a thread beside the model, and once a second thread has had PyTorch start
threads of its own, OpenMP lets all of them sleep between two operations, which costs the model a fifth of its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.models import varlen

_PADDED_SHARE = 0.1  # of a group's queries may be padding
_PADDED = 128  # queries that cost no more than another group


class Piece(NamedTuple):
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
    return plans([pieces], device, one_group=one_group)[0]


def plans(
    rows: Sequence[Sequence[Piece]], device: torch.device | str = "cpu", *, one_group: bool = False
) -> list[Plan]:
    """The plans of several rows, each as `plan` makes it: all at once, as most of NumPy's time is that of its calls."""
    before = [_places_before(row) for row in rows]
    pool, pool_starts, before_lengths = _pooled([places for row in before for places in row])
    starts, lengths = np.array([piece[:2] for row in rows for piece in row]).T
    counts = list(map(len, rows))
    sorted_pieces = np.lexsort((before_lengths, lengths, np.repeat(np.arange(len(rows)), counts)))
    starts, lengths, pool_starts, before_lengths = (
        values[sorted_pieces] for values in (starts, lengths, pool_starts, before_lengths)
    )
    first_pieces = _begins(counts)
    of_rows = [_sizes(part.tolist(), one_group=one_group) for part in np.split(lengths, first_pieces[1:])]
    sizes = [size for row in of_rows for size in row]
    firsts = _begins(sizes)  # the first piece of each group
    widths, most_before = np.maximum.reduceat(lengths, firsts), np.maximum.reduceat(before_lengths, firsts)
    order, real = _side_by_side(starts, lengths, np.repeat(widths, sizes))
    found, known = _side_by_side(pool_starts, before_lengths, np.repeat(most_before, sizes), right=True)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    def grouped(values: Tensor, width: np.ndarray) -> list[Tensor]:
        shapes = list(zip(sizes, width.tolist(), strict=True))
        parts = torch.split(values, [number * across for number, across in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    orders, others = tensor(order), tensor(pool[found] * known)
    whole = (np.minimum.reduceat(before_lengths, firsts) == most_before).tolist()
    hidden = [None] * len(sizes) if all(whole) else grouped(tensor(~known), most_before)
    groups = [
        Group(own, before, None if none else off)
        for own, before, off, none in zip(
            grouped(orders, widths), grouped(others, most_before), hidden, whole, strict=True
        )
    ]
    group_counts = list(map(len, of_rows))
    tokens, areas = np.add.reduceat(lengths, first_pieces), np.add.reduceat(widths * sizes, _begins(group_counts))
    places = np.empty(tokens.sum(), dtype=np.int64)
    in_all = order + np.repeat(_begins(tokens), areas)
    in_row = np.arange(len(order)) - np.repeat(_begins(areas), areas)
    places[in_all[real]] = in_row[real]
    left = iter(groups)
    return [
        Plan(
            list(islice(left, count)),
            own_order,
            own_places,
            None if len(own_order) == len(own_places) else own_real,
            _spans(row, own_before, device),
        )
        for row, own_before, count, own_order, own_places, own_real in zip(
            rows,
            before,
            group_counts,
            torch.split(orders, areas.tolist()),
            torch.split(tensor(places), tokens.tolist()),
            torch.split(tensor(real[:, None]), areas.tolist()),
            strict=True,
        )
    ]


def _spans(pieces: Sequence[Piece], before: list[np.ndarray], device: torch.device | str) -> varlen.Spans | None:
    if torch.device(device).type != "cuda":
        return None
    return varlen.spans([piece.places for piece in pieces], before, device)


def _sizes(lengths: list[int], *, one_group: bool) -> list[int]:
    """How many pieces, the shortest first, are in each group: as many as stay nearly without padding."""
    found: list[int] = []
    filled = 0  # tokens of the last group
    for length in lengths:
        area = (found[-1] + 1) * length if found else 0
        padding = area - filled - length
        if found and (one_group or padding <= max(_PADDED, _PADDED_SHARE * area)):
            found[-1] += 1
            filled += length
        else:
            found.append(1)
            filled = length
    return found


def _places_before(pieces: Sequence[Piece]) -> list[np.ndarray]:
    """For each piece int64, the places in the row of all that it goes on from: one array for those of one parent."""
    before: list[np.ndarray] = []
    nothing, after = np.empty(0, np.int64), dict[int, np.ndarray]()
    for piece in pieces:
        parent = piece.parent
        if parent is not None and parent not in after:
            own = pieces[parent].places
            after[parent] = np.append(before[parent], np.arange(own.start, own.stop))
        before.append(nothing if parent is None else after[parent])
    return before


def _begins(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64: where runs of so many begin that stand one after another."""
    found: np.ndarray = np.cumsum(counts) - np.asarray(counts)
    return found


def _pooled(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays one after another, each once, where each begins, and how long it is."""
    starts: dict[int, int] = {}
    found, length = [], 0
    for array in arrays:
        if id(array) not in starts:
            starts[id(array)] = length
            found.append(array)
            length += len(array)
    return np.concatenate(found), np.array([starts[id(array)] for array in arrays]), np.array(list(map(len, arrays)))


def _side_by_side(
    starts: np.ndarray, lengths: np.ndarray, widths: np.ndarray, *, right: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of places, each padded to its width, one after another; and where there is no padding.

    Args:
        starts: int64 [N], the first place of each.
        lengths: int64 [N], its places.
        widths: int64 [N], its places and its padding, which is 0.
        right: whether the padding comes first.
    """
    begun = starts - (widths - lengths) if right else starts  # with the padding
    found = np.repeat(begun - _begins(widths), widths)
    found += np.arange(len(found))
    real = found >= np.repeat(starts, widths) if right else found < np.repeat(starts + lengths, widths)
    found *= real
    return found, real
