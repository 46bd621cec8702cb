"""Scores a closed label set as a radix tree, all branches of a prompt in one forward pass.

The tokens of the branches lie side by side in one row after their prompt, and a mask lets each attend to its prompt and
its own ancestors only (tree attention; Miao et al. 2023, arXiv:2305.09781). So prompts and shared prefixes of labels
are computed once, and no cache is copied.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel

_WAVE_TOKENS = 6144  # bounds the memory of a forward pass, whose mask grows with the square

_HEAD_ROWS = 128

_PADDING = 256  # tokens that cost no more than another forward pass


@dataclass(frozen=True, eq=False)
class Edge:
    """A run of tokens without a fork.

    Args:
        index: its index in ``LabelTree.edges``.
        path: all tokens from the root to the end of this edge.
        start: index in ``path`` of this edge's first token.
        label: the label that ends with this edge, or None.
        children: edges that begin at its end.
        labels_below: labels that pass through or end with this edge.
    """

    index: int
    path: list[int]
    start: int
    label: int | None
    labels_below: list[int]
    children: list["Edge"] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The edge's tokens, without those of its ancestors."""
        return self.path[self.start :]


class LabelTree:
    """A radix tree of the labels' token sequences.

    Args:
        sequences: one token sequence a label, all different, none the beginning of another (each ends with the stop
            token, which occurs nowhere else).
    """

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        self.labels = len(sequences)
        self.edges: list[Edge] = []
        self.root = self._branch(sequences, list(range(len(sequences))), 0)

    def _branch(self, sequences: Sequence[list[int]], labels: list[int], depth: int) -> list[Edge]:
        by_token: dict[int, list[int]] = {}
        for label in labels:
            by_token.setdefault(sequences[label][depth], []).append(label)
        branch = []
        for group in by_token.values():
            end = depth + 1
            while (
                all(len(sequences[label]) > end for label in group)
                and len({sequences[label][end] for label in group}) == 1
            ):
                end += 1
            only = group[0] if len(group) == 1 else None
            edge = Edge(len(self.edges), sequences[group[0]][:end], depth, only, group)
            self.edges.append(edge)
            if only is None:
                edge.children.extend(self._branch(sequences, group, end))
            branch.append(edge)
        return branch


@dataclass(frozen=True)
class Prefill:
    """A batch of prompts after a forward pass.

    Args:
        indices: indices of the prompts in the caller's list.
        hidden: [B, T, D], the last hidden states without those of the shared prefix.
        lengths: int64 [B], tokens of each prompt without the shared prefix.
        cache: keys and values, of the prefix too.
        mask: int64 [B, prefix + T], 0 for padding.
    """

    indices: list[int]
    hidden: Tensor
    lengths: Tensor
    cache: Any
    mask: Tensor


@dataclass
class _Branch:
    """An edge that a prompt has not followed yet.

    Args:
        bound: log-probability up to and including the edge's first token; no label below it has more.
        columns: columns of the cache with the labels' tokens before the edge.
    """

    edge: Edge
    bound: float
    columns: list[int]


_Wave = dict[int, list[_Branch]]


def score_tree(
    lm: LanguageModel, batch: Prefill, trie: LabelTree, tolerance: float, exact: Sequence[int] | None = None
) -> np.ndarray:
    """Computes the labels' log-probabilities, normalised over them: float32 [B, K].

    Follows the most probable branches first, until all that remain hold at most the tolerance together. Those get
    their bounds, so that a prompt's error in probability mass is at most the tolerance. ``exact`` names, for each of
    the caller's prompts, a label to follow to its end in any case.
    """
    # The most probable label has at least 1 / labels: below that, it is always followed to its end.
    tolerance = min(tolerance, 0.5 / trie.labels)
    walker = _TreeWalker(lm, batch, trie, [exact[index] for index in batch.indices] if exact is not None else None)
    # Depth first: a group's part of the cache is freed before the next group's grows.
    pending = [walker]
    while pending:
        part = pending.pop()
        for group, wave in part.split(part.next_wave(tolerance)):
            group.follow(wave)
            pending.append(group)
    return walker.scores()


class _TreeWalker:
    def __init__(self, lm: LanguageModel, batch: Prefill, trie: LabelTree, exact: list[int] | None) -> None:
        self.lm = lm
        self.exact = exact
        self.lengths = batch.lengths.tolist()
        self.cache = batch.cache
        self.prefix = batch.mask.shape[1] - batch.hidden.shape[1]
        self.visible = batch.mask.bool()  # [rows in the cache, its length]: the prompts' own tokens
        self.rows = list(range(len(batch.indices)))  # the prompt of each row of the cache
        self.done = np.full((len(batch.indices), trie.labels), -np.inf)
        last = batch.hidden[torch.arange(len(self.rows)), batch.lengths - 1]
        first = _token_log_probabilities(lm, last, [[edge.tokens[0] for edge in trie.root]] * len(self.rows))
        self.open = [
            [_Branch(edge, bound, []) for edge, bound in zip(trie.root, bounds, strict=True)] for bounds in first
        ]
        for row in self.rows:
            self._record_single_tokens(row)

    def next_wave(self, tolerance: float) -> _Wave:
        """Returns the branches of this part's prompts to follow next, and removes them from ``open``."""
        wave = {}
        for row in self.rows:
            branches = sorted(self.open[row], key=lambda branch: -branch.bound)
            if not branches:
                continue
            bounds = np.array([branch.bound for branch in branches])
            follow = _worth_following(bounds, float(np.logaddexp.reduce(self.done[row])), tolerance)
            if self.exact is not None:
                follow |= np.array([self.exact[row] in branch.edge.labels_below for branch in branches])
            if follow.any():
                wave[row] = [branch for branch, worth in zip(branches, follow, strict=True) if worth]
        for row, branches in wave.items():
            total = np.cumsum([len(branch.edge.tokens) for branch in branches])
            # At least one, else an edge longer than a wave would never be followed.
            wave[row] = [b for b, tokens in zip(branches, total, strict=True) if tokens <= _WAVE_TOKENS] or branches[:1]
            selected = {id(branch) for branch in wave[row]}
            self.open[row] = [branch for branch in self.open[row] if id(branch) not in selected]
        return wave

    def split(self, wave: _Wave) -> list[tuple["_TreeWalker", _Wave]]:
        """Groups prompts with similar numbers of tokens, so that little is padded and a group fits in memory.

        The groups share ``open`` and ``done``, and hold their own part of the cache. Prompts without tokens to compute
        are dropped.
        """
        size = {row: sum(len(_input_tokens(branch.edge)) for branch in branches) for row, branches in wave.items()}
        groups: list[list[int]] = []
        padding = 0
        for row in sorted(size, key=lambda row: -size[row]):
            most = size[groups[-1][0]] if groups else 0
            padding += most - size[row]
            if groups and (len(groups[-1]) + 1) * most <= _WAVE_TOKENS and padding <= _PADDING:
                groups[-1].append(row)
            else:
                groups.append([row])
                padding = 0
        return [(self._part(sorted(rows)), {row: wave[row] for row in sorted(rows)}) for rows in groups]

    def follow(self, wave: _Wave) -> None:
        """Computes the wave's branches and replaces them by their children, or records the labels that end."""
        start = self.visible.shape[1]
        inputs = {
            row: [token for branch in branches for token in _input_tokens(branch.edge)]
            for row, branches in wave.items()
        }
        width = max(len(tokens) for tokens in inputs.values())
        device = self.visible.device
        ids = torch.zeros(len(self.rows), width, dtype=torch.long)
        positions = torch.zeros(len(self.rows), width, dtype=torch.long)
        allowed = torch.zeros(len(self.rows), width, start + width, dtype=torch.bool)
        allowed[:, :, :start] = self.visible.cpu()[:, None]
        queries: list[tuple[int, int]] = []
        targets: list[list[int]] = []
        for at, row in enumerate(self.rows):
            offset = 0
            ids[at, : len(inputs[row])] = torch.tensor(inputs[row])
            for branch in wave[row]:
                edge, count = branch.edge, len(_input_tokens(branch.edge))
                own = range(offset, offset + count)
                allowed[at, own.start : own.stop, branch.columns] = True
                allowed[at, own.start : own.stop, start + own.start : start + own.stop] = (
                    torch.ones(count, count).tril().bool()
                )
                # By depth in the tree, not by column: siblings have the same positions, as each follows the prompt.
                begin = self.prefix + self.lengths[row] + edge.start
                positions[at, own.start : own.stop] = torch.arange(begin, begin + count)
                queries += [(at, position) for position in own]
                targets += [[token] for token in edge.tokens[1:]]
                if edge.children:
                    targets.append([child.tokens[0] for child in edge.children])
                offset += count
        hidden = self.lm.decoder(
            input_ids=ids.to(device),
            attention_mask=_additive_mask(allowed, self.lm.model.dtype).to(device),
            position_ids=positions.to(device),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        states = hidden[[at for at, _ in queries], [position for _, position in queries]]
        self._record_wave(wave, iter(_token_log_probabilities(self.lm, states, targets)), start)
        # The new columns stay in the cache, hidden by default: only descendants attend to them, by their `columns`.
        hidden_columns = torch.zeros(len(self.rows), width, dtype=torch.bool, device=device)
        self.visible = torch.cat([self.visible, hidden_columns], 1)

    def scores(self) -> np.ndarray:
        """Returns normalised scores; branches that were not followed get their bounds, in equal parts per label."""
        for row, branches in enumerate(self.open):
            for branch in branches:
                below = branch.edge.labels_below
                self.done[row, below] = branch.bound - math.log(len(below))
        return (self.done - np.logaddexp.reduce(self.done, axis=1, keepdims=True)).astype(np.float32)

    def _record_wave(self, wave: _Wave, log_probabilities: Any, start: int) -> None:
        for row in self.rows:
            offset = start
            for branch in wave[row]:
                edge, bound = branch.edge, branch.bound
                for _ in edge.tokens[1:]:
                    bound += next(log_probabilities)[0]
                if edge.label is not None:
                    self.done[row, edge.label] = bound
                count = len(_input_tokens(edge))
                if edge.children:
                    columns = [*branch.columns, *range(offset, offset + count)]
                    first = next(log_probabilities)
                    self.open[row] += [
                        _Branch(child, bound + more, columns) for child, more in zip(edge.children, first, strict=True)
                    ]
                offset += count
            self._record_single_tokens(row)

    def _record_single_tokens(self, row: int) -> None:
        """Records the labels whose last edge is one token: their bound is their probability already."""
        for branch in self.open[row]:
            if branch.edge.label is not None and len(branch.edge.tokens) == 1:
                self.done[row, branch.edge.label] = branch.bound
        self.open[row] = [b for b in self.open[row] if b.edge.label is None or len(b.edge.tokens) > 1]

    def _part(self, rows: list[int]) -> "_TreeWalker":
        """Returns a walker for a subset of the prompts."""
        if rows == self.rows:
            return self
        part = copy.copy(self)
        indices = torch.tensor([self.rows.index(row) for row in rows], device=self.visible.device)
        # Shallow copies of cache and layers: the selection replaces their tensors, and must not do so in this walker.
        part.cache = copy.copy(self.cache)
        part.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        part.cache.batch_select_indices(indices)
        part.visible = self.visible[indices]
        part.rows = rows
        return part


def _worth_following(bounds: np.ndarray, complete: float, tolerance: float) -> np.ndarray:
    """Selects the branches to follow next, from descending bounds: bool, as many as bounds."""
    if tolerance <= 0:
        return np.ones(len(bounds), bool)
    # No label is complete yet, so there is no mass to compare with: first those with a hundredth of the best or more.
    if complete == -math.inf:
        return np.asarray(bounds >= bounds[0] - math.log(100))
    remaining = np.logaddexp.accumulate(bounds[::-1])[::-1]  # in this branch and all after it
    return np.asarray(remaining > complete + math.log(tolerance))


def _input_tokens(edge: Edge) -> list[int]:
    """Returns the edge's tokens to compute: not the last of a label, after which nothing is predicted."""
    return edge.tokens if edge.children else edge.tokens[:-1]


def _additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask to add to attention scores: [B, 1, Q, K]."""
    # The smallest number, not -inf: a padding row that may see nothing would become NaN.
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _token_log_probabilities(lm: LanguageModel, states: Tensor, tokens: list[list[int]]) -> list[list[float]]:
    """Returns the log-probabilities of the given tokens after each hidden state [N, D], a few states at a time."""
    log_probabilities: list[list[float]] = []
    for start in range(0, len(states), _HEAD_ROWS):
        part = tokens[start : start + _HEAD_ROWS]
        logits = lm.logits(states[start : start + _HEAD_ROWS])
        rows = [row for row, targets in enumerate(part) for _ in targets]
        values = logits[rows, [token for targets in part for token in targets]].double()
        # In place, step by step: torch's own logsumexp is forty times slower on a CPU.
        largest = logits.amax(-1, keepdim=True)
        total = logits.sub_(largest).exp_().sum(-1).log_() + largest[:, 0]
        values -= total.double()[rows]
        flat = iter(values.tolist())
        log_probabilities += [[next(flat) for _ in targets] for targets in part]
    return log_probabilities
