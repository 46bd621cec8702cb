"""What finished rounds left behind for the next one."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.versions.version import Dataset, read_dataset
from posttrain.loop.config import Config
from posttrain.store.artifacts import Artifact
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

Work = Callable[[Path, Path], Mapping[str, Any]]


@dataclass(frozen=True)
class RoundContext:
    """One round: its number, and the workspace and config that it runs in.

    Args:
        in_round: False for work beside the rounds, which is none of a round's time.
    """

    workspace: Workspace
    config: Config
    number: int
    in_round: bool = True

    def stage(
        self,
        name: str,
        kind: str,
        inputs: Mapping[str, str],
        config: Mapping[str, Any],
        work: Work,
        *,
        version: int = 1,
        seeded: bool = True,
    ) -> Artifact:
        """Run one stage of this round, or find its finished artifact.

        Args:
            name: of the stage; also decides its seed.
            seeded: False for stages without a random choice, whose work is then shared between rounds.
        """
        return run_stage(
            self.workspace,
            name,
            version,
            kind=kind,
            inputs=inputs,
            config=config,
            seed=self.seed(name) if seeded else 0,
            round=self.number if self.in_round else None,
            work=work,
        )

    def seed(self, name: str) -> int:
        """The seed of a stage of this round."""
        return int.from_bytes(hashlib.sha256(f"{self.config.seed}/{self.number}/{name}".encode()).digest()[:4], "big")

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


def known_inputs(turn: RoundContext, dataset: str) -> set[str]:
    """Input ids of a dataset version."""
    return set(turn.dataset(dataset).records["input_id"].to_pylist())


def task_key(config: Config) -> dict[str, Any]:
    """What the task contributes to a stage's key."""
    return {"task": config.task.model_dump(mode="json")}
