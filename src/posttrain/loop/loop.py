"""The loop: rounds of stages in order. Resume and caching are one: finished stages are found, not redone."""

import logging
import math
import time
from dataclasses import dataclass, field, replace

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, known_inputs
from posttrain.loop.history import days_since_training, finished_rounds, finished_states
from posttrain.loop.registry import Registry
from posttrain.loop.round import RoundRunner, Stopped, stages_of
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.dataset import NothingToLabel
from posttrain.loop.stages.evaluate import Evaluate, format_metrics
from posttrain.loop.state import RoundState
from posttrain.loop.suites import check_suites
from posttrain.loop.triggers import judge
from posttrain.store.errors import UserError, Waiting
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


@dataclass
class Loop:
    """The loop of one workspace.

    Args:
        workspace: where everything is kept.
        config: what the user decided.
    """

    workspace: Workspace
    config: Config
    registry: Registry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = Registry(self.workspace, self.config.deploy)

    def run(self, rounds: int | None = None, until: str | None = None, urgent: bool = False) -> str | None:
        """Turn the loop until ``rounds`` rounds are done, going on where it stopped.

        Args:
            rounds: number of the last round; the config's by default.
            until: stop after this stage of the round in progress.
            urgent: start one round whatever the triggers say, if their rules allow for ``urgent``.

        Returns:
            What the loop waits for, or None when it is done.

        Raises:
            UserError: another process turns this loop, or the config or the data are wrong.
        """
        # Fetching is quick and changes nothing that a user would look at.
        names = [stage.name for stage in stages_of(self.config, self.workspace.root) if stage.name != "fetch"]
        if until is not None and until not in names:
            raise UserError(f"no stage `{until}`", where="--until", fix=f"one of {', '.join(names)}")
        runner = RoundRunner(self.workspace, self.config, until)
        last = rounds if rounds is not None else self.config.rounds
        check_suites(self.config, self.workspace.root)
        with self.workspace.lock():
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
                    urgent = False  # one round is asked for
                self._final()
            except NothingToLabel as waiting:
                self._final()
                return str(waiting)
            except Waiting as waiting:
                return str(waiting)
            except Stopped:
                log.info("stopped after %s; the next run goes on from here", until)
        return None

    def _enough(self, number: int) -> str | None:
        """Why no further round is needed, or None."""
        if number < 2 or self.workspace.metadata.round(number):
            return None
        last = finished_rounds(self.workspace)[-1].decision
        judged = [rule["rule"] for rule in last["rules"] if rule["section"] == "collect_more"] if last else []
        if last and not last["collect_more"] and judged == self.config.gate.collect_more:
            return "the champion is good enough: no rule of gate.collect_more holds"
        return None

    def _untriggered(self, number: int, urgent: bool) -> str | None:
        """What a new round waits for, or None if it may start; a round in progress always goes on."""
        triggers = self.config.triggers
        if self.workspace.metadata.round(number) or not (triggers.any or triggers.all):
            return None
        context = RoundContext(self.workspace, self.config, number, in_round=False)
        rounds = finished_rounds(self.workspace)
        values = trigger_values(context, self.registry.in_service, urgent)
        verdict = judge(triggers, values)
        waits = None if verdict.starts else f"a trigger for round {number}: {verdict.why}"
        state = replace(RoundState.of(rounds[-1]), waits=waits)
        self.workspace.metadata.update_round(number - 1, detail=state.detail())
        if verdict.starts:
            log.info("round %d starts: %s", number, verdict.why)
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
    """The values of the triggers' metrics.

    Args:
        context: the round that may start.
        champion: id of the model in service.
        urgent: whether the user asked for a round.

    Returns:
        ``new_records``: pool records that the last round did not know; ``new_labels``: labelled records that the
        training set does not hold; ``days_since_training``; ``degradation``: how much the champion's main metric has
        fallen since its round, on the test set of today; ``urgent``: 1 or 0.
    """
    workspace = context.workspace
    collected = collect(context)
    states = finished_states(workspace)
    now = context.run(Evaluate(champion, collected.test.id)).meta["metrics"]
    # A model that was promoted by hand out of an unfinished round has no figures of that time.
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
