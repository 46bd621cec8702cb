"""One round: walks the list of steps and saves the round's state after each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import adjusted_config, last_tuning
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.stage import RoundStep, Stage
from posttrain.loop.stages.adjust import AdjustConfig
from posttrain.loop.stages.answer import Answer
from posttrain.loop.stages.collect import Collect
from posttrain.loop.stages.dataset import BuildDataset
from posttrain.loop.stages.decide import Decide
from posttrain.loop.stages.deploy import Deploy
from posttrain.loop.stages.drift import MeasureDrift
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.stages.fetch import Fetch
from posttrain.loop.stages.label import Label
from posttrain.loop.stages.merge import Merge
from posttrain.loop.stages.negatives import HardNegativePairs
from posttrain.loop.stages.pseudo import PseudoLabel
from posttrain.loop.stages.score import Score
from posttrain.loop.stages.select import Select
from posttrain.loop.stages.suggest import Suggest
from posttrain.loop.stages.train import Train
from posttrain.loop.stages.tune import Tune
from posttrain.loop.state import RoundState, save_state
from posttrain.loop.tuning import tuning_of, with_tuning
from posttrain.store.errors import UserError, Waiting, suggest
from posttrain.store.extensions import Registry
from posttrain.store.workspace import Workspace

ROUND: tuple[type[RoundStep], ...] = (
    Collect,
    Fetch,
    MeasureDrift,
    Score,
    Select,
    Answer,
    Suggest,
    Label,
    BuildDataset,
    PseudoLabel,
    HardNegativePairs,
    Tune,
    Train,
    Merge,
    Evaluate,
    Decide,
    AdjustConfig,
    Deploy,
)
ROUND_ZERO: tuple[type[RoundStep], ...] = (Collect, Fetch, BuildDataset, Evaluate, Deploy)
"""Measures the base model, which becomes the first champion."""

STAGES: Registry[type[RoundStep]] = Registry("stage", "posttrain.stages", {step.name: step for step in ROUND}, Stage)
"""The steps of every round, and the stages that a config may add to them."""


class Stopped(Exception):
    """Raised after the step at which the user wants to stop."""


def round_steps(config: Config) -> list[type[RoundStep]]:
    """Lists the steps of a round, with the stages that the config adds.

    Raises:
        UserError: a stage does not exist, cannot be loaded, is not a stage, has the name of another one or follows one
            that does not exist.
    """
    steps = list(ROUND)
    for name in config.stages:
        if name not in STAGES:
            raise UserError(f"there is no stage `{name}`", where="stages", fix=suggest(name, STAGES))
        stage = STAGES.load(name, "stages")
        names = [step.name for step in steps]
        if stage.name in names:
            raise UserError(f"the round has a stage `{stage.name}` already", where="stages", fix="remove one of them")
        if stage.after not in names:
            raise UserError(
                f"`{name}` follows the stage `{stage.after}`, which does not exist",
                where="stages",
                fix=f"set `after` to one of {', '.join(names)}",
            )
        steps.insert(names.index(stage.after) + 1, stage)
    return steps


def known_steps(config: Config | None) -> Sequence[type[RoundStep]]:
    """Lists the steps of a round as `round_steps`; the built-in ones without a config, or where one of its is gone."""
    try:
        return round_steps(config) if config is not None else ROUND
    except UserError:
        return ROUND


def stage_reports(config: Config | None, record: RoundRecord) -> dict[str, StageReport]:
    """Returns what each step reports of a round, by its name."""
    return {step.name: step.report(record) for step in known_steps(config)}


@dataclass(frozen=True)
class RoundRunner:
    """Runs the rounds of one workspace, one at a time.

    Args:
        workspace: The workspace.
        config: Its config.
        until: Name of the step after which `Stopped` is raised.
    """

    workspace: Workspace
    config: Config
    until: str | None = None

    def run_round_zero(self) -> None:
        """Runs round 0."""
        self._run(0, None, ROUND_ZERO)

    def run_round(self, number: int, *, partial: bool = False) -> None:
        """Runs a later round; resumes it if it has begun.

        Args:
            number: Its number.
            partial: True to continue with the labels given so far, where the round waits for more.

        Raises:
            Waiting: for labels, or for new inputs if there is nothing to label.
            Stopped: the step `until` is done.
        """
        row = self.workspace.metadata.round(number)
        # Of a round in progress the champion that it began with: its batch was chosen by that one.
        champion = row.champion_before if row else ModelRegistry(self.workspace).champion_id
        self._run(number, champion, round_steps(self.config), partial)

    def _run(self, number: int, champion: str | None, steps: Sequence[type[RoundStep]], partial: bool = False) -> None:
        metadata = self.workspace.metadata
        row = metadata.open_round(number, champion)
        adjusted, tuning = adjusted_config(self.workspace, self.config), last_tuning(self.workspace)
        earlier, start = row.seconds or 0.0, time.monotonic()
        # What the last attempt decided is decided again: files, config or champion may have changed since.
        saved = RoundState.from_row(row)
        state = replace(saved, candidate=None, decision=None, nothing_to_label=None).without(Tune.name)
        try:
            for step in steps:
                # From the step that tunes them on, the round's own settings hold.
                config = with_tuning(adjusted, tuning_of(state) or tuning)
                context = RoundContext(
                    self.workspace, config, number, state=state, file_config=self.config, partial=partial
                )
                state = step.execute(context)
                if step.ends_round:
                    state = replace(state, waits_for=None)
                # After every step, so that a report of a running or killed round shows what it has so far. Most of the
                # steps that a config leaves out change nothing.
                if state != saved or step.ends_round:
                    save_state(metadata, number, state, status="done" if step.ends_round else None)
                    saved = state
                if step.name == self.until and step.can_stop(number):
                    raise Stopped
        except Waiting as waiting:
            # The state of before the step that waits: its batch is what the next run finds.
            state = replace(state, waits_for=waiting.what)
            save_state(metadata, number, state, status="waiting")
            raise
        finally:
            # Apart from the seconds of the runs, which leave out the time between steps; added up over all attempts.
            save_state(metadata, number, state, seconds=earlier + time.monotonic() - start)
