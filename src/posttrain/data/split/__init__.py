"""Which records a model learns from and which it is measured on, decided so that growth moves none."""

from posttrain.data.split.assignment import Sides, assign
from posttrain.data.split.config import SPLITS, SplitsConfig
from posttrain.data.split.held_out import split
from posttrain.data.split.key_table import KEYS, keys
from posttrain.data.split.settled import settle

__all__ = ["KEYS", "SPLITS", "Sides", "SplitsConfig", "assign", "keys", "settle", "split"]
