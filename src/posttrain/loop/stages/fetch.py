"""Fetch: the models that the config names as artifacts in Hugging Face layout, converted once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.loop.context import RoundContext
from posttrain.models.sources import fetch, locate
from posttrain.store.artifacts import Artifact
from posttrain.store.hashing import digest, file_stats


def fetch_base(turn: RoundContext) -> Artifact:
    """The model that rounds start from."""
    return _fetched(turn, turn.config.model, "model", {"name": turn.config.model})


def fetch_teacher(turn: RoundContext) -> Artifact | None:
    """The model that a candidate learns from, where the objective has one; where it lies is no part of what it is."""
    config = turn.config.train
    if not config.has_teacher:
        return None
    assert config.distill.teacher is not None, "it was checked with the config"
    return _fetched(turn, config.distill.teacher, "teacher", {})


def _fetched(turn: RoundContext, name: str, kind: str, meta: Mapping[str, Any]) -> Artifact:
    source = locate(name, turn.workspace.root)

    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        fetch(source, out)
        return meta

    return turn.stage("fetch", kind, {"source": _fingerprint(source)}, {kind: name}, work, seeded=False)


def _fingerprint(source: str) -> str:
    path = Path(source)
    # A model by name: nothing in the current folder is meant.
    return digest([[source], file_stats(path) if path.is_absolute() else []])
