"""Which records a model learns from and which it is measured on, decided so that growth moves none."""

from posttrain.data.split.assignment import SPLIT_KEYS, SplitAssignment, assign_splits, hash_split, split_keys
from posttrain.data.split.config import SPLITS, SplitsConfig
from posttrain.data.split.frozen_settings import freeze_settings

__all__ = [
    "SPLITS",
    "SPLIT_KEYS",
    "SplitAssignment",
    "SplitsConfig",
    "assign_splits",
    "freeze_settings",
    "hash_split",
    "split_keys",
]
