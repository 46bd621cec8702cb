"""Splits records into train, validation and test, so that no record moves when the dataset grows."""

from posttrain.data.split.assignment import SPLIT_KEYS, SplitAssignment, assign_splits, hash_split, split_keys
from posttrain.data.split.config import SPLITS, FrozenSplits, SplitsConfig

__all__ = [
    "SPLITS",
    "SPLIT_KEYS",
    "FrozenSplits",
    "SplitAssignment",
    "SplitsConfig",
    "assign_splits",
    "hash_split",
    "split_keys",
]
