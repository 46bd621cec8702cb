"""Plans attention over one row of several segments, grouped so that little is padded.

All of it is NumPy: a row is planned in a thread beside the model, and once a second thread has had PyTorch start
threads of its own, OpenMP lets all of them sleep between two operations, which costs the model a fifth of its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_PADDING_SHARE = 0.1  # of a group's queries may be padding

_PADDING_QUERIES = 128  # queries that cost no more than another group


@dataclass(frozen=True)
class VarlenSpans:
    """The positions of the queries and keys of N segments, for a kernel that takes sequences of varying length.

    To the kernel (FlashAttention-2, Dao 2023, arXiv:2307.08691) each segment is a sequence whose queries are its own
    tokens, and whose keys are the tokens that it continues and then its own. A query sees all of these but those after
    it, counted from the last one, so that the continued segments are seen whole. Pairs of other segments cost nothing.

    Args:
        keys: int64 [1, A], indices in the row of the segments' keys, one after another; None where the keys of each
            are its own tokens, which is the row as it is.
        query_starts: int32 [N + 1], where each segment's queries begin in the row, and where the last one's end.
        key_starts: int32 [N + 1], where its keys begin among all A keys, and where the last one's end.
        most_queries: the most queries of one segment.
        most_keys: the most keys of one segment.
    """

    keys: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


def varlen_spans(own: Sequence[range], before: Sequence[np.ndarray], device: torch.device | str) -> VarlenSpans:
    """The spans of segments that follow one another and fill their row.

    Args:
        own: indices in the row of each segment's tokens.
        before: int64, positions of the tokens that each continues.
    """
    queries = [len(indices) for indices in own]
    keys = [len(indices) + len(others) for indices, others in zip(own, before, strict=True)]

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    indices = None
    # Without shared prefixes keys are the row itself, and copying them would be for nothing.
    if any(map(len, before)):
        own_indices = [np.arange(indices.start, indices.stop) for indices in own]
        together = np.concatenate([part for parts in zip(before, own_indices, strict=True) for part in parts])
        indices = torch.from_numpy(together)[None].to(device)
    return VarlenSpans(indices, starts(queries), starts(keys), max(queries), max(keys))


class RowSegment(NamedTuple):
    """A run of tokens in a row.

    Args:
        start: its first position in the row.
        length: its tokens.
        parent: index of the segment that it continues, which precedes it; None where a sequence begins.
    """

    start: int
    length: int
    parent: int | None = None

    @property
    def indices(self) -> range:
        """The positions of its tokens in the row."""
        return range(self.start, self.start + self.length)


@dataclass(frozen=True)
class SegmentGroup:
    """N segments of at most Q tokens that are computed side by side.

    Args:
        queries: int64 [N, Q], indices of their tokens in the row; 0 where there is padding.
        before: int64 [N, P], positions of the tokens that they continue; 0 where there is padding, which comes first.
        hidden: bool [N, P], where there is padding; None if there is none.
    """

    queries: Tensor
    before: Tensor
    hidden: Tensor | None


# Not frozen: torch's compiler looks into frozen dataclasses, and would compile each layer again for every new layout.
@dataclass(eq=False)
class AttentionPlan:
    """The layout of attention over one row of T tokens.

    Args:
        groups: all segments, by length.
        order: int64 [A], the groups' queries one after another.
        inverse: int64 [T], where each token of the row stands in ``order``.
        real: bool [A, 1], where ``order`` is not padding; None where there is none.
        spans: the same row for a kernel that takes all segments at once; None where there is no such kernel.
    """

    groups: list[SegmentGroup]
    order: Tensor
    inverse: Tensor
    real: Tensor | None
    spans: VarlenSpans | None = None


def plan_attention_rows(
    rows: Sequence[Sequence[RowSegment]], device: torch.device | str = "cpu", *, one_group: bool = False
) -> list[AttentionPlan]:
    """Plans the attention of several rows: groups each row's segments by length, so that little is padded, or all."""
    # All rows at once, as most of NumPy's time is that of its calls.
    before = [_prefix_positions(row) for row in rows]
    pool, pool_starts, before_lengths = _concatenate_unique([indices for row in before for indices in row])
    starts, lengths = np.array([segment[:2] for row in rows for segment in row]).T
    counts = list(map(len, rows))
    # Sorted by row, then by length: neighbours pad each other least. The prefix breaks ties, as it is padded too.
    by_length = np.lexsort((before_lengths, lengths, np.repeat(np.arange(len(rows)), counts)))
    starts, lengths, pool_starts, before_lengths = (
        values[by_length] for values in (starts, lengths, pool_starts, before_lengths)
    )
    # The sort keeps rows apart, so that a row's groups are a slice of all groups.
    first_segments = _run_starts(counts)
    of_rows = [_group_sizes(part.tolist(), one_group=one_group) for part in np.split(lengths, first_segments[1:])]
    sizes = [size for row in of_rows for size in row]
    firsts = _run_starts(sizes)  # the first segment of each group
    # A group is as wide as its longest segment, which comes last, and its longest prefix.
    widths, most_before = np.maximum.reduceat(lengths, firsts), np.maximum.reduceat(before_lengths, firsts)
    order, real = _side_by_side(starts, lengths, np.repeat(widths, sizes))
    prefix, prefix_is_real = _side_by_side(pool_starts, before_lengths, np.repeat(most_before, sizes), right=True)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    def grouped(values: Tensor, width: np.ndarray) -> list[Tensor]:
        shapes = list(zip(sizes, width.tolist(), strict=True))
        parts = torch.split(values, [number * across for number, across in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    # Padding is index 0, a token that exists: gathered like the others, and masked afterwards.
    orders, others = tensor(order), tensor(pool[prefix] * prefix_is_real)
    # A mask costs a pass over the scores, so groups of equal prefixes have none.
    without_padding = (np.minimum.reduceat(before_lengths, firsts) == most_before).tolist()
    hidden = [None] * len(sizes) if all(without_padding) else grouped(tensor(~prefix_is_real), most_before)
    groups = [
        SegmentGroup(own, before, None if unpadded else off)
        for own, before, off, unpadded in zip(
            grouped(orders, widths), grouped(others, most_before), hidden, without_padding, strict=True
        )
    ]
    group_counts = list(map(len, of_rows))
    tokens, areas = np.add.reduceat(lengths, first_segments), np.add.reduceat(widths * sizes, _run_starts(group_counts))
    inverse = np.empty(tokens.sum(), dtype=np.int64)
    # Rows share one array here, so that a single scatter inverts all of them.
    in_all = order + np.repeat(_run_starts(tokens), areas)
    in_row = np.arange(len(order)) - np.repeat(_run_starts(areas), areas)
    inverse[in_all[real]] = in_row[real]
    remaining = iter(groups)
    return [
        AttentionPlan(
            list(islice(remaining, count)),
            own_order,
            own_inverse,
            None if len(own_order) == len(own_inverse) else own_real,
            _varlen_spans(row, own_before, device),
        )
        for row, own_before, count, own_order, own_inverse, own_real in zip(
            rows,
            before,
            group_counts,
            torch.split(orders, areas.tolist()),
            torch.split(tensor(inverse), tokens.tolist()),
            torch.split(tensor(real[:, None]), areas.tolist()),
            strict=True,
        )
    ]


def _varlen_spans(
    segments: Sequence[RowSegment], before: list[np.ndarray], device: torch.device | str
) -> VarlenSpans | None:
    # Only CUDA has the kernel, and making the spans costs a copy to the device.
    if torch.device(device).type != "cuda":
        return None
    return varlen_spans([segment.indices for segment in segments], before, device)


def _group_sizes(lengths: list[int], *, one_group: bool) -> list[int]:
    """Splits segments, the shortest first, into groups with little padding; returns the number in each."""
    sizes: list[int] = []
    filled = 0  # tokens of the last group
    for length in lengths:
        area = (sizes[-1] + 1) * length if sizes else 0
        # Adding the next segment widens all of the group's rows to its length.
        padding = area - filled - length
        if sizes and (one_group or padding <= max(_PADDING_QUERIES, _PADDING_SHARE * area)):
            sizes[-1] += 1
            filled += length
        else:
            sizes.append(1)
            filled = length
    return sizes


def _prefix_positions(segments: Sequence[RowSegment]) -> list[np.ndarray]:
    """Returns the positions of all tokens that each segment continues, int64; segments of one parent share an array."""
    before: list[np.ndarray] = []
    nothing, after = np.empty(0, np.int64), dict[int, np.ndarray]()
    for segment in segments:
        parent = segment.parent
        # One array for all children of a parent, which `_concatenate_unique` stores once.
        if parent is not None and parent not in after:
            own = segments[parent].indices
            after[parent] = np.append(before[parent], np.arange(own.start, own.stop))
        before.append(nothing if parent is None else after[parent])
    return before


def _run_starts(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64: where runs of so many begin that stand one after another."""
    starts: np.ndarray = np.cumsum(counts) - np.asarray(counts)
    return starts


def _concatenate_unique(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays one after another, each once, where each begins, and how long it is."""
    starts: dict[int, int] = {}
    unique, length = [], 0
    for array in arrays:
        # By identity, not by content: equal prefixes of other rows are other tokens.
        if id(array) not in starts:
            starts[id(array)] = length
            unique.append(array)
            length += len(array)
    return np.concatenate(unique), np.array([starts[id(array)] for array in arrays]), np.array(list(map(len, arrays)))


def _side_by_side(
    starts: np.ndarray, lengths: np.ndarray, widths: np.ndarray, *, right: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of indices, each padded to its width, one after another; and where there is no padding.

    Args:
        starts: int64 [N], the first index of each.
        lengths: int64 [N], its indices.
        widths: int64 [N], its indices and its padding, which is 0.
        right: whether the padding comes first.
    """
    # A prefix is padded on the left, so that its last tokens stand beside the segment's own.
    begun = starts - (widths - lengths) if right else starts  # with the padding
    positions = np.repeat(begun - _run_starts(widths), widths)
    positions += np.arange(len(positions))
    real = positions >= np.repeat(starts, widths) if right else positions < np.repeat(starts + lengths, widths)
    positions *= real
    return positions, real
