"""Simulated annotators, their teams, and plans."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from posttrain.label.answers import ANSWERS
from posttrain.label.quality.config import Price, QualityConfig
from posttrain.label.simulation import (
    SimulatedAnnotator,
    SimulatedItem,
    TeamSettings,
    plan_labels,
    simulate_answers,
)

LABELS = ("a", "b", "c", "d")


def replies(annotator: SimulatedAnnotator, count: int = 2000, **item: object) -> list[str]:
    rng = np.random.default_rng(0)
    items = (SimulatedItem(at, LABELS[at % 4], LABELS, **item) for at in range(count))
    return [annotator.answer(shown, rng).answer for shown in items]


def accuracy(given: list[str]) -> float:
    return float(np.mean([answer == LABELS[at % 4] for at, answer in enumerate(given)]))


def test_accuracy_by_class_and_confusions_are_as_asked() -> None:
    given = replies(SimulatedAnnotator("p", {"a": 1.0, "b": 0.6, "c": 0.9, "d": 0.9}, {"b": ["c"]}))
    assert all(answer == "a" for answer in given[::4])
    assert Counter(given[1::4]).keys() == {"b", "c"}
    assert np.mean([answer == "b" for answer in given[1::4]]) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize(
    ("habit", "item", "answer", "share"),
    [
        ({"position_bias": 0.5}, {}, "a", 0.5 + 0.5 / 4),
        ({"suggestion_bias": 0.7}, {"suggestion": "c"}, "c", 0.7 + 0.3 / 4),
        ({"constant": "d", "constant_share": 0.4}, {}, "d", 0.4 + 0.6 / 4),
    ],
)
def test_habits_have_their_probability(
    habit: dict[str, object], item: dict[str, object], answer: str, share: float
) -> None:
    given = replies(SimulatedAnnotator("p", 1.0, **habit), **item)
    assert np.mean([reply == answer for reply in given]) == pytest.approx(share, abs=0.035)


def test_drift_guesses_and_repeats_lower_the_accuracy() -> None:
    drifting = replies(SimulatedAnnotator("p", 1.0, drift_after=1000, drift_accuracy=0.3))
    assert accuracy(drifting[:1000]) == 1
    assert accuracy(drifting[1000:]) == pytest.approx(0.3, abs=0.05)
    assert accuracy(replies(SimulatedAnnotator("p", 1.0, guesses=1.0))) == pytest.approx(0.25, abs=0.04)
    repeating = replies(SimulatedAnnotator("p", 1.0, repeats=0.5))
    again = np.mean([left == right for left, right in pairwise(repeating)])
    assert again == pytest.approx(0.5, abs=0.04)


def test_who_copies_gives_the_same_answers_where_there_is_one_to_copy() -> None:
    source = SimulatedAnnotator("p", 0.5)
    given = replies(source)
    assert replies(SimulatedAnnotator("q", 0.5, copies=source, copy_share=1.0)) == given


def test_speed_has_the_median_asked_for() -> None:
    rng, annotator = np.random.default_rng(0), SimulatedAnnotator("p", seconds=6.0, spread=0.5)
    seconds = [annotator.answer(SimulatedItem(at, "a", LABELS), rng).seconds for at in range(3000)]
    assert np.median(seconds) == pytest.approx(6, rel=0.06)
    assert np.log(seconds).std() == pytest.approx(0.5, rel=0.06)


def table_of(seed: int, **settings: object) -> pa.Table:
    team = [SimulatedAnnotator(f"p{at}") for at in range(5)]
    return simulate_answers(team, list(LABELS) * 50, TeamSettings(**settings), seed=seed, labels=LABELS)


def test_a_team_keeps_overlap_gold_and_checks_and_depends_on_the_seed_only() -> None:
    table = table_of(3, overlap=2, gold_rate=0.2, check_rate=0.3)
    assert table.schema == ANSWERS
    assert table == table_of(3, overlap=2, gold_rate=0.2, check_rate=0.3)
    assert table != table_of(4, overlap=2, gold_rate=0.2, check_rate=0.3)
    rows = table.to_pylist()
    answers = Counter(row["item"] for row in rows)
    assert len({(row["item"], row["annotator"]) for row in rows}) == len(rows)
    kinds = {row["item"]: "gold" if row["expected"] else "checked" if row["checked"] else "plain" for row in rows}
    assert {kind: {answers[item] for item in kinds if kinds[item] == kind} for kind in set(kinds.values())} == {
        **{"gold": {5}, "checked": {3, 4}, "plain": {2, 3}}
    }
    for item, kind in kinds.items():
        given = [row["answer"] for row in rows if row["item"] == item]
        first = given[: {"gold": 5, "checked": 3, "plain": 2}[kind]]
        # The table is in the order of time, in which the one who was asked last may come first.
        assert kind == "gold" or (len(given) > len(first)) == (len(set(given)) > 1)
    assert Counter(kinds.values())["gold"] == pytest.approx(40, abs=15)
    times = table["created_at"].to_pylist()
    assert times == sorted(times)


def test_planted_suggestions_are_wrong_and_marked() -> None:
    rows = table_of(5, suggestion_rate=1.0, suggestion_accuracy=1.0, planted_rate=0.3, shuffled=True).to_pylist()
    truth = list(LABELS) * 50
    assert all((row["suggestion"] == truth[row["item"]]) is not row["planted"] for row in rows)
    assert np.mean([row["planted"] for row in rows]) == pytest.approx(0.3, abs=0.06)


def test_a_plan_counts_labels_costs_and_errors() -> None:
    team = [SimulatedAnnotator(f"p{at}", accuracy=0.8, seconds=10, spread=0.01) for at in range(4)]
    prices = QualityConfig(price=Price(per_hour=18))
    single, triple = (
        plan_labels(team, TeamSettings(overlap=overlap, gold_rate=0, check_rate=0), LABELS, hours=5, prices=prices)
        for overlap in (1, 3)
    )
    # 4 people of 5 hours at 10 seconds an answer, and 5 cents for one.
    assert single.labels == pytest.approx(7200, rel=0.01)
    # A fourth answers where three differ: all but those who agree on the right or a wrong label.
    more = 1 - 0.8**3 - 3 * (0.2 / 3) ** 3
    assert (triple.labels, triple.answers) == pytest.approx((7200 / (3 + more), 7200), rel=0.02)
    assert (single.cost_per_label, triple.cost_per_label) == pytest.approx((0.05, 0.05 * (3 + more)), rel=0.02)
    assert single.error == pytest.approx(0.2, abs=0.03)
    assert (single.reviews, triple.error < single.error / 4) == (0, True)
    assert 0.03 < triple.reviews / triple.labels < 0.3
    # The plan's work is not remembered by the team.
    assert all(not annotator.given for annotator in team)
