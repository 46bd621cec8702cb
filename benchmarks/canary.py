"""Measures false alarms and delay of the test that ends a canary, against a peeked z-test and savvi.

    python benchmarks/canary.py --peer-python OTHER/bin/python [--runs 1000] [--outcomes 20000]
    python benchmarks/canary.py --over-time [--runs 1000] [--outcomes 6000]

The peer has a virtual environment of its own (``pip install savvi==0.3.1 matplotlib pandas``).
Each run draws outcomes one after another: each is the canary's with the probability of its share, and good with the
probability of its arm. All methods see the same outcomes and may stop after each of them, at 5%:

- *posttrain*: `posttrain.evaluate.sequential`, which rolls back, promotes, or continues.
- *z-test, peeked*: the one-sided pooled z-test of two proportions, after each outcome, from 30 of each arm on.
- *savvi*: ``Multinomial`` (M. Lindon and A. Malek, Anytime-valid inference for multinomial count data, 2022) on the
  arms of the bad outcomes, two-sided, looked at after every tenth of them. It takes the shares of the outcomes as
  known, so that an arm whose users report less often would be a false alarm.

With ``--over-time`` the share of good outcomes changes, in both arms alike, and the canary reports half as often as its
share has it, or in waves.

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


def draw_over_time(
    outcomes: int, champion: np.ndarray, pace: np.ndarray, loss: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a run whose shares change; ``pace`` is the canary's outcomes for each of the champion."""
    generator = np.random.default_rng(seed)
    treatment = generator.random(outcomes) < pace / (1 + pace)
    return treatment, generator.random(outcomes) < np.where(treatment, champion - loss, champion)


def measure_over_time(runs: int, outcomes: int) -> None:
    """Prints the decisions where shares change over time, for an expected share of 50%."""
    time = np.linspace(0, 1, outcomes)
    wave = np.sin(20 * np.pi * time)
    champions = {
        "falls from 90% to 65%": 0.9 - 0.25 * time,
        "rises from 65% to 90%": 0.65 + 0.25 * time,
        "waves daily, 68% to 92%": 0.8 + 0.12 * wave,
        "stays at 80%": np.full(outcomes, 0.8),
    }
    paces = {"half as often": np.full(outcomes, 0.5), "in waves": 1 + 0.9 * np.sin(20 * np.pi * time + 1)}
    print("| the share of good outcomes | the canary reports | canary | rolled back | promoted |")
    print("| --- | --- | --- | ---: | ---: |")
    for name, champion in champions.items():
        for pace_name, pace in paces.items():
            for canary, loss in (("as good", 0.0), ("5 points worse", LOSS)):
                decisions = [
                    run_test(
                        *draw_over_time(outcomes, champion, pace, loss, seed),
                        share=0.5,
                        alpha=ALPHA,
                        margin=LOSS,
                        interval=False,
                    ).decision
                    for seed in range(runs)
                ]
                shares = " | ".join(f"{decisions.count(value) / runs:.1%}" for value in ("worse", "not_worse"))
                print(f"| {name} | {pace_name} | {canary} | {shares} |", flush=True)


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
    parser.add_argument("--over-time", action="store_true", help="Only shares that change over time.")
    arguments = parser.parse_args()
    if arguments.over_time:
        measure_over_time(arguments.runs, arguments.outcomes)
        return
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
