"""Accepts a model's labels without people on Banking77: how many, how wrong, and how many labels of people that saves.

    python benchmarks/auto_accept.py --data DIR [--seeds 3] [--batches 10] [--bounds 0.02 0.05]

``DIR`` holds ``banking77_train.csv``. Batches of 500 messages, drawn at random, are labelled one after the other. From
the second on, a linear head on MiniLM's embeddings answers what is sure enough by ``label.accept_error``, as the loop
does it: the threshold is chosen on the answers of people so far, out of fold; a tenth of what is accepted is checked by
people; what they find counts in the batches after. ``clean`` people are always right. Of ``noisy`` people's answers,
20% are another label, in what the head learns from, in what the threshold is chosen on, and in the checks. ``reviewed``
is the same with the threshold chosen on a quarter of the answers, which were reviewed and are right.

``true error`` is that of the accepted answers that nobody checked, against the labels of the data; ``over`` counts the
seeds in which it exceeds the bound over all batches. ``saved`` is the share of all messages that no person read.
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.label.acceptance import choose_threshold, draw_checks
from posttrain.models.binomial import clopper_pearson
from posttrain.models.embedder import Embedder
from posttrain.models.linear_head import fit_linear_head

BATCH, CHECK, NOISE, REVIEWED = 500, 0.1, 0.2, 0.25


@dataclass
class Outcome:
    """The answers that one seed accepted.

    Attributes:
        accepted: answers that stood without people.
        wrong: of these.
        checked: accepted answers that people checked; ``refuted``: those that they call wrong.
        messages: all that were labelled.
    """

    accepted: int = 0
    wrong: int = 0
    checked: int = 0
    refuted: int = 0
    messages: int = 0
    last_share: float = 0.0
    why: str = ""


def simulate(x: np.ndarray, truth: np.ndarray, people: str, bound: float, batches: int, seed: int) -> Outcome:
    """Labels some batches, and returns what was accepted."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    labels = sorted(set(truth.tolist()))
    given = truth.copy()
    if people != "clean":
        wrong = rng.random(len(x)) < NOISE
        given[wrong] = [rng.choice([label for label in labels if label != truth[row]]) for row in np.flatnonzero(wrong)]
    reviewed = rng.random(len(x)) < REVIEWED
    rows: list[int] = []  # answered by people
    checks: list[tuple[float, bool]] = []
    outcome = Outcome()
    for batch in range(batches):
        own = order[batch * BATCH : (batch + 1) * BATCH]
        accepted = checked = np.zeros(len(own), bool)
        if rows:
            known = np.array(rows)
            fitted = fit_linear_head(x[known], given[known].tolist(), labels, [str(row) for row in rows])
            assert fitted is not None
            held_out = fitted.out_of_fold
            predicted = np.array(fitted.head.labels)[held_out.argmax(1)]
            expected = truth[known] if people == "reviewed" else given[known]
            used = reviewed[known] if people == "reviewed" else np.ones(len(known), bool)
            pooled = (np.array([c for c, _ in checks]), np.array([r for _, r in checks], bool)) if checks else None
            acceptance = choose_threshold(held_out.max(1)[used], (predicted == expected)[used], bound, checked=pooled)
            probabilities = fitted.head.probabilities(x[own])
            answers, confidence = np.array(fitted.head.labels)[probabilities.argmax(1)], probabilities.max(1)
            accepted = acceptance.accepts(confidence)
            checked = draw_checks(accepted, CHECK, seed * 1000 + batch)
            alone = accepted & ~checked
            opinion = truth[own] if people == "reviewed" else given[own]
            checks += list(zip(confidence[checked].tolist(), (answers == opinion)[checked].tolist(), strict=True))
            outcome.accepted += int(alone.sum())
            outcome.wrong += int((answers != truth[own])[alone].sum())
            outcome.checked += int(checked.sum())
            outcome.refuted += int((answers != opinion)[checked].sum())
            outcome.last_share, outcome.why = float(accepted.mean()), acceptance.why
        outcome.messages += len(own)
        rows += own[~accepted | checked].tolist()
    return outcome


def main() -> None:
    """Simulate all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.02, 0.05])
    options = parser.parse_args()
    with (options.data / "banking77_train.csv").open(encoding="utf-8", newline="") as file:
        messages = list(csv.DictReader(file))
    x = Embedder.load("minilm").embed([row["text"] for row in messages])
    truth = np.array([row["category"] for row in messages])
    print("| people | bound | accepted | of the last batch | true error | by checks | over | saved |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for people in ("clean", "noisy", "reviewed"):
        for bound in options.bounds:
            runs = [simulate(x, truth, people, bound, options.batches, seed) for seed in range(options.seeds)]
            print(row_of(people, bound, runs), flush=True)
            print(f"  {runs[-1].why}", flush=True)


def row_of(people: str, bound: float, runs: list[Outcome]) -> str:
    """Returns a row of the table, with the sums over all seeds."""
    accepted, wrong = sum(run.accepted for run in runs), sum(run.wrong for run in runs)
    checked, refuted = sum(run.checked for run in runs), sum(run.refuted for run in runs)
    messages = sum(run.messages for run in runs)
    over = sum(run.accepted > 0 and run.wrong / run.accepted > bound for run in runs)
    error, by_checks = interval(wrong, accepted), interval(refuted, checked)
    last = np.mean([run.last_share for run in runs])
    return (
        f"| {people} | {bound:.0%} | {accepted / len(runs):.0f} | {last:.0%} | {error} | {by_checks} |"
        f" {over} of {len(runs)} | {accepted / messages:.0%} |"
    )


def interval(errors: int, count: int) -> str:
    """Formats a share with its exact interval."""
    if not count:
        return ""
    low, high = clopper_pearson(errors, count)
    return f"{errors / count:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
