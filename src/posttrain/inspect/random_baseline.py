"""The random baseline: runs the same loop with records drawn at random, and compares the two."""

import logging
from dataclasses import dataclass

import numpy as np

from posttrain.evaluate.metric_names import paired_gains
from posttrain.evaluate.paired_interval import Interval
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import Config
from posttrain.loop.difficulty import follows_scores
from posttrain.loop.history import CandidateResult, champion_results, finished_rounds, finished_states
from posttrain.loop.hooks import DeployConfig
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.triggers import TriggerConfig
from posttrain.select.stopping import StopConfig
from posttrain.select.strategy_comparison import labels_to_target
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.workspace import Workspace

RANDOM = "random"

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Comparison:
    """Compares the loop with the one that draws records at random.

    Attributes:
        metric: Name of the main suite's metric, the mean of the records' scores.
        ours: Results of the loop's champion after each round that both loops have; ``random`` likewise.
        gain: Gain of ours over random at the end, paired over the test records (all, if both were measured on all).
        level: Coverage of the gain's interval.
        final: Final values of ours and of random on those records.
    """

    metric: str
    ours: tuple[CandidateResult, ...]
    random: tuple[CandidateResult, ...]
    gain: Interval
    level: float
    final: tuple[float, float]

    @property
    def conclusion(self) -> str:
        """Summarises the comparison in one or two sentences."""
        # Labels of files, which both loops begin with, are not a result of choosing.
        initial = self.ours[0].labels
        chosen, random = (results[-1].labels - initial for results in (self.ours, self.random))
        result = "is better" if self.gain.low > 0 else "is worse" if self.gain.high < 0 else "makes no clear difference"
        first = (
            f"Choosing {result}: {self.metric} {self.final[0]:.3f} with {counted(chosen, 'label')} chosen, "
            f"{self.final[1]:.3f} with {random} drawn at random; gain {self.gain.difference:+.3f} "
            f"({self.level:.0%} interval {self.gain.low:+.3f} to {self.gain.high:+.3f}, {self.gain.n} test records)."
        )
        values, target = np.array([result.value for result in self.ours]), self.random[-1].value
        needed = labels_to_target([result.labels - initial for result in self.ours], values, target)
        # A random loop that learned nothing sets no target: the baseline reaches it with no label.
        if needed is None or target <= self.random[0].value or not random:
            return first
        return (
            f"{first} The random baseline's {self.metric} took {needed:.0f} chosen labels, "
            f"{needed / random:.0%} of its own."
        )


def check_random_loop(config: Config, name: str) -> None:
    """Raises a UserError unless a baseline of this name exists and an oracle can label its records."""
    if name != RANDOM:
        raise UserError(f"no baseline `{name}`", where="--baseline", fix=f"use {RANDOM}")
    if config.label.annotator != "oracle":
        raise UserError(
            "records drawn at random need labels too, and people would have to write them",
            where="--baseline",
            fix="label.annotator: oracle, with a file of answers",
        )


def run_random_loop(workspace: Workspace, config: Config) -> Comparison | None:
    """Runs the random loop for as many rounds as the workspace's own has done.

    It has the same data, seeds, training and gate; finished work that both need is shared. It deploys nothing outside.

    Returns:
        The comparison, or None while the loop has no round after round 0.
    """
    last = len(finished_rounds(workspace)) - 1
    if last < 1:
        return None
    # Here, as the report reads a comparison without running one, and the loop's stages import torch.
    from posttrain.loop.loop import Loop

    log.info("random baseline:")
    Loop(workspace.for_arm(RANDOM), _random_config(config)).run(last)
    return compare_with_random(workspace, config)


def compare_with_random(workspace: Workspace, config: Config) -> Comparison | None:
    """Compares the loop with the random one; returns None while that has no round after round 0."""
    random_arm = workspace.for_arm(RANDOM)
    rounds = min(len(finished_rounds(workspace)), len(finished_rounds(random_arm)))
    if rounds < 2:
        return None
    ours, random = (champion_results(arm)[:rounds] for arm in (workspace, random_arm))
    our_id, random_id = (_final_evaluation(arm, rounds) for arm in (workspace, random_arm))
    # Records are paired: without both final evaluations, both are read on the sample that rounds are measured on.
    if our_id is None or random_id is None:
        our_id, random_id = ours[-1].evaluation, random[-1].evaluation
    our_suites, random_suites = (read_evaluation(workspace.artifacts.path(id)) for id in (our_id, random_id))
    bootstrap = config.evaluate.bootstrap
    metric, gain = next(iter(paired_gains(our_suites, random_suites, bootstrap, config.seed).items()))
    scores = [next(iter(suites.values())).predictions["score"].to_numpy() for suites in (our_suites, random_suites)]
    final = float(np.mean(scores[0])), float(np.mean(scores[1]))
    return Comparison(metric, ours, random, gain, bootstrap.level, final)


def _final_evaluation(workspace: Workspace, rounds: int) -> str | None:
    """Returns the evaluation of the champion after so many rounds on all test records; None if there is none."""
    finished = finished_states(workspace)
    # A loop that has run further has its final evaluation in a later round, and of the model of then.
    if len(finished) != rounds or finished[-1].final is None:
        return None
    final = finished[-1].final_of(ModelRegistry(workspace).champion_id)
    return final["evaluation"] if final else None


def _random_config(config: Config) -> Config:
    # Everything that chooses is off, near duplicates too: a record that is left out is a choice as well.
    select = {"strategy": RANDOM, "options": {}, "explore": 0.0, "focus": 0.0}
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
