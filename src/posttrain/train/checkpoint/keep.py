"""Which checkpoints are kept, and which is the best."""

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.train.checkpoint.config import CheckpointConfig


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there; metric: what it was saved with, finite, or None."""

    step: int
    metric: float | None


def kept(saved: Iterable[Saved], config: CheckpointConfig) -> set[int]:
    """The steps that are kept: the newest, the best and every K-th, as the config asks."""
    saved = list(saved)
    steps = sorted(one.step for one in saved)
    keep = set(steps[-config.keep_last :])
    if config.keep_best:
        keep |= set(best_first(saved, config)[:1])
    if config.keep_every:
        keep |= {step for step in steps if step % config.keep_every == 0}
    return keep


def best_first(saved: Iterable[Saved], config: CheckpointConfig) -> list[int]:
    """The steps of those that have a metric, the best first; of equals the earlier first."""
    sign = 1 if config.mode == "min" else -1
    return [step for _, step in sorted((sign * one.metric, one.step) for one in saved if one.metric is not None)]
