"""Everything the stages of one round share: workspace, config, round number, seeds and the state so far."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from posttrain.data.versions.version import Dataset, read_dataset
from posttrain.loop.config import Config
from posttrain.loop.state import RoundState
from posttrain.store.artifacts import Artifact
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.loop.stage import Stage
    from posttrain.models.language_model import LanguageModel


@dataclass(frozen=True)
class RoundContext:
    """One round of a workspace.

    Args:
        workspace: where artifacts and rounds are stored.
        config: the workspace's config.
        number: of the round; 0 measures the base model.
        in_round: False for work outside of rounds, such as a preview; its runs and its time belong to no round.
        state: what the stages before have produced.
    """

    workspace: Workspace
    config: Config
    number: int
    in_round: bool = True
    state: RoundState = field(default_factory=RoundState)

    def run(self, stage: "Stage") -> Artifact:
        """Run a stage, or return its artifact if it has run before under the same key.

        Raises:
            Waiting: the stage waits for labels.
        """
        return run_stage(
            self.workspace,
            stage.name,
            stage.version,
            kind=stage.kind,
            inputs=stage.inputs(self),
            config=stage.settings(self),
            # Without a random choice the work has the same key in all rounds, which share it.
            seed=self.seed(stage.name) if stage.seeded else 0,
            round=self.number if self.in_round else None,
            work=lambda out, scratch: stage.run(self, out, scratch),
        )

    def after(self, stage: "type[Stage]") -> Self:
        """Run a stage as a step of the round; returns the context with the state after it."""
        return replace(self, state=stage.execute(self))

    def with_state(self, **fields: Any) -> Self:
        """The context with some fields of the state set."""
        return replace(self, state=self.update(**fields))

    def update(self, **fields: Any) -> RoundState:
        """The state with some fields set."""
        return replace(self.state, **fields)

    def seed(self, name: str) -> int:
        """The seed of a stage of this round."""
        # A hash, no shared generator: a stage has the same seed whether the stages before it ran or were found.
        return int.from_bytes(hashlib.sha256(f"{self.config.seed}/{self.number}/{name}".encode()).digest()[:4], "big")

    def artifact(self, id: str) -> Artifact:
        """An artifact by its id."""
        return self.workspace.artifacts.get(id)

    def path(self, id: str) -> Path:
        """The folder of an artifact."""
        return self.workspace.artifacts.path(id)

    def dataset(self, id: str) -> Dataset:
        """Read a dataset version."""
        return read_dataset(self.path(id))

    def model(self, id: str) -> "LanguageModel":
        """Load a model for scoring and evaluation, in the precision that it is stored in."""
        from posttrain.models.language_model import load_language_model

        return load_language_model(self.path(id), self.config.task)


def known_inputs(context: RoundContext, dataset: str) -> set[str]:
    """Input ids of a dataset version."""
    return set(context.dataset(dataset).records["input_id"].to_pylist())


def task_key(config: Config) -> dict[str, Any]:
    """The part of a stage's key that the task decides."""
    return {"task": config.task.model_dump(mode="json")}
