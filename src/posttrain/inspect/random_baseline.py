"""The baseline: runs the same loop with records drawn at random, and compares the two."""

import logging
from dataclasses import dataclass

import numpy as np

from posttrain.evaluate.bootstrap import Interval
from posttrain.evaluate.metric_names import paired_gains
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import Config
from posttrain.loop.difficulty import follows_scores
from posttrain.loop.history import CandidateResult, champion_results, finished_rounds, finished_states
from posttrain.loop.hooks import DeployConfig
from posttrain.loop.loop import Loop
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.triggers import TriggerConfig
from posttrain.select.stopping import StopConfig
from posttrain.select.strategy_comparison import labels_to_target
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

RANDOM = "random"

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Comparison:
    """Compares the loop with the one that draws records at random.

    Attributes:
        metric: name of the main suite's metric, the mean of the records' scores.
        ours: results of the loop's champion after each round that both loops have; ``random`` likewise.
        gain: gain of ours over random at the end, paired over the test records (all, if both were measured on all).
        level: coverage of the gain's interval.
        reached: final values of ours and of random on those records.
    """

    metric: str
    ours: tuple[CandidateResult, ...]
    random: tuple[CandidateResult, ...]
    gain: Interval
    level: float
    reached: tuple[float, float]

    @property
    def conclusion(self) -> str:
        """Summarises the comparison in one or two sentences."""
        # Labels of files, which both loops begin with, are no result of choosing.
        given = self.ours[0].labels
        chosen, drawn = (side[-1].labels - given for side in (self.ours, self.random))
        result = (
            "is better" if self.gain.low > 0 else "is worse" if self.gain.high < 0 else "cannot be told from random"
        )
        first = (
            f"Choosing {result}: {self.metric} {self.reached[0]:.3f} with {chosen} labels chosen, "
            f"{self.reached[1]:.3f} with {drawn} drawn at random; gain {self.gain.difference:+.3f} "
            f"({self.level:.0%} interval {self.gain.low:+.3f} to {self.gain.high:+.3f}, {self.gain.n} test records)."
        )
        values, target = np.array([result.value for result in self.ours]), self.random[-1].value
        needed = labels_to_target([result.labels - given for result in self.ours], values, target)
        # A random loop that learned nothing sets no target: the baseline reaches it with no label.
        if needed is None or target <= self.random[0].value or not drawn:
            return first
        return f"{first} What random reached took {needed:.0f} chosen labels, {needed / drawn:.0%} of random's."


def check_baseline(config: Config, name: str) -> None:
    """Raise a UserError unless a baseline of this name exists and an oracle can label its records."""
    if name != RANDOM:
        raise UserError(f"no baseline `{name}`", where="--baseline", fix=f"use {RANDOM}")
    if config.label.annotator != "oracle":
        raise UserError(
            "records drawn at random need labels too, and people would give them",
            where="--baseline",
            fix="label.annotator: oracle, with a file of known answers",
        )


def run_baseline(workspace: Workspace, config: Config) -> Comparison | None:
    """Run the random loop for as many rounds as the workspace's own has done.

    It has the same data, seeds, training and gate; finished work that both need is shared. It deploys nothing outside.

    Returns:
        The comparison, or None while the loop has no round after the baseline's.
    """
    last = len(finished_rounds(workspace)) - 1
    if last < 1:
        return None
    log.info("beside it, with records drawn at random:")
    Loop(workspace.for_arm(RANDOM), _drawing_at_random(config)).run(last)
    return comparison(workspace, config)


def comparison(workspace: Workspace, config: Config) -> Comparison | None:
    """Compare the loop with the random one; None while that has no round after the baseline's."""
    beside = workspace.for_arm(RANDOM)
    rounds = min(len(finished_rounds(workspace)), len(finished_rounds(beside)))
    if rounds < 2:
        return None
    ours, drawn = (champion_results(arm)[:rounds] for arm in (workspace, beside))
    left, right = (_final(arm, rounds) for arm in (workspace, beside))
    # Records are paired: without both final evaluations, both are read on the sample that rounds are measured on.
    if left is None or right is None:
        left, right = ours[-1].evaluation, drawn[-1].evaluation
    own, other = (read_evaluation(workspace.artifacts.path(id)) for id in (left, right))
    bootstrap = config.evaluate.bootstrap
    metric, gain = next(iter(paired_gains(own, other, bootstrap, config.seed).items()))
    mains = [next(iter(suites.values())).predictions["score"].to_numpy() for suites in (own, other)]
    reached = float(np.mean(mains[0])), float(np.mean(mains[1]))
    return Comparison(metric, ours, drawn, gain, bootstrap.level, reached)


def _final(workspace: Workspace, rounds: int) -> str | None:
    """The evaluation on all test records of the model in service after so many rounds; None if there is none."""
    finished = finished_states(workspace)
    # A loop that has run further has its final evaluation in a later round, and of the model of then.
    if len(finished) != rounds or finished[-1].final is None:
        return None
    final = finished[-1].final_of(ModelRegistry(workspace).in_service)
    return final["evaluation"] if final else None


def _drawing_at_random(config: Config) -> Config:
    # Everything that chooses is off, near duplicates too: a record that is left out is a choice as well.
    select = {"strategy": RANDOM, "cold_start": RANDOM, "options": {}, "explore": 0.0, "focus": 0.0}
    select |= {"near_duplicate": None, "stop": StopConfig()}
    select["scores"] = config.select.wanted_scores() if follows_scores(config) else []
    return config.model_copy(
        update={
            "select": config.select.model_copy(update=select),
            # It runs as many rounds as the loop did: neither its gate nor its triggers end or delay it.
            "gate": config.gate.model_copy(update={"collect_more": []}),
            "triggers": TriggerConfig(),
            # No hook: its champion is in service nowhere.
            "deploy": DeployConfig(),
        }
    )
