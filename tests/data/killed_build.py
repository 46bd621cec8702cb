"""Builds a dataset version in a process that is killed.

A module of its own, because that process imports it by name.
"""

import os
from pathlib import Path
from typing import Any

import forked

from posttrain.data import build
from posttrain.data.reading import pieces as cutting

STEPS: list[Any] = [
    "normalise",
    "exact",
    {"length": {"input": {"min_words": 2}}},
    "minhash",
    "pii",
    "decontaminate",
]
"""Row steps after two global ones: three phases."""

SPLITS = {"test": 0.2, "validation": 0.1}
PIECE_BYTES = 4_000


def build_in(root: Path) -> None:
    """Builds a version; runs in the process that is killed."""
    forked.start_gc()
    cutting.MAX_PIECE_BYTES, cutting.BLOCK_BYTES = PIECE_BYTES, PIECE_BYTES // 2
    os.fsync = lambda descriptor: None
    config = {"name": "set", "files": ["b.jsonl"], "workspace": root, "engine": "inline"}
    build({**config, "steps": STEPS, "splits": SPLITS})
