"""The quality report, and the values of triggers and gates."""

import json
import math
from datetime import timedelta

import pytest
from simulated_team import SimulatedAnnotator, TeamSettings, simulate_answers
from vote_tables import START, answer_table

from posttrain.label.answers import answers_of_agreement, encode_votes
from posttrain.label.quality.agreement import krippendorff_alpha
from posttrain.label.quality.config import VALUE_NAMES
from posttrain.label.quality.report import QualityInputs, quality_report, quality_values

TEAM = [SimulatedAnnotator(name, accuracy=share) for name, share in (("anna", 0.95), ("ben", 0.9), ("cleo", 0.85))]


def test_the_report_is_json_and_its_rates_have_their_counts() -> None:
    truth = ["x", "y", "z", "y"] * 50
    table = simulate_answers(TEAM, truth, TeamSettings(overlap=2, gold_rate=0.2), seed=1)
    inputs = QualityInputs(wanted=30)
    report = quality_report(table, inputs, now=START + timedelta(days=200), draws=50)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    agreement = report["agreement"]
    assert agreement["percent"]["value"] == pytest.approx(agreement["pairs_agreed"] / agreement["pairs"])
    assert agreement["alpha"]["low"] < agreement["alpha"]["value"] < agreement["alpha"]["high"]
    assert agreement["alpha"]["value"] == pytest.approx(krippendorff_alpha(encode_votes(answers_of_agreement(table))))
    assert {entry["label"] for entry in agreement["by_class"]} == {"x", "y", "z"}
    assert len(agreement["by_pair"]) == 3
    gold = report["gold"]
    assert gold["count"] == sum(rate["count"] for rate in gold["by_annotator"].values())
    assert gold["n"] == sum(rate["n"] for rate in gold["by_class"].values())
    assert set(report["consensus"]["posterior"]["accuracy"]) == {"anna", "ben", "cleo"}
    # Nothing was answered in the last week, so that there is no pace and no end.
    assert (report["outlook"]["per_day"], report["outlook"]["done_at"]) == (0, None)
    assert report["alarms"] == []
    assert report["values"]["label.alarms"] == 0


def test_the_answers_that_disagreements_ask_for_do_not_move_the_agreement() -> None:
    team = [SimulatedAnnotator(name, accuracy=0.8) for name in ("anna", "ben", "cleo")]
    table = simulate_answers(team, [*"vwxyz"] * 400, TeamSettings(overlap=2, gold_rate=0, check_rate=0), seed=3)
    assert sum(table["deciding"].to_pylist()) > 500
    agreement = quality_report(table, draws=0)["agreement"]
    # Two of them are right, or both make the same one of four mistakes; by chance one pair in five agrees.
    expected = 0.8**2 + 0.2**2 / 4
    assert agreement["percent"]["value"] == pytest.approx(expected, abs=0.03)
    for name in ("cohen", "fleiss", "alpha"):
        assert agreement[name]["value"] == pytest.approx((expected - 0.2) / 0.8, abs=0.04)


def test_values_are_those_of_the_report_and_undefined_without_answers() -> None:
    table = simulate_answers(TEAM, ["x", "y"] * 40, TeamSettings(overlap=2, gold_rate=0.2), seed=2)
    values = quality_values(table)
    assert values == pytest.approx(quality_report(table, draws=0)["values"])
    assert tuple(values) == tuple(VALUE_NAMES)
    nothing = quality_values(answer_table([]))
    assert tuple(nothing) == tuple(VALUE_NAMES)
    assert all(math.isnan(value) for value in nothing.values())
    # One answer an item: no agreement, but answers are counted.
    single = quality_values(answer_table([{"item": 1}, {"item": 2}]))
    assert (single["label.answers"], math.isnan(single["label.alpha"])) == (2, True)


def test_a_report_without_answers_and_one_of_free_text_are_whole() -> None:
    empty = quality_report(answer_table([]))
    assert (empty["counts"]["answers"], empty["agreement"]["alpha"]["value"], empty["alarms"]) == (0, None, [])
    written = answer_table([{"item": item, "answer": f'"answer {item}"'} for item in range(50)])
    assert quality_report(written)["consensus"]["posterior"] is None
