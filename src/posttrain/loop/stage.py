"""The base class of the stages of a round.

To add a stage, derive a class from `Stage` and either add it to the list in `posttrain.loop.round`, or name it in the
config by its dotted path (``stages: ["package.module:Name"]``) with `Stage.after` set to the stage that it follows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from posttrain.loop.context import RoundContext
from posttrain.loop.state import RoundState


class Step(ABC):
    """A step of a round: takes the state and returns the next one."""

    name: str

    @classmethod
    @abstractmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Run the step of the round; returns the state after it."""


class Stage(Step):
    """A function from artifacts and config to one artifact, which is run once and found again under its key.

    The key is the hash of `name`, `version`, `inputs`, `settings` and the seed. All that decides the outcome must be in
    it, or a later run takes an old artifact for a new one.

    Attributes:
        name: of the stage; also decides its seed.
        kind: of the artifact.
        version: to be increased when the same inputs give another outcome; an upgrade then redoes only this work.
        seeded: False for a stage without a random choice, whose artifact all rounds share.
        after: the stage that one from outside the package follows in the round.
    """

    kind: str
    version: ClassVar[int] = 1
    seeded: ClassVar[bool] = True
    after: ClassVar[str] = "dataset"

    def inputs(self, context: RoundContext) -> Mapping[str, str]:
        """Artifact ids, or digests of things outside the store, by their role."""
        return {}

    def settings(self, context: RoundContext) -> Mapping[str, Any]:
        """The part of the config that decides the outcome, as JSON values."""
        return {}

    @abstractmethod
    def run(self, context: RoundContext, out: Path, scratch: Path) -> Mapping[str, Any]:
        """Do the work.

        Args:
            context: the round, with the state that the stages before have left.
            out: an empty folder, which becomes the artifact.
            scratch: a folder that survives a kill, to resume from.

        Returns:
            The artifact's meta, as JSON values that follow from the inputs: they are part of its id.
        """

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Run the stage as a step of the round; returns the state with its artifact.

        A stage that needs more than `inputs` gives, or that makes more than one artifact, overrides this.
        """
        return context.state.with_output(cls.name, context.run(cls()).id)
