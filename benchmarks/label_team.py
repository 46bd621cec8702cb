"""Measures simulated teams of annotators: a day's labels, faults found, false alarms, and the speed of the measures.

    python benchmarks/label_team.py [--teams 1000] [--part plan|faults|honest|posterior|speed]

- *plan*: labels a day, cost and error of teams by overlap, with gold items and checks (`plan_labels`).
- *faults*: of teams with one planted fault, the share in which it is found by name, and in which anyone else is named.
- *honest*: of honest teams of several sizes, the share in which a report has any alarm.
- *posterior*: of items on which annotators differ, how sure Dawid and Skene's model is and how often it is right, as
  published (crowd-kit) and here.
- *speed*: Dawid and Skene on 100,000 labels beside crowd-kit, agreement with 1,000 bootstrap samples of 10,000 answers,
  and the whole report.

Simulated people are easier than real ones: their errors are independent of each other and of the item.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from crowdkit.aggregation import DawidSkene

from posttrain.label.answers import encode_votes
from posttrain.label.quality.agreement import measure_agreement
from posttrain.label.quality.annotators import measure_work
from posttrain.label.quality.consensus import dawid_skene, majority
from posttrain.label.quality.report import alarms, quality_report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "label"))
from simulated_team import SimulatedAnnotator, TeamSettings, simulate_answers

LABELS = [f"label {number:02}" for number in range(10)]
FAULTS: dict[str, tuple[str, Callable[[list[SimulatedAnnotator]], None]]] = {
    "accepts 60% of suggestions unread": ("suggestion_bias", lambda team: setattr(team[2], "suggestion_bias", 0.6)),
    "1.2 s an item": ("speed", lambda team: setattr(team[2], "seconds", 1.2)),
    "30% one label": (
        "one_answer",
        lambda team: (setattr(team[2], "constant", LABELS[3]), setattr(team[2], "constant_share", 0.3))[0],
    ),
    "95% at random": ("random_answers", lambda team: setattr(team[2], "guesses", 0.95)),
    "93%, and 50% after 180 items": (
        "new_errors",
        lambda team: (setattr(team[2], "accuracy", 0.93), setattr(team[2], "drift_after", 180))[0],
    ),
}
SHOWN = TeamSettings(overlap=3, suggestion_rate=0.5, planted_rate=0.15, misleading_rate=0.1)


def random_team(seed: int, size: int) -> list[SimulatedAnnotator]:
    """Draw a team whose accuracies are 75% to 97% and whose median times are 5 to 11 s."""
    rng = np.random.default_rng(seed)
    return [
        SimulatedAnnotator(f"p{at}", accuracy=float(rng.uniform(0.75, 0.97)), seconds=float(rng.uniform(5, 11)))
        for at in range(size)
    ]


def random_truth(seed: int, items: int) -> list[str]:
    """Draw right labels, some of which are four times as frequent as others."""
    shares = np.linspace(4, 1, len(LABELS))
    return [LABELS[at] for at in np.random.default_rng(seed).choice(len(LABELS), items, p=shares / shares.sum())]


@dataclass(frozen=True)
class Plan:
    """The work of a team in a day, by simulation.

    Attributes:
        labels: Resolved records a day, gold items not counted.
        answers: Answers a day.
        cost: Price of a day.
        cost_per_label: Price of one resolved record.
        reviews: Records a day without a majority, which a reviewer decides; their time is not in the hours.
        error: Share of wrong resolutions, if reviewers make none.
        error_interval: Standard error of ``error`` times 1.96, either way.
        hours: Hours of work of one annotator in a day.
    """

    labels: float
    answers: float
    cost: float
    cost_per_label: float
    reviews: float
    error: float
    error_interval: float
    hours: float


def plan_labels(
    team: Sequence[SimulatedAnnotator],
    settings: TeamSettings,
    labels: Sequence[str],
    *,
    hours: float = 6.0,
    price: float = 0.0,
    items: int = 2000,
    seed: int = 0,
) -> Plan:
    """Estimates labels, cost and error of a day's work from ``items`` simulated items.

    Args:
        team: The annotators; copies of them work.
        settings: How items are handed out.
        labels: The label set; all labels are equally frequent.
        hours: Hours that each annotator works in a day.
        price: Price of an hour of work.
        items: Items to simulate.
        seed: Seed.
    """
    rng = np.random.default_rng(seed)
    truth = [labels[at] for at in rng.integers(len(labels), size=items)]
    fresh = [replace(annotator, given=0) for annotator in team]
    answers = simulate_answers(fresh, truth, settings, seed=seed, labels=labels)
    resolved = {row["item"]: row for row in answers.to_pylist() if row["expected"] is None}
    right = np.array([row["resolution"] == truth[item] for item, row in resolved.items()], np.float64)
    reviews = sum(row["resolved_by"] == "review" for row in resolved.values())
    days = sum(part.seconds for part in measure_work(answers, {})) / 3600 / (hours * len(team))
    cost, error = price * hours * len(team), 1 - float(right.mean())
    half = 1.96 * float(np.sqrt(error * (1 - error) / len(right)))
    per_day = len(right) / days
    return Plan(per_day, answers.num_rows / days, cost, cost / per_day, reviews / days, error, half, hours)


def show_plans() -> None:
    """Print a day of six hours of teams of 85%, 90% and 95% at 8 s an answer and 20 an hour."""
    print("accuracy people overlap checks labels/day | of 1,000 labels: answers  hours reviews   cost  wrong")
    for accuracy in (0.85, 0.9, 0.95):
        for overlap, checks in ((1, 0.0), (1, 0.1), (2, 0.0), (3, 0.0)):
            team = [SimulatedAnnotator(f"p{at}", accuracy=accuracy, seconds=8.0) for at in range(3)]
            settings = TeamSettings(overlap=overlap, gold_rate=0.05, check_rate=checks, misleading_rate=0.1)
            plan = plan_labels(team, settings, LABELS, hours=6, price=20, items=4000)
            print(
                f"{accuracy:8.0%} {len(team):6} {overlap:7} {checks:6.0%} {plan.labels:10,.0f} | "
                f"{1000 * plan.answers / plan.labels:24,.0f} {1000 * len(team) * plan.hours / plan.labels:6.1f} "
                f"{1000 * plan.reviews / plan.labels:7.0f} {1000 * plan.cost_per_label:6.0f}  "
                f"{1000 * plan.error:.0f} ± {1000 * plan.error_interval:.0f}"
            )


def show_faults(teams: int) -> None:
    """Print by fault how often it is found by name, in teams of 6 with 600 items."""
    for name, (kind, plant) in FAULTS.items():
        hits, others = 0, Counter[str]()
        for seed in range(teams):
            team = random_team(seed, 6)
            plant(team)
            expected = ("p2",)
            findings = alarms(simulate_answers(team, random_truth(seed, 600), SHOWN, seed=seed, labels=LABELS))
            hits += any((finding.kind, finding.annotators) == (kind, expected) for finding in findings)
            others.update({finding.kind for finding in findings if not set(finding.annotators) <= set(expected)})
        print(f"{name:36} {kind:16} found in {hits} of {teams} teams; others named: {dict(others) or 'none'}")


def show_honest(teams: int) -> None:
    """Print how often honest teams raise an alarm, by size, overlap and number of items."""
    for size, overlap, items in ((3, 1, 400), (6, 3, 600), (12, 2, 1500)):
        settings = replace(SHOWN, overlap=overlap)
        alarmed, kinds = 0, Counter[str]()
        for seed in range(10_000, 10_000 + teams):
            truth = random_truth(seed, items)
            table = simulate_answers(random_team(seed, size), truth, settings, seed=seed, labels=LABELS)
            findings = alarms(table)
            alarmed += bool(findings)
            kinds.update(finding.kind for finding in findings)
        print(
            f"{size:2} people, overlap {overlap}, {items:5} items: {alarmed} of {teams} teams, {dict(kinds)}",
            flush=True,
        )


def show_posterior(teams: int) -> None:
    """Print how sure the posterior is, and how often right, where annotators differ and where no two agree."""
    for items, overlap, misleading in ((50, 2, 0.0), (300, 2, 0.0), (300, 2, 0.1), (1500, 3, 0.1)):
        settings = TeamSettings(overlap=overlap, gold_rate=0, check_rate=0, misleading_rate=misleading)
        sure: dict[tuple[str, str], list[np.ndarray]] = {}
        for seed in range(teams):
            truth = random_truth(seed, items)
            votes = encode_votes(simulate_answers(random_team(seed, 6), truth, settings, seed=seed, labels=LABELS))
            counted = majority(votes)
            subsets = {"differ": counted.share < 1, "all differ": (counted.share * counted.answers == 1)}
            frame = pd.DataFrame({"task": votes.item, "worker": votes.annotator, "label": votes.label})
            theirs = (
                DawidSkene(100).fit(frame).probas_.sort_index().reindex(columns=range(len(votes.labels)), fill_value=0)
            )
            for name, posterior in (("published", theirs.to_numpy()), ("here", dawid_skene(votes).posterior)):
                right = np.array(votes.labels)[posterior.argmax(axis=1)] == np.array(truth)
                for subset, rows in subsets.items():
                    sure.setdefault((subset, name), []).append(np.stack([posterior.max(axis=1), right], axis=1)[rows])
        print(f"{items} items, {overlap} annotators an item, {misleading:.0%} misleading")
        for (subset, name), values in sure.items():
            rows = np.concatenate(values)
            confidence, right = rows.mean(axis=0)
            print(f"  {subset:10} {name:9} {confidence:.0%} sure, {right:.0%} right, {len(rows)} items")


def show_speed() -> None:
    """Print seconds of the measures, the second of two runs."""
    for classes, people, overlap in ((10, 50, 5), (77, 50, 5), (77, 200, 2)):
        rng = np.random.default_rng(0)
        labels = [f"{at:02}" for at in range(classes)]
        team = [SimulatedAnnotator(f"p{at}", accuracy=float(rng.uniform(0.55, 0.97))) for at in range(people)]
        truth = [labels[at] for at in rng.integers(classes, size=100_000 // overlap)]
        settings = TeamSettings(overlap=overlap, gold_rate=0, check_rate=0)
        votes = encode_votes(simulate_answers(team, truth, settings, labels=labels))
        right = np.array([labels.index(label) for label in truth])
        start = time.perf_counter()
        ours = dawid_skene(votes)
        seconds = time.perf_counter() - start
        frame = pd.DataFrame({"task": votes.item, "worker": votes.annotator, "label": votes.label})
        start = time.perf_counter()
        theirs = DawidSkene(100).fit(frame)
        peer_seconds = time.perf_counter() - start
        print(
            f"Dawid and Skene, {len(votes.item):,} labels, {classes} classes, {people} people, overlap {overlap}: "
            f"{seconds:.1f} s, {(ours.label == right).mean():.2%} right; "
            f"crowd-kit {peer_seconds:.1f} s, {(theirs.labels_.sort_index().to_numpy() == right).mean():.2%}",
            flush=True,
        )
    table = simulate_answers(
        random_team(0, 10), random_truth(0, 5000), TeamSettings(overlap=2, gold_rate=0, check_rate=0), labels=LABELS
    )
    votes = encode_votes(table)
    start = time.perf_counter()
    measure_agreement(votes)
    print(f"agreement of {len(votes.item):,} answers, 1,000 bootstrap samples: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    quality_report(table)
    print(f"the whole report: {time.perf_counter() - start:.1f} s")


def main() -> None:
    """Print the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", type=int, default=1000)
    parser.add_argument("--part", choices=["plan", "faults", "honest", "posterior", "speed"])
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "plan": show_plans,
        "faults": lambda: show_faults(max(1, options.teams // 10)),
        "honest": lambda: show_honest(options.teams),
        "posterior": lambda: show_posterior(max(1, options.teams // 50)),
        "speed": show_speed,
    }
    for name, show in parts.items():
        if options.part in (None, name):
            print(f"\n{name}")
            show()


if __name__ == "__main__":
    main()
