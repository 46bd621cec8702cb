"""A radix trie over the token sequences of a closed label set."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Edge:
    """A run of tokens without a fork.

    Args:
        index: its place in ``LabelTrie.edges``.
        path: all tokens from the root to the end of this edge.
        start: where in ``path`` this edge's own tokens begin.
        label: the label that ends with this edge, or None.
        children: edges that go on from its end.
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
        """The edge's own tokens."""
        return self.path[self.start :]


class LabelTrie:
    """The labels' token sequences, forks made explicit.

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
