"""Everything the stages of one round share: workspace, config, round number, seeds and the state so far."""

import hashlib
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from posttrain.data.versions.version import Dataset, read_dataset
from posttrain.loop.config import Config
from posttrain.loop.state import RoundState
from posttrain.models.precision import ComputePrecision, choose_precision, count_weights
from posttrain.store.artifacts import Artifact
from posttrain.store.stage_runner import find_finished, run_stage
from posttrain.store.workspace import Workspace
from posttrain.train.config import TrainConfig

if TYPE_CHECKING:
    from posttrain.loop.stage import CachedWork, RoundStep
    from posttrain.models.language_model import LanguageModel

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class RoundContext:
    """One round of a workspace.

    Args:
        workspace: The workspace, where artifacts and rounds are stored.
        config: Its config.
        number: Number of the round; 0 measures the base model.
        in_round: False for work outside of rounds, such as a preview; its runs and its time belong to no round.
        state: Results of the steps before.
        file_config: The config as ``posttrain.yaml`` has it; None where no earlier round has adjusted it.
        partial: True to continue with the labels given so far, at least one.
    """

    workspace: Workspace
    config: Config
    number: int
    in_round: bool = True
    state: RoundState = field(default_factory=RoundState)
    file_config: Config | None = None
    partial: bool = False

    def run(self, work: "CachedWork") -> Artifact:
        """Does the work, or returns its artifact if it was done before under the same key.

        Raises:
            Waiting: the work waits for labels.
        """
        return run_stage(
            self.workspace,
            work.name,
            work.version,
            kind=work.kind,
            inputs=work.inputs(self),
            config=work.settings(self),
            # Without a random choice the work has the same key in all rounds, which share it.
            seed=self.seed(work.name) if work.seeded else 0,
            round=self.number if self.in_round else None,
            work=lambda out, scratch: work.run(self, out, scratch),
        )

    def find(self, work: "CachedWork") -> Artifact | None:
        """Returns the artifact of work that was done before; None where it was not, or is damaged."""
        seed = self.seed(work.name) if work.seeded else 0
        return find_finished(self.workspace, work.name, work.version, work.inputs(self), work.settings(self), seed)

    def after(self, step: "type[RoundStep]") -> Self:
        """Runs a step of the round; returns the context with the state after it."""
        return replace(self, state=step.execute(self))

    def with_state(self, **fields: Any) -> Self:
        """Returns the context with some fields of the state set."""
        return replace(self, state=self.update(**fields))

    def update(self, **fields: Any) -> RoundState:
        """Returns the state with some fields set."""
        return replace(self.state, **fields)

    def seed(self, name: str) -> int:
        """Returns the seed of a piece of work of this round."""
        # A hash, no shared generator: a stage has the same seed whether the stages before it ran or were found.
        return int.from_bytes(hashlib.sha256(f"{self.config.seed}/{self.number}/{name}".encode()).digest()[:4], "big")

    def artifact(self, id: str) -> Artifact:
        """Returns an artifact by its id."""
        return self.workspace.artifacts.get(id)

    def path(self, id: str) -> Path:
        """Returns the folder of an artifact."""
        return self.workspace.artifacts.path(id)

    def dataset(self, id: str) -> Dataset:
        """Reads a dataset version."""
        return read_dataset(self.path(id))

    def model(self, id: str) -> "LanguageModel":
        """Loads a model for scoring and evaluation."""
        from posttrain.models.language_model import load_language_model

        return load_language_model(self.path(id), self.config.task, self.precision)

    @property
    def precision(self) -> ComputePrecision:
        """The precision that the workspace's models compute with: the config's, or that of the first evaluation.

        What is resumed on another machine must end the same, whatever is faster there.
        """
        if self.config.precision != "auto":
            return self.config.precision
        # Of the main loop: the arms of a comparison compute as it does.
        evaluations = self.workspace.metadata.for_arm("").runs(stage="evaluate")
        if not evaluations:
            chosen = choose_precision(count_weights(self.path(self.state.base)) if self.state.base else None)
            log.info("  precision %s, the faster one on this machine, from now on", chosen)
            return chosen
        precision: ComputePrecision = evaluations[0].config["precision"]
        return precision

    @property
    def train_config(self) -> TrainConfig:
        """The train section, with its precision resolved."""
        return self.config.train.with_precision(self.precision)


def input_ids(context: RoundContext, dataset: str) -> set[str]:
    """Returns the input ids of a dataset version."""
    return set(context.dataset(dataset).records["input_id"].to_pylist())


def model_key(context: RoundContext) -> dict[str, Any]:
    """Returns the part of a stage's key that answers of a loaded model depend on: its task and its precision."""
    return task_key(context.config) | {"precision": context.precision}


def task_key(config: Config) -> dict[str, Any]:
    """Returns the part of a stage's key that the task decides."""
    return {"task": config.task.key}
