"""Each planted fault of a simulated annotator is reported by name, and honest teams raise hardly any alarm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from simulated_team import SimulatedAnnotator, TeamSettings, simulate_answers

from posttrain.label.quality.annotators import known_outcomes
from posttrain.label.quality.behaviour import suggestion_bias
from posttrain.label.quality.findings import Finding
from posttrain.label.quality.report import QualityInputs, alarms

LABELS = ("billing", "returns", "delivery", "login", "other")
SETTINGS = TeamSettings(overlap=3, gold_rate=0.1, check_rate=0.05, suggestion_rate=0.5, planted_rate=0.15)

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "suggestions accepted unread": ("suggestion_bias", {"suggestion_bias": 0.6}),
    "haste": ("speed", {"seconds": 1.2}),
    "one label": ("one_answer", {"constant": "login", "constant_share": 0.3}),
    "clicks at random": ("random_answers", {"guesses": 0.95}),
    "tired": ("new_errors", {"accuracy": 0.93, "drift_after": 180, "drift_accuracy": 0.5}),
}
"""The kind of finding of each fault of the annotator `p2`."""


def team_of(seed: int, size: int = 6) -> list[SimulatedAnnotator]:
    rng = np.random.default_rng(seed)
    return [
        SimulatedAnnotator(f"p{at}", accuracy=float(rng.uniform(0.75, 0.97)), seconds=float(rng.uniform(5, 11)))
        for at in range(size)
    ]


def truth_of(seed: int, items: int = 600) -> list[str]:
    rng = np.random.default_rng(seed + 999)
    return [LABELS[at] for at in rng.choice(5, items, p=[0.4, 0.25, 0.15, 0.1, 0.1])]


def answers_of(seed: int, change: Callable[[list[SimulatedAnnotator]], None] | None = None) -> pa.Table:
    team = team_of(seed)
    if change is not None:
        change(team)
    return simulate_answers(team, truth_of(seed), SETTINGS, seed=seed, labels=LABELS)


def kinds(findings: list[Finding]) -> set[tuple[str, tuple[str, ...]]]:
    return {(finding.kind, finding.annotators) for finding in findings}


@pytest.mark.parametrize(("seed", "fault"), list(enumerate(FAULTS)))
def test_a_planted_fault_is_found_by_name_and_nobody_else_is(seed: int, fault: str) -> None:
    kind, attributes = FAULTS[fault]

    def plant(team: list[SimulatedAnnotator]) -> None:
        for name, value in attributes.items():
            setattr(team[2], name, value)

    findings = alarms(answers_of(seed, plant))
    assert (kind, ("p2",)) in kinds(findings)
    assert {finding.annotators for finding in findings} == {("p2",)}
    assert all("p2" in finding.sentence and finding.evidence >= 20 for finding in findings)


def test_two_faults_in_one_team_are_both_found() -> None:
    def plant(team: list[SimulatedAnnotator]) -> None:
        team[0].seconds, team[5].constant = 1.0, "other"

    assert {("speed", ("p0",)), ("one_answer", ("p5",))} <= kinds(alarms(answers_of(4, plant)))


@pytest.mark.slow
def test_honest_teams_raise_an_alarm_at_most_as_often_as_the_config_says() -> None:
    # 5% of 20 are 1; the tests are conservative, and docs/labelling.md has the rate of a thousand teams.
    assert sum(bool(alarms(answers_of(seed))) for seed in range(300, 320)) <= 1


def test_without_planted_suggestions_there_is_nothing_to_test() -> None:
    settings = TeamSettings(overlap=2, gold_rate=0, check_rate=0)
    team = team_of(7)
    team[2].suggestion_bias = 0.9
    table = simulate_answers(team, truth_of(7), settings, seed=7, labels=LABELS)
    assert "suggestion_bias" not in {finding.kind for finding in alarms(table)}


def test_a_team_that_accepts_everything_is_found_by_its_own_errors() -> None:
    def plant(team: list[SimulatedAnnotator]) -> None:
        for member in team:
            member.suggestion_bias = 0.9

    table = answers_of(8, plant)
    findings = suggestion_bias(table, known_outcomes(table), 0.01)
    assert {finding.annotators[0] for finding in findings} == {f"p{at}" for at in range(6)}


def test_answers_faster_than_reading_are_found_without_anyone_to_compare_with() -> None:
    settings = TeamSettings(overlap=1, gold_rate=0, check_rate=0)
    table = simulate_answers([SimulatedAnnotator("anna", seconds=4)], truth_of(1, 100), settings, labels=LABELS)
    assert alarms(table) == []
    words = dict.fromkeys(range(100), 80)
    assert kinds(alarms(table, inputs=QualityInputs(word_counts=words))) == {("speed", ("anna",))}


def test_models_are_not_judged_as_people() -> None:
    def plant(team: list[SimulatedAnnotator]) -> None:
        team[2].seconds = 0.01

    table = answers_of(9, plant)
    sure = [0.9 if name == "p2" else None for name in table["annotator"].to_pylist()]
    table = table.set_column(table.column_names.index("confidence"), "confidence", pa.array(sure, pa.float64()))
    assert alarms(table) == []
