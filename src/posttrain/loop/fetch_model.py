"""Fetches a model into an artifact in Hugging Face layout, once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.loop.context import RoundContext
from posttrain.loop.stage import CachedWork
from posttrain.models.sources import fetch, locate
from posttrain.store.hashing import digest, file_stats


@dataclass(frozen=True)
class FetchModel(CachedWork):
    """Fetches one model.

    Args:
        model: A folder, a file or a name, as in the config.
        kind: ``model``, or ``teacher`` for one that only others learn from.
    """

    model: str
    kind: str = "model"
    name = "fetch"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns a fingerprint of the source: file names, sizes and times."""
        # Not the content: hashing gigabytes at each start would be slow.
        source = locate(self.model, context.workspace.root)
        path = Path(source)
        # A name on the Hub is not a path, even if the current folder has a file of that name.
        return {"source": digest([[source], file_stats(path) if path.is_absolute() else []])}

    def settings(self, context: RoundContext) -> dict[str, str]:
        """Returns the model's name."""
        return {self.kind: self.model}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> Mapping[str, Any]:
        """Downloads or converts the model."""
        fetch(locate(self.model, context.workspace.root), out)
        # A teacher's artifact must not depend on its path: a copy elsewhere is the same teacher.
        return {"name": self.model} if self.kind == "model" else {}
