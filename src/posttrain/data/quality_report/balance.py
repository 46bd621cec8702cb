"""How evenly records are spread over labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Balance:
    """Records by label, most common first.

    Attributes:
        entropy: Shannon entropy of the labels' shares, in bits; ``log2`` of the number of labels if all are as common.
        evenness: entropy over that greatest one (Pielou 1966), between 0 and 1; 1 for a single label.
        imbalance: the most common label's count over the least common one's, of those that occur.
    """

    counts: dict[str, int]
    entropy: float
    evenness: float
    imbalance: float

    def to_json(self) -> dict[str, Any]:
        return {
            "labels": len(self.counts),
            "entropy_bits": self.entropy,
            "evenness": self.evenness,
            "imbalance_ratio": self.imbalance,
            "counts": self.counts,
        }


def balance(counts: Mapping[str, int]) -> Balance:
    """The balance of at least one label, each with at least one record."""
    ordered = dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    numbers = np.array(list(ordered.values()), dtype=np.float64)
    shares = numbers / numbers.sum()
    entropy = max(0.0, -float(shares @ np.log2(shares)))
    evenness = entropy / float(np.log2(len(shares))) if len(shares) > 1 else 1.0
    return Balance(ordered, entropy, evenness, float(numbers.max() / numbers.min()))
