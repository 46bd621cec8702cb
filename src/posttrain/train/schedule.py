"""Learning-rate schedules."""

import math

from posttrain.train.config import TrainConfig


def rate(config: TrainConfig, step: int, steps: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of ``steps``.

    Linear warm-up from zero, then cosine (Loshchilov & Hutter 2016, arXiv:1608.03983, without restarts), linear or
    constant down to ``final_rate`` of the peak.
    """
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max(1, steps - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * left)
