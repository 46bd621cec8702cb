"""Measures the loss barrier along the line between models."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from posttrain.evaluate.bootstrap import paired_bootstrap
from posttrain.merge.recommendation import LossBarrier
from posttrain.merge.statistics import Example
from posttrain.models.likelihood import sequence_log_likelihoods
from posttrain.store.progress import progress_bar
from posttrain.tune.merges.points import MergePoints, encode_examples

POINTS = 5
"""Points of a line, with its ends."""


def measure_barriers(
    points: MergePoints, examples: Sequence[Example], count: int = POINTS, seed: int = 0
) -> list[LossBarrier]:
    """Measures the loss at points of the line between each two models.

    The barrier is max over a of L(a) - ((1 - a) L(0) + a L(1)), where L(a) is the loss of (1 - a) theta_0 + a theta_1:
    the supremum that Frankle et al. 2020 (arXiv:1912.05671) subtract the mean of the ends from, less the line between
    the ends as Entezari et al. 2022 (arXiv:2110.06296) have it. L is in nats a token of the records' answers. The
    interval is that of the highest point, which was chosen on the same records, so that its height is a little too
    large; the tokens of the records count as given.

    Args:
        points: of the models.
        examples: records of what the models are for.
        count: points of a line, with its ends; at least 3.
        seed: seed of the bootstrap.

    Raises:
        ValueError: there are fewer than 3 points.
    """
    if count < 3:
        raise ValueError(f"{count} points are no line with something between its ends")
    names = points.names
    pairs = list(combinations(range(len(names)), 2))
    shares = np.linspace(0, 1, count)
    losses: dict[tuple[tuple[int, float], ...], np.ndarray] = {}
    tokens = np.zeros(0)
    with progress_bar("loss between models", len(names) + len(pairs) * (count - 2), "points") as advance:
        for first, second in pairs:
            for share in shares:
                weights = {number: part for number, part in ((first, 1 - share), (second, share)) if part}
                key = tuple(weights.items())
                if key not in losses:
                    with points.model(weights) as lm:
                        sums, tokens = sequence_log_likelihoods(lm, encode_examples(lm, examples))
                    losses[key] = -sums
                    advance(1)
    barriers = []
    for first, second in pairs:
        keys = [tuple((n, p) for n, p in ((first, 1 - share), (second, share)) if p) for share in shares]
        # In nats a token, so that the mean over records is the sum of losses by the sum of tokens.
        by_record = np.stack([losses[key] for key in keys]) * len(tokens) / tokens.sum()
        means = by_record.mean(1)
        line = (1 - shares)[:, None] * by_record[0] + shares[:, None] * by_record[-1]
        peak = 1 + int((means - line.mean(1))[1:-1].argmax())
        interval = paired_bootstrap(by_record[peak], line[peak], seed=seed)
        barriers.append(
            LossBarrier(
                (names[first], names[second]),
                [float(share) for share in shares],
                [float(mean) for mean in means],
                max(0.0, interval.difference),
                interval.low,
                interval.high,
                len(tokens),
            )
        )
    return barriers
