"""One round: its stages in order, from what is collected to what is deployed."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import carried_dataset, finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.scoring import check_costs
from posttrain.loop.stages.collect import RoundData, collect
from posttrain.loop.stages.dataset import build_training_set
from posttrain.loop.stages.decide import decision
from posttrain.loop.stages.evaluate import evaluate, measure, metrics_of
from posttrain.loop.stages.fetch import fetch_base
from posttrain.loop.stages.label import check_answers, label, pool_agreement
from posttrain.loop.stages.score import score
from posttrain.loop.stages.select import batch_size, estimate_batch_gain, gain_detail, select
from posttrain.loop.stages.train import check_columns, goes_by_scores, train_candidate
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError, Waiting
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

STAGES = ("collect", "score", "select", "label", "dataset", "train", "evaluate", "decide", "deploy")

_ASKED = ("asked", "scores", "selection")

_HEADLINES = ("accuracy", "macro_f1", "token_f1", "score", "perplexity", "invalid_rate", "latency_p99")


class Stopped(Exception):
    """The stage after which the user wants to stop is done."""


class NothingToAsk(Waiting):
    """There is nothing to label, and nothing new to train on."""


@dataclass
class RoundRunner:
    """The rounds of one workspace, one at a time.

    Args:
        workspace: where everything is kept.
        config: what the user decided.
        registry: of the models.
        until: the stage after which `Stopped` is raised.
    """

    workspace: Workspace
    config: Config
    registry: Registry
    until: str | None = None

    def baseline(self) -> None:
        """Round 0: the base model is measured and becomes the first champion."""
        turn = RoundContext(self.workspace, self.config, 0)
        with self._kept(turn, None):
            collected = self._collect(turn)
            base = fetch_base(turn)
            start = build_training_set(turn, None, collected, None)
            evaluation = evaluate(turn, base.id, collected.test)
            latency = measure(turn, base.id, base.id, collected.test)
            metrics = metrics_of(turn, evaluation.id, latency, "candidate")
            self._after("evaluate")
            self.registry.promote(base.id, round=0, action="baseline", reason="the base model")
            log.info("  %s", format_metrics(metrics))
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

    def turn(self, number: int) -> None:
        """A round after the baseline, from where it stands.

        Raises:
            Waiting: for labels, or as there is nothing to ask.
        """
        turn = RoundContext(self.workspace, self.config, number)
        opened = self.workspace.metadata.round(number)
        champion = opened.champion_before if opened else self.registry.in_service
        assert champion is not None
        with self._kept(turn, champion):
            detail = self._stages(turn, champion)
            self.workspace.metadata.update_round(number, status="done", detail=detail)
            self._after("deploy")

    def _stages(self, turn: RoundContext, champion: str) -> dict[str, Any]:
        collected = self._collect(turn)
        base = fetch_base(turn)
        parent = carried_dataset(self.workspace)
        asked = self._asked(turn, champion, parent, collected)
        labels = self._label(turn, asked) if isinstance(asked, dict) else None
        dataset = build_training_set(turn, parent, collected, labels)
        if labels is None:
            if self._trained_on(turn, dataset):
                raise NothingToAsk(str(asked))
            self.workspace.metadata.update_round(turn.number, status="open")
        log.info("  training set: %d records", dataset.meta["counts"]["records"])
        self._after("dataset")
        # Who labels may take days, and the user may promote or roll back by hand at any time.
        champion = self._opponent(turn)
        candidate = train_candidate(turn, base.id, champion, dataset.id, collected.test)
        self._after("train")
        found, judged = self._judge(turn, base.id, candidate.id, champion, collected.test)
        while champion != self._opponent(turn):
            log.info("  another champion is in service now: judging again")
            champion = self._opponent(turn)
            found, judged = self._judge(turn, base.id, candidate.id, champion, collected.test)
        self._after("decide")
        found["action"] = self._deploy(turn, candidate.id, found)
        set_aside = found["action"] != "deploy" and self._sets_aside(found)
        outlook = self.workspace.metadata.update_round(turn.number).detail.get("outlook")
        detail = {
            **(asked if isinstance(asked, dict) else {}),
            **({"outlook": outlook} if outlook else {}),
            **_ids(pool=collected.pool, test=collected.test, base=base),
            **(_ids(labelled=labels) if labels else {}),
            **_ids(dataset=dataset),
            **judged,
            "labels": dataset.meta["counts"]["records"],
            "labels_new": labels.meta["labels"] if labels else 0,
            "set_aside": set_aside,
            "carry": parent if set_aside else dataset.id,
        }
        self.workspace.metadata.update_round(turn.number, candidate=candidate.id, decision=found)
        return detail

    def _judge(
        self, turn: RoundContext, base: str, candidate: str, champion: str, test: Artifact
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the gate says of a candidate against a champion, and what it is to be remembered by."""
        theirs = evaluate(turn, champion, test)
        ours = evaluate(turn, candidate, test)
        zero = evaluate(turn, base, test)
        latency = measure(turn, candidate, champion, test)
        self._after("evaluate")
        metrics = metrics_of(turn, ours.id, latency, "candidate")
        log.info("  candidate %s", format_metrics(metrics))
        first = finished_rounds(self.workspace)[0].detail["metrics"]
        found = decision(
            turn,
            {"evaluation": ours.id, "metrics": metrics},
            {"evaluation": theirs.id, "metrics": metrics_of(turn, theirs.id, latency, "champion")},
            {"evaluation": zero.id, "metrics": {**first, **metrics_of(turn, zero.id, None, "")}},
            latency,
        )
        return found, {**_ids(evaluation=ours, champion_evaluation=theirs), "metrics": metrics}

    def _asked(self, turn: RoundContext, champion: str, parent: str, collected: RoundData) -> dict[str, str] | str:
        """The batch of this round; one that went out to people stays, whatever happens to pool and config meanwhile.

        Returns:
            Ids by role: ``asked`` (the pool that the batch is from), ``scores``, ``selection``; or what is waited for
            where nothing is to be asked.
        """
        detail = self.workspace.metadata.update_round(turn.number).detail
        chosen = {role: id for role, id in detail.items() if role in _ASKED}
        if chosen and "waits" in detail and self._are_whole(*chosen.values()):
            return chosen
        evaluation = evaluate(turn, champion, collected.test)
        # A loop that draws at random asks nothing of its champion either, unless training goes by it.
        asks = not self.workspace.metadata.arm or goes_by_scores(self.config)
        cold = champion == finished_rounds(self.workspace)[0].candidate or not asks
        scores = score(turn, champion, collected.pool, parent, collected.test, evaluation.id, cold)
        beside = f", embedded {scores.meta['unasked']} more" if scores.meta["unasked"] else ""
        done = "embedded" if cold else "scored"
        log.info("  %s %d of %d pool records%s", done, scores.meta["sampled"], scores.meta["pool"], beside)
        self._after("score")
        n = batch_size(turn)
        if not n:
            return f"a larger label.budget: all {turn.config.label.budget} labels have been given"
        selection = select(turn, champion, collected.pool, scores, evaluation.id, n, cold)
        if not selection.meta["records"]:
            return "new inputs: every record of the pool is labelled (posttrain data add FILE)"
        chosen = _ids(asked=collected.pool, scores=scores, selection=selection)
        expected = estimate_batch_gain(turn, champion, scores, selection.meta["records"])
        if expected is not None:
            log.info("  %s", expected.sentence)
            if expected.why:
                log.info("  labelling more has stopped to pay: %s", expected.why)
            if expected.why and turn.config.select.stop.action == "stop":
                self.workspace.metadata.update_round(turn.number, detail={"outlook": gain_detail(expected)})
                return f"a reason to label more: {expected.why} (select.stop)"
        said = {"outlook": gain_detail(expected)} if expected else {}
        self.workspace.metadata.update_round(turn.number, detail={**chosen, **said})
        self._after("select")
        return chosen

    def _label(self, turn: RoundContext, asked: dict[str, str]) -> Artifact:
        get = self.workspace.artifacts.get
        labels = label(turn, get(asked["selection"]), get(asked["asked"]))
        self.workspace.metadata.update_round(turn.number, status="open")
        log.info("  labelled %d records, %d classes", labels.meta["labels"], len(labels.meta["classes"]))
        if agreed := pool_agreement(self.workspace, asked["selection"], labels.id):
            log.info(
                "  of %d drawn at random, the champion had %.0f%% right (of the pool: %.0f%% to %.0f%%)",
                *(agreed.drawn, 100 * agreed.value, 100 * agreed.low, 100 * agreed.high),
            )
        self._after("label")
        return labels

    def _are_whole(self, *ids: str) -> bool:
        try:
            for id in ids:
                self.workspace.artifacts.path(id)
        except DamagedArtifactError as error:
            log.warning("%s; choosing the batch again", error)
            return False
        return True

    def _trained_on(self, turn: RoundContext, dataset: Artifact) -> bool:
        """Whether an earlier round trained on the same records, or there are none to train on."""
        records = set(turn.dataset(dataset.id).records["id"].to_pylist())
        earlier = [entry.detail["dataset"] for entry in finished_rounds(self.workspace) if "dataset" in entry.detail]
        return not records or any(set(turn.dataset(id).records["id"].to_pylist()) == records for id in earlier)

    def _collect(self, turn: RoundContext) -> RoundData:
        check_answers(self.config, self.workspace.root)
        collected = collect(turn)
        check_columns(turn, collected)
        check_costs(turn, collected.pool.id)
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

    def _deploy(self, turn: RoundContext, candidate: str, found: dict[str, Any]) -> str:
        """Do what the gate decided, unless it is done already; returns the action that was taken."""
        action, reason = str(found["action"]), decision_reason(found)
        done = self.workspace.metadata.deployments()
        if action == "deploy":
            # Once: who rolled it back since means it.
            if not any((entry.round, entry.model_id) == (turn.number, candidate) for entry in done):
                self.registry.promote(candidate, round=turn.number, reason=reason)
        elif action == "rollback" and all(entry.round != turn.number for entry in done):
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

    def _opponent(self, turn: RoundContext) -> str:
        """The model that the candidate has to beat: the champion, but for what this round deployed."""
        others = [entry for entry in self.workspace.metadata.deployments() if entry.round != turn.number]
        return others[-1].model_id

    def _after(self, stage: str) -> None:
        self._note_time()
        if stage == self.until:
            raise Stopped

    @contextmanager
    def _kept(self, turn: RoundContext, champion: str | None) -> Iterator[None]:
        """Keep the round's row: open, waiting or done, and the time that it was worked on."""
        before = self.workspace.metadata.open_round(turn.number, champion)
        start = time.monotonic()

        def note_time() -> None:
            worked = (before.seconds or 0.0) + time.monotonic() - start
            self.workspace.metadata.update_round(turn.number, seconds=worked)

        self._note_time = note_time
        try:
            yield
        except Waiting as waiting:
            detail = self.workspace.metadata.update_round(turn.number).detail
            self.workspace.metadata.update_round(
                turn.number, status="waiting", detail={**detail, "waits": str(waiting)}
            )
            raise
        finally:
            note_time()


def _ids(**artifacts: Artifact) -> dict[str, str]:
    return {name: artifact.id for name, artifact in artifacts.items()}


def decision_reason(found: dict[str, Any]) -> str:
    """The rules that decided, in one line."""
    wanted = found["action"] == "deploy"
    sections = {"deploy": ("deploy",), "refuse": ("deploy", "rollback"), "rollback": ("rollback",)}[found["action"]]
    rules = [rule for rule in found["rules"] if rule["section"] in sections]
    decisive = [rule for rule in rules if rule["holds"] == (wanted or rule["section"] == "rollback")]
    return "; ".join(f"{rule['rule']} ({rule['values']})" for rule in decisive)


def format_metrics(metrics: dict[str, float]) -> str:
    """The headline metrics."""
    named = [name for name in _HEADLINES if name in metrics] or list(metrics)[:3]
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in named)
