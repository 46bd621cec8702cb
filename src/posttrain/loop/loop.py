"""The loop: runs rounds of stages in order. Resume and caching are the same: a finished stage is not run again."""

import logging
import math
import time
from dataclasses import dataclass, field, replace

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, known_inputs
from posttrain.loop.history import days_since_training, finished_rounds, finished_states
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.round import RoundRunner, Stopped, stages_of
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.dataset import NothingToLabel
from posttrain.loop.stages.evaluate import Evaluate, format_metrics
from posttrain.loop.state import RoundState
from posttrain.loop.suites import check_suites
from posttrain.loop.triggers import evaluate_triggers
from posttrain.store.errors import UserError, Waiting
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


@dataclass
class Loop:
    """The loop of one workspace.

    Args:
        workspace: where everything is stored.
        config: its config, checked.
    """

    workspace: Workspace
    config: Config
    registry: ModelRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = ModelRegistry(self.workspace, self.config.deploy)

    def run(self, rounds: int | None = None, until: str | None = None, urgent: bool = False) -> str | None:
        """Run the loop until ``rounds`` rounds are done; resume where it stopped.

        Args:
            rounds: number of the last round; the config's by default.
            until: stop after this stage of the round in progress.
            urgent: set the metric ``urgent`` of the triggers to 1, for one round.

        Returns:
            What the loop waits for, or None when it is done.

        Raises:
            UserError: another process runs this loop, or the config or the data are wrong.
        """
        # Nobody stops after fetching: it is quick and leaves nothing that a user would look at.
        names = [stage.name for stage in stages_of(self.config) if stage.name != "fetch"]
        if until is not None and until not in names:
            raise UserError(f"no stage `{until}`", where="--until", fix=f"one of {', '.join(names)}")
        runner = RoundRunner(self.workspace, self.config, until)
        last = rounds if rounds is not None else self.config.rounds
        check_suites(self.config, self.workspace.root)
        with self.workspace.lock():
            # Before any round: a run killed between the registry's row and its link or hook must not leave them behind.
            self.registry.settle()
            try:
                if not finished_rounds(self.workspace):
                    runner.run_baseline()
                if len(finished_rounds(self.workspace)) > last:
                    log.info("%d of %d rounds are done; raise `rounds` for more", last, last)
                while (number := len(finished_rounds(self.workspace))) <= last:
                    if reason := self._enough(number):
                        log.info(reason)
                        break
                    if waiting := self._untriggered(number, urgent):
                        return waiting
                    runner.run_round(number)
                    urgent = False  # one round is requested, not all that follow
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

    def _enough(self, number: int) -> str | None:
        """The reason why no further round is needed, or None."""
        # The baseline decides nothing, and a round in progress is finished whatever the rules say.
        if number < 2 or self.workspace.metadata.round(number):
            return None
        last = finished_states(self.workspace)[-1].decision
        evaluated = [rule["rule"] for rule in last["rules"] if rule["section"] == "collect_more"] if last else []
        # A decision by other rules than the config has now says nothing: another round may be wanted by the new ones.
        if last and not last["collect_more"] and evaluated == self.config.gate.collect_more:
            return "the champion is good enough: no rule of gate.collect_more holds"
        return None

    def _untriggered(self, number: int, urgent: bool) -> str | None:
        """Return what a new round waits for, or None if it may start."""
        triggers = self.config.triggers
        # A round in progress always continues.
        if self.workspace.metadata.round(number) or not (triggers.any or triggers.all):
            return None
        context = RoundContext(self.workspace, self.config, number, in_round=False)
        rounds = finished_rounds(self.workspace)
        values = trigger_values(context, self.registry.in_service, urgent)
        result = evaluate_triggers(triggers, values)
        waits = None if result.starts else f"a trigger for round {number}: {result.why}"
        # In the row of the last round: the next one has none until it starts.
        state = replace(RoundState.of(rounds[-1]), waits=waits)
        self.workspace.metadata.update_round(number - 1, detail=state.detail())
        if result.starts:
            log.info("round %d starts: %s", number, result.why)
        return waits

    def _final(self) -> None:
        """Score the champion on all test records, once the rounds are done."""
        sampled = any(suite.sample for suite in self.config.evaluate.suites.values())
        if not (self.config.evaluate.final and sampled):
            return
        rounds = finished_rounds(self.workspace)
        champion = self.registry.in_service
        state = RoundState.of(rounds[-1])
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
        self.workspace.metadata.update_round(rounds[-1].number, detail=replace(state, final=final).detail())


def trigger_values(context: RoundContext, champion: str, urgent: bool) -> dict[str, float]:
    """Compute the values of the triggers' metrics.

    Args:
        context: the round that may start.
        champion: id of the model in service.
        urgent: True if the user requested a round.

    Returns:
        ``new_records``: pool records that the last round did not know; ``new_labels``: labelled records that the
        training set does not hold; ``days_since_training``; ``degradation``: the fall of the champion's main metric
        since its round, on the present test set; ``urgent``: 1 or 0.
    """
    workspace = context.workspace
    collected = collect(context)
    states = finished_states(workspace)
    now = context.run(Evaluate(champion, collected.test.id)).meta["metrics"]
    # A model that was promoted by hand out of an unfinished round has no metrics of then: it has not degraded.
    then = next((state.metrics for state in states if state.candidate == champion and state.metrics), now)
    main = next(iter(states[0].metrics or now))
    return {
        "new_records": float(
            len(known_inputs(context, collected.pool.id) - known_inputs(context, states[-1].id("pool")))
        ),
        "new_labels": float(
            len(known_inputs(context, collected.labelled.id) - known_inputs(context, states[-1].id("carry")))
        ),
        "days_since_training": days_since_training(workspace),
        "degradation": then.get(main, math.nan) - now.get(main, math.nan),
        "urgent": float(urgent),
    }
