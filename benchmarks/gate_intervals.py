"""Measures the interval by which a gate decides: its exact coverage, and how often it deploys a worse candidate.

    python benchmarks/gate_intervals.py

For n records of which the champion has a share right and the candidate another, an outcome is the number of records
that only the candidate has right and the number that only the champion has. All outcomes have a probability, so that
coverage is a sum and not a simulation. Pairs differ as independent models would, half as often beyond the least, or
as little as the shares allow. *Bootstrap* is the percentile bootstrap of 10,000 resamples, of pairs as well.
"""

import numpy as np
from scipy.stats import multinomial

from posttrain.evaluate.bootstrap import resampled_means
from posttrain.evaluate.paired_interval import score_interval

SIZES = (20, 50, 100, 200, 500)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
CHANGES = (-0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05)
OVERLAPS = (0.0, 0.5, 1.0)
MOST = 70  # differing records in one direction: outcomes with more have next to no probability here
LEVEL = 0.95


def bootstrap_interval(better: int, worse: int, n: int) -> tuple[float, float]:
    """Computes the percentile bootstrap interval of one outcome."""
    counts = np.array([better, worse, n - better - worse], np.float64)
    means = resampled_means(np.array([1.0, -1.0, 0.0]), counts, n, seed=0)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def cases(n: int) -> list[tuple[float, float]]:
    """Returns the probabilities that only the candidate and only the champion has a record right."""
    pairs = []
    for champion in SHARES:
        for change in CHANGES:
            candidate = champion + change
            if candidate > 1:
                continue
            for overlap in OVERLAPS:
                least = max(change, 0.0)
                better = least + overlap * (candidate * (1 - champion) - least)
                if n * (2 * better - change) < MOST:
                    pairs.append((better, better - change))
    return pairs


def measure(n: int) -> list[str]:
    """Returns the table's rows for n records."""
    outcomes = [(b, w) for b in range(min(n, MOST) + 1) for w in range(min(n - b, MOST) + 1)]
    counts = np.array([(b, w, n - b - w) for b, w in outcomes])
    rows = []
    for name, method in (("bootstrap", bootstrap_interval), ("score", lambda b, w, n: score_interval(b, w, n, LEVEL))):
        ends = np.array([method(b, w, n) for b, w in outcomes])
        covered, above, deployed = [], [], []
        for better, worse in cases(n):
            probability = multinomial.pmf(counts, n, [better, worse, 1 - better - worse])
            true = better - worse
            low, high = ends[:, 0] > true + 1e-9, ends[:, 1] < true - 1e-9
            covered.append(probability[~low & ~high].sum())
            above.append(probability[low].sum())
            if true <= 0:
                deployed.append(probability[ends[:, 0] > 0].sum())
        margin = multinomial.pmf(counts, n, [0, 0.02, 0.98])[ends[:, 0] > -0.01].sum()
        width = ends[[outcome == (0, 0) for outcome in outcomes]][0]
        rows.append(
            f"| {n} | {name} | {min(covered):.1%} | {np.mean(covered):.1%} | {max(above):.1%} | {max(deployed):.1%} | "
            f"{margin:.1%} | ±{100 * width[1]:.1f} |"
        )
    return rows


def main() -> None:
    """Prints the table."""
    print(
        "| records | interval | least coverage | mean | wholly above the truth, at most | deployed though not better |"
    )
    for n in SIZES:
        print("\n".join(measure(n)), flush=True)


if __name__ == "__main__":
    main()
