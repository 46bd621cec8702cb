"""Fetch: the base model as an artifact in Hugging Face layout, converted once."""

from pathlib import Path
from typing import Any

from posttrain.loop.turn import Turn
from posttrain.models.sources import fetch, locate
from posttrain.store.artifacts import Artifact
from posttrain.store.hashing import digest


def fetch_base(turn: Turn) -> Artifact:
    """The model that the config names."""
    source = locate(turn.config.model, turn.workspace.root)

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        fetch(source, out)
        return {"name": turn.config.model}

    inputs = {"source": _fingerprint(source)}
    return turn.stage("fetch", "model", inputs, {"model": turn.config.model}, work, seeded=False)


def _fingerprint(source: str) -> str:
    """Tells two states of a model's files apart by name, size and time: hashing large ones is slow."""
    path = Path(source)
    if not path.is_absolute():
        return digest([[source], []])  # a model by name: nothing in the current folder is meant
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return digest([[source], [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]])
