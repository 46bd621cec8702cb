"""The loop: runs rounds of stages in order.

Resume and caching are the same: a finished stage is not run again.
"""

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from posttrain.loop.canary import judge_canary
from posttrain.loop.config import Config, config_lines
from posttrain.loop.context import RoundContext, input_ids
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES
from posttrain.loop.history import days_since_training, finished_rounds, finished_states, label_values
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.round import RoundRunner, Stopped, round_steps
from posttrain.loop.stages.collect import RoundData, collect
from posttrain.loop.stages.dataset import NothingToLabel
from posttrain.loop.stages.drift import measure_drift
from posttrain.loop.stages.evaluate import Evaluate, format_metrics
from posttrain.loop.stages.fetch import Fetch
from posttrain.loop.state import RoundState, save_state
from posttrain.loop.suites import check_suite_files
from posttrain.loop.triggers import evaluate_triggers
from posttrain.models.sources import locate
from posttrain.store.database import utc_now
from posttrain.store.errors import DamagedArtifactError, UserError, Waiting
from posttrain.store.logs import EVENT
from posttrain.store.workspace import Workspace
from posttrain.tune.space import Space
from posttrain.tune.trainings.config import SHAPE_KEYS

log = logging.getLogger("posttrain")


@dataclass
class Loop:
    """The loop of one workspace.

    Args:
        workspace: The workspace, where everything is stored.
        config: Its config, checked.
    """

    workspace: Workspace
    config: Config
    registry: ModelRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = ModelRegistry(self.workspace, self.config.deploy)

    def run(
        self,
        rounds: int | None = None,
        until: str | None = None,
        urgent: bool = False,
        partial: bool = False,
        watched: bool = False,
        may_start: Callable[[int], bool] = lambda number: True,
    ) -> str | None:
        """Runs the loop until ``rounds`` rounds are done; resumes where it stopped.

        Args:
            rounds: Number of the last round; the config's by default.
            until: Name of the step of the round in progress to stop after.
            urgent: True to set the metric ``urgent`` of the triggers to 1, for one round.
            partial: True to continue with the labels given so far, for this round only.
            watched: True if the caller runs the loop again when something changes: where the champion is good enough,
                the loop then waits for a trigger instead of ending, if there is one.
            may_start: Called with the number of each round from 1 on before it starts; False ends the loop.

        Returns:
            The labels, records or trigger that the loop waits for, or None when it is done.

        Raises:
            UserError: another process runs this loop, or the config or the data are wrong.
        """
        with config_lines(self.workspace.root):
            names = [step.name for step in round_steps(self.config) if step.can_stop(1)]
        if until is not None and until not in names:
            raise UserError(f"no stage `{until}`", where="--until", fix=f"one of {', '.join(names)}")
        runner = RoundRunner(self.workspace, self.config, until)
        last = rounds if rounds is not None else self.config.rounds or sys.maxsize
        check_suite_files(self.config, self.workspace.root)
        self._check_shapes()
        loop = self.workspace.hold(self.workspace.loop_lock, "another process runs this loop")
        with loop, self.workspace.work():
            # Before any round: a run killed between the registry's row and its link or hook must not leave them behind.
            self._mend_base()
            self.registry.sync()
            judge_canary(self.workspace, self.config)
            try:
                if not finished_rounds(self.workspace):
                    runner.run_round_zero()
                number = len(finished_rounds(self.workspace))
                if rounds is None and self.workspace.metadata.round(number):
                    # An earlier `--rounds` began it, and its batch may be answered by now.
                    last = max(last, number)
                if number > last:
                    log.info("%d of %d rounds are done; raise `rounds` for more", last, last, extra=EVENT)
                while (number := len(finished_rounds(self.workspace))) <= last:
                    if (reason := self._enough(number)) and not (watched and self.config.triggers.is_set):
                        log.info(reason, extra=EVENT)
                        break
                    if not may_start(number):
                        break
                    if waiting := self._untriggered(number, urgent):
                        return f"{waiting}; {reason}" if reason else waiting
                    runner.run_round(number, partial=partial)
                    log.info("round %d: %s", number, self._outcome(), extra=EVENT)
                    urgent = partial = False  # one round is requested, not all that follow
                self._final()
            except NothingToLabel as waiting:
                # No further round may come, so that this champion may be the last.
                self._final()
                return str(waiting)
            except Waiting as waiting:
                return str(waiting)
            except Stopped:
                log.info("stopped after %s; the next run resumes from here", until)
        return None

    def _check_shapes(self) -> None:
        """Raises a UserError for a shape that the base model cannot be trained in."""
        tune, train = self.config.tune, self.config.train
        searched = tune is not None and any(key.startswith(SHAPE_KEYS) for key in tune.space)
        if searched and train.start == "champion":
            what = "the champion may be smaller than a size that is searched"
            raise UserError(what, where="tune.space", fix="set train.start: base, or search no sizes")
        if (searched or train.changes_shape) and self.config.merge.models:
            what = "a candidate of another size has no weights that an earlier model's could be merged with"
            raise UserError(what, where="merge.models", fix="leave it empty, or train the base model's size")
        has_ranks = bool(train.lora.ranks) or train.lora.gates is not None
        if not (searched or train.changes_shape or has_ranks):
            return
        # Here, as it loads torch.
        from posttrain.train.lora import check_ranks
        from posttrain.train.shape import check_trained_shape
        from posttrain.tune.trainings.model_checks import check_shapes

        source = locate(self.config.model, self.workspace.root)
        check_ranks(source, train)
        if tune is not None and searched:
            space = Space(tune.space, tune.constraints, "tune.space")
            check_shapes(space, {"train": train.model_dump(mode="json")}, source)
        else:
            check_trained_shape(source, train)

    def _mend_base(self) -> None:
        """Fetches the base model again if it is the champion and damaged: a rollback would have no earlier one."""
        champion = self.registry.champion
        if champion is None or not self.registry.is_base(champion.model_id):
            return
        try:
            self.workspace.artifacts.path(champion.model_id)
        except DamagedArtifactError as error:
            log.warning("%s; fetching it again", error)
            RoundContext(self.workspace, self.config, 0, in_round=False).run(Fetch(self.config.model))

    def _enough(self, number: int) -> str | None:
        """Returns the reason why no further round is needed, or None."""
        # Round 0 decides nothing, and a round in progress is finished whatever the rules say.
        if number < 2 or self.workspace.metadata.round(number):
            return None
        last = finished_states(self.workspace)[-1].decision
        last_rules = [rule["rule"] for rule in last["rules"] if rule["section"] == "collect_more"] if last else []
        # A decision by other rules than the config has now says nothing: the new ones may request another round.
        if last and not last["collect_more"] and last_rules == self.config.gate.collect_more:
            return "the champion is good enough: no rule of gate.collect_more holds"
        return None

    def _untriggered(self, number: int, urgent: bool) -> str | None:
        """Returns the trigger that a new round waits for, or None if it may start."""
        triggers = self.config.triggers
        # A round in progress always continues.
        if self.workspace.metadata.round(number) or not triggers.is_set:
            return None
        context = RoundContext(self.workspace, self.config, number, in_round=False)
        rounds = finished_rounds(self.workspace)
        values = trigger_values(context, self.registry.champion_id, urgent)
        result = evaluate_triggers(triggers, values, since=rounds[-1].finished_at, now=utc_now())
        waits = None if result.starts else f"a trigger for round {number}: {result.reason}"
        # In the row of the last round: the next one has none until it starts.
        state = replace(RoundState.from_row(rounds[-1]), waits_for=waits)
        save_state(self.workspace.metadata, number - 1, state)
        if result.starts:
            log.info("round %d starts: %s", number, result.reason, extra=EVENT)
        return waits

    def _outcome(self) -> str:
        """Says in a few words what the last round decided, such as ``deploy, accuracy 0.861, before 0.842``."""
        state = finished_states(self.workspace)[-1]
        decision = state.decision or {}
        champion = decision.get("metrics", {}).get("champion", {})
        name, value = next(iter((state.metrics or {}).items()), ("", None))
        if value is None:
            return str(state.action)
        before = f", the champion's was {champion[name]:.3f}" if name in champion else ""
        return f"{state.action}, {name} {value:.3f}{before}"

    def _final(self) -> None:
        """Scores the champion on all test records, once the rounds are done."""
        sampled = any(suite.sample for suite in self.config.evaluate.suites.values())
        if not (self.config.evaluate.final and sampled):
            return
        rounds = finished_rounds(self.workspace)
        champion = self.registry.champion_id
        state = RoundState.from_row(rounds[-1])
        if state.final_of(champion):
            return
        context = RoundContext(self.workspace, self.config, rounds[-1].number, in_round=False)
        test = context.artifact(state.id("test"))
        start = time.monotonic()
        evaluation = context.run(Evaluate(champion, test.id, full=True))
        log.info(
            "champion on all %d test records: %s",
            test.meta["counts"]["records"],
            format_metrics(evaluation.meta["metrics"]),
        )
        final = {
            "model": champion,
            "evaluation": evaluation.id,
            "metrics": evaluation.meta["metrics"],
            "seconds": time.monotonic() - start,
        }
        save_state(self.workspace.metadata, rounds[-1].number, replace(state, final=final))


def trigger_values(context: RoundContext, champion: str, urgent: bool) -> dict[str, float]:
    """Computes the values of the triggers' metrics.

    Args:
        context: The round that may start.
        champion: Id of the model in service.
        urgent: True if the user requested a round.

    Returns:
        ``new_records``: pool records that the last round's pool does not hold; ``new_labels``: labelled records that
        the training set does not hold; ``days_since_training``; ``degradation``: the fall of the champion's main metric
        since its round, on the present test set; ``urgent``: 1 or 0; the quality of labels and drift, if a rule needs
        them.
    """
    workspace = context.workspace
    collected = collect(context)
    states = finished_states(workspace)
    now = context.run(Evaluate(champion, collected.test.id)).meta["metrics"]
    # A model that was promoted by hand out of an unfinished round has no metrics of then: it has not degraded.
    then = next((state.metrics for state in states if state.candidate == champion and state.metrics), now)
    main = next(iter(states[0].metrics or now))
    return {
        "new_records": float(len(input_ids(context, collected.pool.id) - input_ids(context, states[-1].id("pool")))),
        "new_labels": float(
            len(input_ids(context, collected.labelled.id) - input_ids(context, states[-1].id("next_parent")))
        ),
        "days_since_training": days_since_training(workspace),
        "degradation": then.get(main, math.nan) - now.get(main, math.nan),
        "urgent": float(urgent),
        **label_values(workspace, context.config, context.config.triggers.names),
        **_drift_values(context, collected, champion),
    }


def _drift_values(context: RoundContext, collected: RoundData, champion: str) -> dict[str, float]:
    if context.config.triggers.names.isdisjoint(DRIFT_VALUES):
        return {}
    return measure_drift(context, collected.pool.id, collected.labelled.id, champion)[0].values
