"""One round: walks the list of stages and writes the round's row after each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stage import Stage, Step
from posttrain.loop.stages.collect import Collect
from posttrain.loop.stages.dataset import ExtendDataset
from posttrain.loop.stages.decide import Decide
from posttrain.loop.stages.deploy import Deploy
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.stages.fetch import Fetch
from posttrain.loop.stages.label import Label
from posttrain.loop.stages.score import Score
from posttrain.loop.stages.select import Select
from posttrain.loop.stages.train import Train
from posttrain.loop.state import RoundState
from posttrain.store.errors import UserError, Waiting
from posttrain.store.extensions import load_object
from posttrain.store.workspace import Workspace

ROUND: tuple[type[Step], ...] = (
    Collect,
    Fetch,
    Score,
    Select,
    Label,
    ExtendDataset,
    Train,
    Evaluate,
    Decide,
    Deploy,
)
BASELINE: tuple[type[Step], ...] = (Collect, Fetch, ExtendDataset, Evaluate, Deploy)
"""Round 0: measures the base model, which becomes the first champion."""


class Stopped(Exception):
    """Raised after the stage at which the user wants to stop."""


def stages_of(config: Config) -> list[type[Step]]:
    """List the stages of a round, with those that the config adds.

    Raises:
        UserError: a stage cannot be loaded, is no stage, or follows one that does not exist.
    """
    stages = list(ROUND)
    for path in config.stages:
        stage = load_object(path, "stages")
        if not (isinstance(stage, type) and issubclass(stage, Stage)):
            raise UserError(f"`{path}` is no stage", where="stages", fix="derive it from posttrain.loop.stage.Stage")
        names = [known.name for known in stages]
        if stage.after not in names:
            raise UserError(
                f"`{path}` follows the stage `{stage.after}`, which does not exist",
                where="stages",
                fix=f"set `after` to one of {', '.join(names)}",
            )
        stages.insert(names.index(stage.after) + 1, stage)
    return stages


@dataclass(frozen=True)
class RoundRunner:
    """Runs the rounds of one workspace, one at a time.

    Args:
        until: the stage after which `Stopped` is raised.
    """

    workspace: Workspace
    config: Config
    until: str | None = None

    def run_baseline(self) -> None:
        """Run round 0."""
        self._run(0, None, BASELINE)

    def run_round(self, number: int) -> None:
        """Run a round after the baseline; resume it if it has begun.

        Raises:
            Waiting: for labels, or for new inputs if there is nothing to label.
            Stopped: the stage `until` is done.
        """
        row = self.workspace.metadata.round(number)
        # Of a round in progress the champion that it began with: its batch was chosen by that one.
        champion = row.champion_before if row else ModelRegistry(self.workspace).in_service
        self._run(number, champion, stages_of(self.config))

    def _run(self, number: int, champion: str | None, stages: Sequence[type[Step]]) -> None:
        metadata = self.workspace.metadata
        row = metadata.open_round(number, champion)
        before, start = row.seconds or 0.0, time.monotonic()
        # What the last attempt decided is decided again: files, config or champion may have changed since.
        state = replace(RoundState.of(row), candidate=None, decision=None, nothing_to_label=None)
        try:
            for stage in stages:
                state = stage.execute(RoundContext(self.workspace, self.config, number, state=state))
                if stage is Deploy:
                    # One write ends the round: no kill can leave a round that is done without its decision.
                    state = replace(state, waits=None)
                    row_fields = {"candidate": state.candidate, "decision": state.decision, "status": "done"}
                    metadata.update_round(number, **row_fields, detail=state.detail())
                else:
                    # After every stage, so that a report of a running or killed round shows what it has so far.
                    metadata.update_round(number, detail=state.detail())
                # Round 0's dataset is only its start for round 1: `--until dataset` means the round in progress.
                if stage.name == self.until and not (number == 0 and stage is ExtendDataset):
                    raise Stopped
        except Waiting as waiting:
            # The state of before the stage that waits: its batch is what the next run finds.
            state = replace(state, waits=str(waiting))
            metadata.update_round(number, status="waiting", detail=state.detail())
            raise
        finally:
            # Apart from the seconds of the runs, which leave out the time between stages; added up over all attempts.
            metadata.update_round(number, seconds=before + time.monotonic() - start)
