"""Packs a micro-batch into one row, shared prompts once, and switches a model to packed attention where it may."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posttrain.models import attention
from posttrain.models.attention_plan import AttentionPlan, RowSegment, plan_attention_rows
from posttrain.models.chat import TokenizedExample
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel, has_full_attention

Unit = Sequence[TokenizedExample]
"""Sequences that stay together in a micro-batch: one, or the two of a pair, which may share a prompt."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch of N sequences with S supervised tokens, in one row of T tokens.

    Args:
        ids: int64 [1, T].
        positions: int64 [1, T], counted from the beginning of each sequence.
        plan: plan of its attention.
        predicting: int64 [S], indices in the row whose next token is supervised.
        targets: int64 [S], those tokens.
        sequence: int64 [S], which sequence each belongs to.
        sequences: N.
        tokens: tokens of all sequences, what is shared counted for each.
        pairs: pairs of a token of the row and one that it sees, itself included.
        padded: whether the model needs padded rows instead, a sequence each.
    """

    ids: Tensor
    positions: Tensor
    plan: AttentionPlan
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    sequences: int
    tokens: int
    pairs: int
    padded: bool


def micro_batches(units: Iterable[Unit], budget: int) -> Iterator[list[Unit]]:
    """Cuts one optimiser step's units, in their order, into micro-batches of at most ``budget`` tokens, or one unit.

    What units share is not taken off: a budget is a promise about memory that holds without it.
    """
    waiting: list[Unit] = []
    filled = 0
    for unit in units:
        tokens = sum(len(sequence.ids) for sequence in unit)
        # A unit over the budget still makes a batch of its own: a single example is never dropped.
        if waiting and filled + tokens > budget:
            yield waiting
            waiting, filled = [], 0
        waiting.append(unit)
        filled += tokens
    if waiting:
        yield waiting


def pack(units: Sequence[Unit], device: torch.device | str = "cpu", *, padded: bool = False) -> Packed:
    """Puts the units' sequences into one row.

    The beginning that all sequences share (system message, template) stands in it once, and so does the prompt that
    the sequences of a unit share, unless they are ``padded`` for a model that cannot be given one row. A sequence's
    last token is only predicted, so it is not read.
    """
    return packs([units], device, padded=padded)[0]


def packs(parts: Sequence[Sequence[Unit]], device: torch.device | str = "cpu", *, padded: bool = False) -> list[Packed]:
    """Several micro-batches, each as `pack` makes it: all at once, which takes a fraction of the time."""
    tokens = _Tokens.concatenate([sequence for units in parts for unit in units for sequence in unit])
    rows, first = [], 0
    for units in parts:
        rows.append(_RowBuilder(tokens))
        first = rows[-1].fill(units, first, padded=padded)
    return _packed(rows, tokens, device, padded=padded)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """S sequences one after another.

    Args:
        ids: int64 [T].
        starts: index of each sequence's first token.
        lengths: length of each sequence.
        supervised_at: int64, indices of the supervised tokens but for a sequence's first, as nothing predicts it.
        counts: int64 [S], how many of them are in each sequence.
        free: tokens of each sequence that are read and predict nothing supervised before its first one that does.
    """

    ids: np.ndarray
    starts: list[int]
    lengths: list[int]
    supervised_at: np.ndarray
    counts: np.ndarray
    free: list[int]

    @classmethod
    def concatenate(cls, sequences: Sequence[TokenizedExample]) -> Self:
        # Lists without a token would be of floats: nothing else is cast in an unsafe way.
        ids = np.concatenate([sequence.ids for sequence in sequences], dtype=np.int64, casting="unsafe")
        supervised = np.concatenate([sequence.supervised for sequence in sequences], dtype=bool, casting="unsafe")
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        ends = np.cumsum(lengths)
        starts = ends - lengths
        # No token precedes a sequence's first, so nothing could predict it.
        supervised[starts[lengths > 0]] = False
        supervised_at = np.flatnonzero(supervised)
        bounds = np.searchsorted(supervised_at, np.append(starts, len(ids)))
        counts = np.diff(bounds)
        # A sequence without a supervised token may be shared up to its end.
        first = np.where(counts > 0, np.append(supervised_at, 0)[bounds[:-1]] - starts, lengths)
        return cls(ids, starts.tolist(), lengths.tolist(), supervised_at, counts, (first - 1).tolist())

    def shared(self, numbers: range, start: int) -> int:
        """Returns where sequences diverge, but at most the first position that predicts a supervised token."""
        # A sequence of its own shares nothing.
        if len(numbers) < 2:
            return start
        limit = min(self.free[numbers.start : numbers.stop])
        if limit <= start:
            return start
        indices = np.array(self.starts[numbers.start : numbers.stop])[:, None] + np.arange(start, limit)
        beginnings = self.ids[indices]
        apart = (beginnings[1:] != beginnings[0]).any(0)
        return start + int(apart.argmax()) if apart.any() else limit


class _RowBuilder:
    """A row that is put together of parts of sequences."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens
        self.segments: list[RowSegment] = []
        self.parts: list[slice] = []  # of the tokens' ids, for each segment
        self.positions: list[int] = []  # of each segment's first token
        self.moved: list[int] = []  # how much later each sequence's own tokens stand than in `tokens`
        self.length = 0

    def fill(self, units: Sequence[Unit], first: int, *, padded: bool) -> int:
        """Adds all units, whose sequences begin with ``first``; returns the number of the sequence after them."""
        last = first + sum(map(len, units))
        # Padded rows hold a sequence each, so they can share nothing.
        common = 0 if padded else self._tokens.shared(range(first, last), 0)
        root = self._add(first, 0, common, None) if common else None
        for unit in units:
            own = range(first, first + len(unit))
            first = own.stop
            start, parent = common, root
            # The prompt of a pair or a group is computed once, its gradient summed over its answers.
            if not padded and len(unit) > 1 and (shared := self._tokens.shared(own, common)) > common:
                parent = self._add(own[0], common, shared, root)
                start = shared
            for number in own:  # nothing before its start predicts a supervised token
                # Subtracting it maps a place in the sequence to its place in the row.
                self.moved.append(self.length - self._tokens.starts[number] - start)
                self._add(number, start, self._tokens.lengths[number] - 1, parent)
        return last

    def _add(self, number: int, first: int, last: int, parent: int | None) -> int:
        """Adds a sequence's tokens from ``first`` to before ``last``; returns the number of the segment."""
        start, length = self._tokens.starts[number] + first, max(0, last - first)
        self.segments.append(RowSegment(self.length, length, parent))
        self.parts.append(slice(start, start + length))
        self.positions.append(first)
        self.length += length
        return len(self.segments) - 1


def _packed(rows: Sequence[_RowBuilder], tokens: _Tokens, device: torch.device | str, *, padded: bool) -> list[Packed]:
    """The rows, which have all sequences."""

    def split(values: np.ndarray, sizes: list[int]) -> Sequence[Tensor]:
        return torch.split(torch.from_numpy(values).to(device), sizes)

    lengths = [row.length for row in rows]
    segments = np.array([segment.length for row in rows for segment in row.segments])
    first = np.array([position for row in rows for position in row.positions])
    positions = np.repeat(first - np.cumsum(segments) + segments, segments)
    positions += np.arange(len(positions))
    pairs = segments * first + segments * (segments + 1) // 2  # a token sees those before it and itself
    pairs = np.add.reduceat(pairs, np.cumsum([0, *(len(row.segments) for row in rows[:-1])]))
    moved = [indices for row in rows for indices in row.moved]
    counts = [len(row.moved) for row in rows]
    numbers = np.concatenate([np.arange(count) for count in counts])
    bounds = np.cumsum([0, *counts])
    supervised_at = np.diff(np.append(0, np.cumsum(tokens.counts))[bounds]).tolist()
    read = np.diff(np.append(0, np.cumsum(tokens.lengths))[bounds]).tolist()
    return [
        Packed(ids[None], own[None], plan, predicting, targets, sequence, count, all_tokens, seen, padded)
        for ids, own, plan, predicting, targets, sequence, count, all_tokens, seen in zip(
            split(np.concatenate([tokens.ids[part] for row in rows for part in row.parts]), lengths),
            split(positions, lengths),
            plan_attention_rows([row.segments for row in rows], device, one_group=padded),
            # Minus one: the state before a token predicts it.
            split(tokens.supervised_at + np.repeat(moved, tokens.counts) - 1, supervised_at),
            split(tokens.ids[tokens.supervised_at], supervised_at),
            split(np.repeat(numbers, tokens.counts), supervised_at),
            counts,
            read,
            pairs.tolist(),
            strict=True,
        )
    ]


@contextmanager
def packed_attention(lm: LanguageModel, longest: int) -> Iterator[bool]:
    """Switches the model to packed attention if a probe shows that it gives equal states for up to ``longest`` tokens.

    Yields:
        Whether it does; if not, rows must be padded, and the model's attention is its own.
    """
    config: Any = lm.decoder.config
    before = config._attn_implementation
    attention.register_packed_attention()
    try:
        packs = has_full_attention(lm, longest) and _supports_packing(lm)
        if not packs:
            lm.model.set_attn_implementation(before)
        yield packs
    finally:
        lm.model.set_attn_implementation(before)


@torch.no_grad()
def _supports_packing(lm: LanguageModel) -> bool:
    """Switches to packed attention and see whether sequences in one row come out as in rows of their own, and apart."""
    # Token ids that every vocabulary has, and none of the special ones that stand at 0 to 2.
    last = int(lm.model.config.get_text_config().vocab_size) - 1
    ids = [min(token, last) for token in range(3, 19)]
    # Three lengths, one alone and two that share a prompt: each way in which rows are packed.
    probe = [TokenizedExample([*ids, *ids[:more]], [False] * 15 + [True] * (1 + more)) for more in (0, 2, 5)]
    units = [probe[:1], probe[1:]]
    config: Any = lm.decoder.config
    # Dropout would make the two passes differ.
    training = lm.model.training
    lm.model.eval()
    try:
        rows = predicting_states(lm, pack(units, lm.device, padded=True))
        lm.model.set_attn_implementation(attention.PACKED_ATTENTION)
        if (
            config._attn_implementation != attention.PACKED_ATTENTION
        ):  # the model's layers call no attention but their own
            return False
        packed = pack(units, lm.device)
        states, reach = _states_and_input_gradients(lm, packed, 1)
    except (KeyError, TypeError, ValueError):  # its layers call attention otherwise, or with what this one refuses
        return False
    finally:
        lm.model.train(training)
    # Differences may be small because all that attention does is small, as it is in a model that was just made.
    crosses = reach[packed.predicting[packed.sequence != 1]].any()
    return bool((states - rows).abs().max() < 0.05 * rows.abs().max() and not crosses)


def _states_and_input_gradients(lm: LanguageModel, packed: Packed, sequence: int) -> tuple[Tensor, Tensor]:
    """Hidden states [S, D], and where those of one sequence come from.

    The second is their gradient [T, D] by the row's embedded tokens. It is 0, in every precision, at tokens that do not
    take part; a difference after other tokens were put there would be rounded otherwise where experts sort tokens.
    """
    embedded: list[Tensor] = []

    def keep(_module: Any, _arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = lm.model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            states = predicting_states(lm, packed)
            own = states[packed.sequence == sequence]
            # Weights that differ, as the plain sum of normed states never changes.
            weights = torch.linspace(-1, 1, own.shape[1], dtype=own.dtype, device=own.device).expand_as(own)
            (reach,) = torch.autograd.grad(own, embedded, weights)
    finally:
        hook.remove()
    return states.detach(), reach[0]
