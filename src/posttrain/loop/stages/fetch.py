"""Fetch: downloads or converts the models that the config names into artifacts in Hugging Face layout, once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.loop.context import RoundContext
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState
from posttrain.models.sources import fetch, locate
from posttrain.store.artifacts import Artifact
from posttrain.store.hashing import digest, file_stats


@dataclass(frozen=True)
class Fetch(Stage):
    """Fetches one model.

    Args:
        model: A folder, a file or a name, as in the config.
        kind: ``model``, or ``teacher`` for one that only others learn from.
    """

    model: str
    kind: str = "model"
    name = "fetch"
    seeded = False

    @classmethod
    def can_stop(cls, round: int) -> bool:
        """Returns False: fetching leaves nothing that a user would stop to look at."""
        return False

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Fetches the model that rounds start from."""
        return context.update(base=context.run(cls(context.config.model)).id)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns a fingerprint of the source: file names, sizes and times."""
        # Not the content: hashing gigabytes at each start would be slow.
        source = locate(self.model, context.workspace.root)
        path = Path(source)
        # A name on the Hub is no path, even if the current folder has a file of that name.
        return {"source": digest([[source], file_stats(path) if path.is_absolute() else []])}

    def settings(self, context: RoundContext) -> dict[str, str]:
        """Returns the model's name."""
        return {self.kind: self.model}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> Mapping[str, Any]:
        """Downloads or converts the model."""
        fetch(locate(self.model, context.workspace.root), out)
        # A teacher's artifact must not depend on its path: a copy elsewhere is the same teacher.
        return {"name": self.model} if self.kind == "model" else {}


def fetch_teacher(context: RoundContext) -> Artifact | None:
    """Fetches the model that a candidate learns from; None where the objective has no teacher."""
    config = context.config.train
    if not config.has_teacher:
        return None
    assert config.distill.teacher is not None, "it was checked with the config"
    return context.run(Fetch(config.distill.teacher, "teacher"))
