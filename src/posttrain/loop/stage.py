"""The base classes of the stages of a round.

To add a stage, derive a class from `Stage` and either add it to the list in `posttrain.loop.round`, or name it in the
config, by its dotted path (``stages: ["package.module:Name"]``) or as an entry point of the group ``posttrain.stages``,
with `RoundStep.after` set to the stage that it follows. What `posttrain status`, the pages and the report show of it,
it says itself in `RoundStep.report` and `RoundStep.sections`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from posttrain.loop.context import RoundContext
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport
from posttrain.loop.state import RoundState
from posttrain.report.section import Section


class CachedWork(ABC):
    """A function from artifacts and config to one artifact, which is run once and found again under its key.

    `RoundContext.run` runs it. The key is the hash of `name`, `version`, `inputs`, `settings` and the seed. All that
    decides the outcome must be in it, or a later run takes an old artifact for a new one.

    Attributes:
        name: Name of the work; also decides its seed.
        kind: Kind of the artifact.
        version: To be increased when the same inputs give another outcome; an upgrade then redoes only this work.
        seeded: False for work without a random choice, whose artifact all rounds share.
    """

    name: str
    kind: str
    version: ClassVar[int] = 1
    seeded: ClassVar[bool] = True

    def inputs(self, context: RoundContext) -> Mapping[str, str]:
        """Returns artifact ids, or digests of things outside the store, by their role."""
        return {}

    def settings(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the part of the config that decides the outcome, as JSON values."""
        return {}

    @abstractmethod
    def run(self, context: RoundContext, out: Path, scratch: Path) -> Mapping[str, Any]:
        """Does the work.

        Args:
            context: The round, with the results of the stages before in `RoundContext.state`.
            out: An empty folder, which becomes the artifact.
            scratch: A folder that survives a kill, to resume from.

        Returns:
            The artifact's meta, as JSON values that follow from the inputs: they are part of its id.
        """


class RoundStep(ABC):
    """A step of a round: takes the state and returns the next one.

    Attributes:
        name: Name of the step, as in ``posttrain run --until``.
        title: Its name on pages; `name` if empty.
        after: Name of the step that one from outside the package follows in the round.
        ends_round: True for the step whose state is the result of the round.
    """

    name: str
    title: ClassVar[str] = ""
    after: ClassVar[str] = "dataset"
    ends_round: ClassVar[bool] = False

    @classmethod
    def can_stop(cls, round: int) -> bool:
        """Returns True if ``posttrain run --until`` may stop after this step in a round of this number."""
        return True

    @classmethod
    @abstractmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Runs the step of the round; returns the state after it."""

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports what the step did in a round, finished or not."""
        return StageReport()

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterable[Section]:
        """Yields the step's sections of the report on all rounds."""
        return ()


class Stage(CachedWork, RoundStep):
    """A step of a round that is one piece of cached work."""

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Runs the stage as a step of the round; returns the state with its artifact.

        A stage that needs more than `inputs` gives, or that makes more than one artifact, overrides this.
        """
        return context.state.with_output(cls.name, context.run(cls()).id)
