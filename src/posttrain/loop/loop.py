"""The loop: rounds of stages in order. Resume and caching are one: finished stages are found, not redone."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.loop.config import Config
from posttrain.loop.history import carried_dataset, days_since_training, finished_rounds, known_inputs
from posttrain.loop.registry import Registry
from posttrain.loop.stages.choose import score, select
from posttrain.loop.stages.collect import Collected, collect
from posttrain.loop.stages.decision import decision
from posttrain.loop.stages.evaluation import evaluate, measure, metrics_of
from posttrain.loop.stages.fetch import fetch_base
from posttrain.loop.stages.labelling import check_answers, extend, label
from posttrain.loop.stages.training import train_candidate
from posttrain.loop.triggers import judge
from posttrain.loop.turn import Turn
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError, Waiting
from posttrain.store.records import Deployment
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

STAGES = ("collect", "score", "select", "label", "dataset", "train", "evaluate", "decide", "deploy")


class _Stopped(Exception):
    """The stage after which the user wants to stop is done."""


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
    _until: str | None = None
    _note_time: Callable[[], None] = field(init=False, repr=False)

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
        if until is not None and until not in STAGES:
            raise UserError(f"no stage `{until}`", where="--until", fix=f"one of {', '.join(STAGES)}")
        self._until = until
        last = rounds if rounds is not None else self.config.rounds
        with self.workspace.lock():
            self.registry.settle()
            try:
                if not finished_rounds(self.workspace):
                    self._baseline()
                if len(finished_rounds(self.workspace)) > last:
                    log.info("%d of %d rounds are done; raise `rounds` for more", last, last)
                while (number := len(finished_rounds(self.workspace))) <= last:
                    if reason := self._enough(number):
                        log.info(reason)
                        break
                    if waiting := self._untriggered(number, urgent):
                        return waiting
                    self._turn(number)
                    urgent = False  # one round is asked for
                self._final()
            except Waiting as waiting:
                return str(waiting)
            except _Stopped:
                log.info("stopped after %s; the next run goes on from here", until)
        return None

    def _baseline(self) -> None:
        """Round 0: the base model is measured and becomes the first champion."""
        turn = Turn(self.workspace, self.config, 0)
        with self._round(turn, None):
            collected = self._collect(turn)
            base = fetch_base(turn)
            start = extend(turn, None, collected.labelled, None)
            evaluation = evaluate(turn, base.id, collected.test)
            latency = measure(turn, base.id, base.id, collected.test)
            metrics = metrics_of(turn, evaluation.id, latency, "candidate")
            self._after("evaluate")
            self.registry.promote(base.id, round=0, action="baseline", reason="the base model")
            log.info("  %s", _shown(metrics))
            detail = {
                **_ids(pool=collected.pool, test=collected.test, evaluation=evaluation, base=base),
                "metrics": metrics,
                "labels": start.meta["counts"]["records"],
                "carry": start.id,
            }
            self.workspace.metadata.update_round(
                0, status="done", candidate=base.id, decision={"action": "baseline"}, detail=detail
            )
            self._after("deploy")

    def _turn(self, number: int) -> None:
        turn = Turn(self.workspace, self.config, number)
        opened = self.workspace.metadata.round(number)
        champion = opened.champion_before if opened else self._champion().model_id
        assert champion is not None
        with self._round(turn, champion):
            detail = self._stages(turn, champion)
            self.workspace.metadata.update_round(number, status="done", detail=detail)
            self._after("deploy")

    def _stages(self, turn: Turn, champion: str) -> dict[str, Any]:
        collected = self._collect(turn)
        base = fetch_base(turn)
        parent = carried_dataset(self.workspace)
        scores, selection, labels = self._label(turn, champion, parent, collected)
        dataset = extend(turn, parent, collected.labelled, labels)
        log.info("  training set: %d records", dataset.meta["counts"]["records"])
        self._after("dataset")
        # Who labels may take days, and the user may have promoted or rolled back by hand meanwhile.
        champion = self._opponent(turn)
        candidate = train_candidate(turn, base.id, champion, dataset.id)
        self._after("train")
        theirs = evaluate(turn, champion, collected.test)
        ours = evaluate(turn, candidate.id, collected.test)
        zero = evaluate(turn, base.id, collected.test)
        latency = measure(turn, candidate.id, champion, collected.test)
        self._after("evaluate")
        metrics = metrics_of(turn, ours.id, latency, "candidate")
        log.info("  candidate %s", _shown(metrics))
        found = decision(
            turn,
            {"evaluation": ours.id, "metrics": metrics},
            {"evaluation": theirs.id, "metrics": metrics_of(turn, theirs.id, latency, "champion")},
            {
                "evaluation": zero.id,
                "metrics": {
                    **finished_rounds(self.workspace)[0].detail["metrics"],
                    **metrics_of(turn, zero.id, None, ""),
                },
            },
            latency,
        )
        self._after("decide")
        found["action"] = self._deploy(turn, candidate.id, found)
        set_aside = found["action"] != "deploy" and self._sets_aside(found)
        detail = {
            **_ids(pool=collected.pool, test=collected.test, base=base, scores=scores, selection=selection),
            **_ids(labelled=labels, dataset=dataset, evaluation=ours, champion_evaluation=theirs),
            "metrics": metrics,
            "labels": dataset.meta["counts"]["records"],
            "labels_new": labels.meta["labels"],
            "set_aside": set_aside,
            "carry": parent if set_aside else dataset.id,
        }
        self.workspace.metadata.update_round(turn.number, candidate=candidate.id, decision=found)
        return detail

    def _label(
        self, turn: Turn, champion: str, parent: str, collected: Collected
    ) -> tuple[Artifact, Artifact, Artifact]:
        evaluation = evaluate(turn, champion, collected.test)
        cold = champion == finished_rounds(self.workspace)[0].candidate
        scores = score(turn, champion, collected.pool, parent, collected.test, evaluation.id, cold)
        log.info("  scored %d of %d pool records", scores.meta["sampled"], scores.meta["pool"])
        self._after("score")
        selection = select(turn, scores, evaluation.id, cold)
        if not selection.meta["records"]:
            raise Waiting("new inputs: every record of the pool is labelled (posttrain data add FILE)")
        self._after("select")
        labels = label(turn, selection, collected.pool)
        log.info("  labelled %d records, %d classes", labels.meta["labels"], len(labels.meta["classes"]))
        self._after("label")
        return scores, selection, labels

    def _collect(self, turn: Turn) -> Collected:
        check_answers(self.config, self.workspace.root)
        collected = collect(turn)
        log.info("round %d%s", turn.number, "" if turn.number else ": baseline")
        if turn.number == 0:
            for artifact in (collected.pool, collected.test):
                counts = artifact.meta["counts"]
                log.info(
                    "  %s: %d records, %d rejected",
                    artifact.meta["name"],
                    counts["records"],
                    counts["rejected"],
                )
        self._after("collect")
        return collected

    def _deploy(self, turn: Turn, candidate: str, found: dict[str, Any]) -> str:
        """Do what the gate decided, unless it is done already; returns the action that was taken."""
        action, reason = str(found["action"]), _because(found)
        if action == "deploy":
            self.registry.promote(candidate, round=turn.number, reason=reason)
        elif action == "rollback" and self._champion().round != turn.number:
            if self.registry.previous() is None:
                log.warning("the gate asks for a roll-back, and there is no earlier champion")
                action = "refuse"
            else:
                self.registry.rollback(reason=reason, round=turn.number)
        log.info("  %s: %s", action, reason)
        return action

    def _sets_aside(self, found: dict[str, Any]) -> bool:
        """Whether a refused round's labels stay out of later training sets: its model is surely worse."""
        policy = self.config.label.when_refused
        worse = any(interval["high"] < 0 for interval in found["intervals"].values())
        return policy == "set_aside" or (policy == "auto" and worse)

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
        turn = Turn(self.workspace, self.config, number, in_round=False)
        collected = collect(turn)
        champion = self._champion()
        evaluation = evaluate(turn, champion.model_id, collected.test)
        rounds = finished_rounds(self.workspace)
        now = evaluation.meta["metrics"]
        # A model that was promoted by hand out of an unfinished round has no figures of that time.
        then = next((entry.detail["metrics"] for entry in rounds if entry.candidate == champion.model_id), now)
        main = next(iter(rounds[0].detail["metrics"]))
        values = {
            "new_records": float(
                len(known_inputs(turn, collected.pool.id) - known_inputs(turn, rounds[-1].detail["pool"]))
            ),
            "new_labels": float(
                len(known_inputs(turn, collected.labelled.id) - known_inputs(turn, rounds[-1].detail["carry"]))
            ),
            "days_since_training": days_since_training(self.workspace),
            "degradation": then.get(main, math.nan) - now.get(main, math.nan),
            "urgent": float(urgent),
        }
        verdict = judge(triggers, values)
        waits = None if verdict.starts else f"a trigger for round {number}: {verdict.why}"
        self.workspace.metadata.update_round(number - 1, detail={**rounds[-1].detail, "waits": waits})
        if verdict.starts:
            log.info("round %d starts: %s", number, verdict.why)
        return waits

    def _final(self) -> None:
        """Score the champion on all test records, once the rounds are done."""
        sampled = any(suite.sample for suite in self.config.evaluate.suites.values())
        if not (self.config.evaluate.final and sampled):
            return
        rounds = finished_rounds(self.workspace)
        champion = self._champion().model_id
        if rounds[-1].detail.get("final", {}).get("model") == champion:
            return
        turn = Turn(self.workspace, self.config, rounds[-1].number, in_round=False)
        test = self.workspace.artifacts.get(rounds[-1].detail["test"])
        start = time.monotonic()
        evaluation = evaluate(turn, champion, test, full=True)
        log.info(
            "champion on all %d test records: %s",
            test.meta["counts"]["records"],
            _shown(evaluation.meta["metrics"]),
        )
        final = {
            "model": champion,
            "evaluation": evaluation.id,
            "metrics": evaluation.meta["metrics"],
            "seconds": time.monotonic() - start,
        }
        self.workspace.metadata.update_round(rounds[-1].number, detail={**rounds[-1].detail, "final": final})

    def _champion(self) -> Deployment:
        champion = self.registry.champion
        assert champion is not None, "round 0 deploys the baseline"
        return champion

    def _opponent(self, turn: Turn) -> str:
        """The model that the candidate has to beat: the champion, but for what this round deployed."""
        others = [entry for entry in self.workspace.metadata.deployments() if entry.round != turn.number]
        return others[-1].model_id

    def _after(self, stage: str) -> None:
        self._note_time()
        if stage == self._until:
            raise _Stopped

    @contextmanager
    def _round(self, turn: Turn, champion: str | None) -> Iterator[None]:
        """Keep the round's row: open, waiting or done, and the time that it was worked on."""
        before = self.workspace.metadata.open_round(turn.number, champion)
        start = time.monotonic()

        def note_time() -> None:
            worked = (before.seconds or 0.0) + time.monotonic() - start
            self.workspace.metadata.update_round(turn.number, seconds=worked)

        self._note_time = note_time
        status = before.status
        if status == "waiting":
            self.workspace.metadata.update_round(turn.number, status="open")
        try:
            yield
        except Waiting:
            status = "waiting"
            raise
        finally:
            note_time()
            now = self.workspace.metadata.round(turn.number)
            if now is not None and now.status != "done":
                self.workspace.metadata.update_round(turn.number, status=status)


def _ids(**artifacts: Artifact) -> dict[str, str]:
    return {name: artifact.id for name, artifact in artifacts.items()}


def _because(found: dict[str, Any]) -> str:
    """The rules that decided, in one line."""
    wanted = found["action"] == "deploy"
    sections = {"deploy": ("deploy",), "refuse": ("deploy", "rollback"), "rollback": ("rollback",)}[found["action"]]
    rules = [rule for rule in found["rules"] if rule["section"] in sections]
    decisive = [rule for rule in rules if rule["holds"] == (wanted or rule["section"] == "rollback")]
    return "; ".join(f"{rule['rule']} ({rule['values']})" for rule in decisive)


def _shown(metrics: dict[str, float]) -> str:
    named = [name for name in _HEADLINES if name in metrics] or list(metrics)[:3]
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in named)


_HEADLINES = ("accuracy", "macro_f1", "token_f1", "exact_match", "score", "perplexity", "invalid_rate", "latency_p99")
