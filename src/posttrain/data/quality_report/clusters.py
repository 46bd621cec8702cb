"""Clusters of duplicates, from the records that were rejected for them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.pii.detect import mask
from posttrain.data.quality_report.sample import Smallest, hashes

_LARGEST, _TEXTS, _SAMPLED = 5, 3, 20_000

Member = tuple[int, str, str]
"""Hash of the cluster, its name, and a text."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of ``size`` records, of which one stayed, and the texts of some that went, personal data masked."""

    name: str
    size: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Clusters:
    """What one step found: ``sizes`` counts clusters by how many records they held, with the one that stayed."""

    sizes: dict[int, int]
    largest: tuple[Cluster, ...]

    @property
    def number(self) -> int:
        return sum(self.sizes.values())

    @property
    def removed(self) -> int:
        return sum((size - 1) * number for size, number in self.sizes.items())

    def to_json(self) -> dict[str, Any]:
        largest = [{"name": one.name, "size": one.size, "texts": list(one.texts)} for one in self.largest]
        sizes = {str(size): number for size, number in sorted(self.sizes.items())}
        return {"number": self.number, "removed": self.removed, "sizes": sizes, "largest": largest}


@dataclass
class ClusterCollector:
    """Takes in the rejected records of one step: eight bytes each, and a sample of their texts."""

    seed: int
    _members: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _sample: Smallest[Member] = field(default_factory=lambda: Smallest(_SAMPLED))

    def add(self, rejected: pa.Table, texts: pa.Array, shown: int) -> None:
        """Count the rows of a REJECTED table whose cluster is not null; of ``texts`` [N] ``shown`` characters."""
        names = rejected["cluster"].to_pylist()
        ids = rejected["id"].to_pylist()
        clusters = hashes(names, self.seed)
        self._members.append(clusters)
        order = hashes(ids, self.seed)
        for row in self._sample.wanted(order).tolist():
            text = (texts[row].as_py() or "")[:shown]
            self._sample.add(int(order[row]), ids[row], (int(clusters[row]), names[row], text))

    def clusters(self) -> Clusters:
        """Large clusters surely have members in the sample of texts; of equal ones the smaller hash comes first."""
        found, gone = np.unique(np.concatenate([np.zeros(0, np.uint64), *self._members]), return_counts=True)
        texts: dict[int, list[tuple[str, str]]] = {}
        for cluster, name, text in self._sample.rows():
            texts.setdefault(cluster, []).append((name, text))
        sampled = np.isin(found, np.array(list(texts), dtype=np.uint64))
        order = np.lexsort((found, -gone))
        largest = []
        for at in order[sampled[order]][:_LARGEST].tolist():
            members = texts[int(found[at])]
            shown = tuple(mask(text)[0] for text in list(dict.fromkeys(text for _, text in members))[:_TEXTS])
            largest.append(Cluster(members[0][0], int(gone[at]) + 1, shown))
        return Clusters(dict(Counter((gone + 1).tolist())), tuple(largest))
