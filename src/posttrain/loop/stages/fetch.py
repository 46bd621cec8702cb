"""Fetch: downloads or converts the models that the config names into artifacts in Hugging Face layout, once."""

from dataclasses import dataclass
from typing import ClassVar

from posttrain.loop.context import RoundContext
from posttrain.loop.fetch_model import FetchModel
from posttrain.loop.stage import RoundStep
from posttrain.loop.state import RoundState
from posttrain.store.artifacts import Artifact
from posttrain.store.message import Message


@dataclass(frozen=True)
class Fetch(FetchModel, RoundStep):
    """Fetches one model; as a step of the round, the one that rounds start from."""

    title: ClassVar[str] = Message("fetch")

    @classmethod
    def can_stop(cls, round: int) -> bool:
        """Returns False: fetching leaves nothing that a user would stop to look at."""
        return False

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Fetches the model that rounds start from."""
        return context.update(base=context.run(cls(context.config.model)).id)


def fetch_teacher(context: RoundContext) -> Artifact | None:
    """Fetches the model that a candidate learns from; None where the objective has no teacher."""
    config = context.config.train
    if not config.has_teacher:
        return None
    assert config.teacher is not None, "it was checked with the config"
    return context.run(Fetch(config.teacher, "teacher"))
