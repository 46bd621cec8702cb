"""The baseline: the same loop with records drawn at random, run beside it, and what choosing was worth."""

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
from posttrain.loop.registry import Registry
from posttrain.loop.triggers import TriggerConfig
from posttrain.select.stopping import StopConfig
from posttrain.select.strategy_comparison import labels_to_target
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

RANDOM = "random"

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Comparison:
    """The loop against the one that draws records at random.

    Attributes:
        metric: the main suite's, as the mean of the records' scores.
        ours: after each round, as long as both loops have it.
        random: likewise.
        gain: of ours over random at the end, paired over the test records: all of them where both were measured so.
        level: coverage of the gain's interval.
        reached: what ours and random came to on those records.
    """

    metric: str
    ours: tuple[CandidateResult, ...]
    random: tuple[CandidateResult, ...]
    gain: Interval
    level: float
    reached: tuple[float, float]

    @property
    def conclusion(self) -> str:
        """What choosing was worth, in one or two sentences."""
        given = self.ours[0].labels  # of files, which both loops begin with
        chosen, drawn = (side[-1].labels - given for side in (self.ours, self.random))
        result = (
            "is better" if self.gain.low > 0 else "is worse" if self.gain.high < 0 else "cannot be told from random"
        )
        first = (
            f"Choosing {result}: {self.metric} {self.reached[0]:.3f} with {chosen} labels chosen, "
            f"{self.reached[1]:.3f} with {drawn} drawn at random; gain {self.gain.difference:+.3f} "
            f"({self.level:.0%} interval {self.gain.low:+.3f} to {self.gain.high:+.3f}, {self.gain.n} test records)."
        )
        values, target = np.array([one.value for one in self.ours]), self.random[-1].value
        needed = labels_to_target([one.labels - given for one in self.ours], values, target)
        if needed is None or target <= self.random[0].value or not drawn:
            return first
        return f"{first} What random reached took {needed:.0f} chosen labels, {needed / drawn:.0%} of random's."


def check_baseline(config: Config, name: str) -> None:
    """Raise a UserError unless a loop of this name can be run beside."""
    if name != RANDOM:
        raise UserError(f"no baseline `{name}`", where="--baseline", fix=f"use {RANDOM}")
    if config.label.annotator != "oracle":
        raise UserError(
            "records drawn at random need labels too, and people would give them",
            where="--baseline",
            fix="label.annotator: oracle, with a file of known answers",
        )


def run_baseline(workspace: Workspace, config: Config) -> Comparison | None:
    """Turn the random loop as far as the workspace's own has come.

    It has the same data, seeds, training and gate; finished work that both need is shared. Nothing of it is deployed.

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
    """The loop against the random one, or None where that has no round after the first."""
    beside = workspace.for_arm(RANDOM)
    rounds = min(len(finished_rounds(workspace)), len(finished_rounds(beside)))
    if rounds < 2:
        return None
    ours, drawn = (champion_results(one)[:rounds] for one in (workspace, beside))
    left, right = (_final(one, rounds) for one in (workspace, beside))
    if left is None or right is None:  # what both have is the sample that rounds are measured on
        left, right = ours[-1].evaluation, drawn[-1].evaluation
    read = [read_evaluation(workspace.artifacts.path(id)) for id in (left, right)]
    bootstrap = config.evaluate.bootstrap
    metric, gain = next(iter(paired_gains(read[0], read[1], bootstrap, config.seed).items()))
    mains = [next(iter(one.values())).predictions["score"].to_numpy() for one in read]
    reached = float(np.mean(mains[0])), float(np.mean(mains[1]))
    return Comparison(metric, ours, drawn, gain, bootstrap.level, reached)


def _final(workspace: Workspace, rounds: int) -> str | None:
    """The evaluation on all test records of the model that is in service after so many rounds, if there is one."""
    finished = finished_states(workspace)
    # A loop that has run further has its final evaluation in a later round, and of the model of then.
    if len(finished) != rounds:
        return None
    final = finished[-1].final_of(Registry(workspace).in_service)
    return final["evaluation"] if final else None


def _drawing_at_random(config: Config) -> Config:
    select = {"strategy": RANDOM, "cold_start": RANDOM, "options": {}, "explore": 0.0, "focus": 0.0}
    select |= {"near_duplicate": None, "stop": StopConfig()}
    select["scores"] = config.select.wanted_scores() if follows_scores(config) else []
    return config.model_copy(
        update={
            "select": config.select.model_copy(update=select),
            "gate": config.gate.model_copy(update={"collect_more": []}),
            "triggers": TriggerConfig(),
            "deploy": DeployConfig(),
        }
    )
