"""Measures false alarms and delay of the test that ends a canary, against a peeked z-test and savvi.

    python benchmarks/canary.py --peer-python OTHER/bin/python [--runs 1000] [--outcomes 20000]

The peer has a virtual environment of its own (``pip install savvi==0.3.1 matplotlib pandas``).
Each run draws outcomes one after another: each is the canary's with the probability of its share, and good with the
probability of its arm. All methods see the same outcomes and may stop after each of them, at 5%:

- *posttrain*: `posttrain.evaluate.sequential`, which rolls back, promotes, or continues.
- *z-test, peeked*: the one-sided pooled z-test of two proportions, after each outcome, from 30 of each arm on.
- *savvi*: ``Multinomial`` (M. Lindon and A. Malek, Anytime-valid inference for multinomial count data, 2022) on the
  arms of the bad outcomes, two-sided, looked at after every tenth of them. It takes the shares of the outcomes as
  known, so that an arm whose users report less often would be a false alarm.

A false alarm rolls back a canary that is as good as the champion, or promotes one that is worse by the margin.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from scipy.stats import norm

from posttrain.evaluate.sequential import run_test

CHAMPION = 0.8
LOSS = 0.05
ALPHA = 0.05
SHARES = (0.1, 0.5)
Z_MINIMUM = 30

PEER = Path(__file__).parent / "peers" / "savvi_canary.py"


def draw(runs: int, outcomes: int, share: float, canary: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws runs: which outcomes are the canary's and which are good, both bool [runs, outcomes]."""
    generator = np.random.default_rng([seed, int(100 * share), int(1000 * canary)])
    treatment = generator.random((runs, outcomes), np.float32) < share
    return treatment, generator.random((runs, outcomes), np.float32) < np.where(treatment, canary, CHAMPION)


def z_test_stop(treatment: np.ndarray, good: np.ndarray) -> int | None:
    """Returns the number of outcomes after which a z-test at each of them first calls the canary worse."""
    n_t, n_c = np.cumsum(treatment), np.cumsum(~treatment)
    good_t, good_c = np.cumsum(treatment & good), np.cumsum(~treatment & good)
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = (good_t + good_c) / (n_t + n_c)
        z = (good_t / n_t - good_c / n_c) / np.sqrt(pooled * (1 - pooled) * (1 / n_t + 1 / n_c))
    hits = np.flatnonzero((np.minimum(n_t, n_c) >= Z_MINIMUM) & (z <= norm.ppf(ALPHA)))
    return int(hits[0]) + 1 if len(hits) else None


def fixed_horizon(share: float) -> int:
    """Returns the outcomes of a z-test with one look that finds the loss with a probability of 80%."""
    loser = CHAMPION - LOSS
    variance = CHAMPION * (1 - CHAMPION) / (1 - share) + loser * (1 - loser) / share
    return int(np.ceil((norm.ppf(1 - ALPHA) + norm.ppf(0.8)) ** 2 * variance / LOSS**2))


def savvi_stops(python: Path, treatment: np.ndarray, good: np.ndarray, share: float) -> list[int | None]:
    """Runs the peer on the bad outcomes; returns where it stops."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.npz"
        np.savez(path, treatment=treatment, good=good)
        command = [str(python), str(PEER), str(path), str(share), str(ALPHA)]
        stops: list[int | None] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return stops


def delay(stops: list[int | None], treatment: np.ndarray) -> str:
    """Describes stops: the share of runs, and the median and mean outcomes of the canary and in all."""
    found = [(int(treatment[run, :stop].sum()), stop) for run, stop in enumerate(stops) if stop is not None]
    if not found:
        return "0.0% | – | – |"
    canary, total = np.array(found).T
    return (
        f"{len(found) / len(stops):.1%} | {np.median(canary):,.0f} ({canary.mean():,.0f}) | "
        f"{np.median(total):,.0f} ({total.mean():,.0f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--outcomes", type=int, default=20_000, help="Outcomes of both arms in each run.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| share | canary | method | decides | runs | canary's outcomes, median (mean) | all, median (mean) |")
    print("| ---: | --- | --- | --- | ---: | ---: | ---: |")
    for share in SHARES:
        for name, canary in (("as good", CHAMPION), ("5 points worse", CHAMPION - LOSS)):
            treatment, good = draw(arguments.runs, arguments.outcomes, share, canary, arguments.seed)
            results = [
                run_test(one, two, share=share, alpha=ALPHA, margin=LOSS, interval=False)
                for one, two in zip(treatment, good, strict=True)
            ]
            rows: dict[tuple[str, str], list[int | None]] = {
                ("posttrain", "roll back"): [row.outcomes if row.decision == "worse" else None for row in results],
                ("posttrain", "promote"): [row.outcomes if row.decision == "not_worse" else None for row in results],
                ("z-test, peeked", "worse"): [z_test_stop(*run) for run in zip(treatment, good, strict=True)],
            }
            if arguments.peer_python:
                rows["savvi", "different"] = savvi_stops(arguments.peer_python, treatment, good, share)
            for (method, decides), stops in rows.items():
                print(f"| {share:.0%} | {name} | {method} | {decides} | {delay(stops, treatment)}", flush=True)
        total = fixed_horizon(share)
        print(f"| {share:.0%} | 5 points worse | z-test, one look | worse | 80.0% | {share * total:,.0f} | {total:,} |")


if __name__ == "__main__":
    main()
