"""Strategies by round, the end of labelling, and the pool agreement estimated from explored records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.inspect.preview import preview_selection
from posttrain.loop.config import load_config
from posttrain.loop.gain import gain_sentence, gain_to_json
from posttrain.loop.label_reports import label_reports
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.score_files import BATCH
from posttrain.select.strategy import NeighbourAgreement
from posttrain.store.errors import UserError
from posttrain.web.selection_reader import read_selections
from posttrain.web.selection_view import selections_view

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
# Answers that end soon, as the tiny model does not end them itself.
WRITTEN: dict[str, Any] = {"labels": None, "max_new_tokens": 4}


def _selections(loop: Any) -> list[dict[str, Any]]:
    rounds = loop.metadata.rounds()[1:]
    return [loop.store.artifacts.get(entry.detail["selection"]).meta for entry in rounds if "selection" in entry.detail]


def test_each_round_has_its_strategy(small: Any, copied_loop: Any) -> None:
    small.configure(copied_loop.root, select={"strategy": ["random", "random", "k_center", "margin"]})
    copied_loop.run(3)
    # Rounds after the last strategy keep it.
    small.configure(copied_loop.root, select={"strategy": ["random", "k_center", "margin"]})
    copied_loop.run(4, until="select")
    assert [item["strategy"] for item in _selections(copied_loop)][2:] == ["k_center", "margin"]


def test_auto_covers_until_confidence_predicts_errors(small: Any, open_loop: Open) -> None:
    """With a learning rate of almost zero the model's uncertainty stays noise."""
    train = {"epochs": 1, "learning_rate": 1.0e-12}
    loop = open_loop(small(rounds=2, select={"strategy": "auto"}, train=train))
    loop.run(1)
    loop.run(until="select")
    first, second = _selections(loop)
    assert first["strategy"] == "facility_location"
    assert second["strategy"] == "facility_location"
    assert set(second["reasons"]) <= {"cold_start", "explore"}


def test_auto_covers_while_no_answer_is_right(small: Any, open_loop: Open) -> None:
    """The tiny model's written answers are all wrong, so confidence cannot predict errors."""
    loop = open_loop(small(rounds=2, task=WRITTEN, label={"per_round": 6}))
    loop.run(1)
    loop.run(until="select")
    first, second = (set(item["reasons"]) for item in _selections(loop))
    assert first == {"cold_start"}
    assert second <= {"cold_start", "explore"}


def test_auto_does_not_cover_where_neighbours_do_not_share_labels(
    small: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.select.confidence_predicts_errors", lambda confidence, right: True)
    monkeypatch.setattr(
        "posttrain.loop.stages.score.neighbour_agreement", lambda *_: NeighbourAgreement(0.01, 0.05, 500)
    )
    loop = open_loop(small(select={"strategy": "auto"}))
    loop.run(1)
    loop.run(until="select")
    assert [item["strategy"] for item in _selections(loop)] == ["random", "margin"]
    scores = [loop.store.artifacts.get(entry.detail["scores"]).meta for entry in loop.metadata.rounds()[1:]]
    assert [item["neighbours_kappa"] for item in scores] == [0.01, 0.01]
    assert all(item["unasked"] == 0 for item in scores)
    batches = [
        parquet.read_table(loop.store.artifacts.path(entry.detail["selection"]) / BATCH)
        for entry in loop.metadata.rounds()[1:]
    ]
    assert set(batches[0]["why"].to_pylist()) == {"drawn at random, as neighbours hardly share labels (kappa 0.01)"}
    last, first = (item.summary for item in selections_view(read_selections(loop.store)).rounds)
    assert first.endswith("by random, as neighbours hardly share labels (kappa 0.01)")
    assert last.endswith("by margin, as neighbours hardly share labels (kappa 0.01)")


def test_a_cold_start_that_is_named_stays_where_neighbours_do_not_share_labels(
    small: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.select.confidence_predicts_errors", lambda confidence, right: False)
    monkeypatch.setattr(
        "posttrain.loop.stages.score.neighbour_agreement", lambda *_: NeighbourAgreement(0.01, 0.05, 500)
    )
    loop = open_loop(small(select={"strategy": "auto", "cold_start": "typiclust"}))
    loop.run(1)
    loop.run(until="select")
    assert [item["strategy"] for item in _selections(loop)] == ["typiclust", "typiclust"]
    assert all(item.summary.endswith("by typiclust") for item in selections_view(read_selections(loop.store)).rounds)


def test_auto_follows_confidence_that_predicts_errors(
    small: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.select.confidence_predicts_errors", lambda confidence, right: True)
    loop = open_loop(
        small(select={"strategy": "auto", "cold_start": "k_center", "options": {"facility_location": {"power": 2.0}}})
    )
    loop.run(1)
    loop.run(until="select")
    assert [item["strategy"] for item in _selections(loop)] == ["k_center", "facility_location"]
    assert "strategy" in _selections(loop)[1]["reasons"]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"strategy": []}, "name a strategy"),
        ({"strategy": ["margin", "margn"]}, "margn"),
        ({"strategy": ["margin", "auto"]}, "stands alone"),
        ({"strategy": "top"}, "none is named"),
        ({"strategy": "auto", "options": {"power": 2}}, "by strategy"),
        ({"strategy": ["random", "composite"], "options": {"composite": {"uncertainties": 1}}}, "uncertainties"),
        ({"stop": {"action": "halt"}}, "stop.action"),
        ({"near_duplicate": 1.5}, "near_duplicate"),
    ],
)
def test_unusable_strategies_and_options_are_refused_before_any_work(
    small: Any, select: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(small(select=select))


def test_the_loop_stops_where_more_labels_no_longer_pay_off(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    small.configure(loop.root, rounds=3, select={"stop": {"action": "stop", "gain": 1.0}})
    waits = loop.run()
    assert waits is not None
    assert "a reason to label more" in waits
    assert "can hardly bring 1 accuracy" in waits
    assert [entry.status for entry in loop.metadata.rounds()] == ["done", "done", "done", "waiting"]
    assert loop.run() == waits, "nothing has changed"
    small.configure(loop.root, rounds=3, select={"stop": {"action": "advise", "gain": 1.0}})
    assert loop.run() is None
    assert [entry.status for entry in loop.metadata.rounds()] == ["done"] * 4
    outlook = loop.metadata.rounds()[3].detail["outlook"]
    assert outlook["expected_gain"]["low"] <= outlook["expected_gain"]["gain"] <= outlook["expected_gain"]["high"]
    assert len(outlook["agreements"]) == 1, "the base model scores nothing, and two champions have answered since"
    assert "can hardly bring" in outlook["why_stop"]


def test_the_loop_stops_at_the_label_budget(small: Any, copied_loop: Any) -> None:
    small.configure(copied_loop.root, rounds=4, label={"per_round": 12, "budget": 32})
    waits = copied_loop.run()
    assert waits == "a larger label.budget: all 32 labels are used up"
    assert [len(copied_loop.labelled_inputs(number)) for number in (1, 2, 3)] == [12, 12, 8]


def test_explored_records_estimate_how_often_the_champion_is_right(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    small.configure(loop.root, select={"explore": 0.5})
    loop.run(3, until="label")
    first, _, third = label_reports(loop.store)
    assert first["pool_agreement"] is None, "an untrained model explores nothing"
    result = third["pool_agreement"]
    assert result["drawn"] == 6
    assert result["low"] <= result["value"] <= result["high"]
    detail = loop.metadata.rounds()[3].detail
    batch = parquet.read_table(loop.store.artifacts.path(detail["selection"]) / "batch.parquet").to_pylist()
    explored = [row for row in batch if row["reason"] == "explore"]
    assert {row["inclusion"] for row in explored} == {6 / 36}
    assert all(row["inclusion"] is None for row in batch if row["reason"] != "explore")
    assert all(row["why"] for row in batch)
    assert first["shift"] is None, "an untrained model predicts nothing"
    scores = parquet.read_table(loop.store.artifacts.path(detail["scores"]) / "scores.parquet", columns=["predicted"])
    in_pool, shift = scores["predicted"].to_pylist(), third["shift"]
    assert shift["batch"] == pytest.approx(sum(row["predicted"] == shift["label"] for row in batch) / len(batch))
    assert shift["pool"] == pytest.approx(in_pool.count(shift["label"]) / len(in_pool))
    assert 0 <= shift["p_value"] <= 1


def test_successive_champions_are_compared(small: Any, copied_loop: Any) -> None:
    """A candidate is refused in round 3, so one model scores rounds 3 and 4: it is not compared with itself."""
    refuse, accept = {"deploy": ["accuracy > 2"]}, {"deploy": ["accuracy >= 0"]}
    for number, gate in ((3, refuse), (4, accept)):
        small.configure(copied_loop.root, gate=gate, label={"per_round": 4, "when_refused": "keep"})
        copied_loop.run(number)
    copied_loop.run(5, until="select")
    outlooks = [entry.detail["outlook"] for entry in copied_loop.metadata.rounds()[1:]]
    assert [len(item["agreements"]) for item in outlooks] == [0, 0, 1, 1, 2]
    # The model in service is not the newest of the curve in round 4 alone.
    assert [item["expected_gain"] is not None for item in outlooks] == [False, True, True, False, True]
    reason = "the model in service is round 2's, and round 3's, the newest of the learning curve, was refused"
    assert [item["unknown"] for item in outlooks] == [None, None, None, reason, None]
    assert gain_sentence(outlooks[3]) == f"{reason}: what 4 labels will bring is not known"
    assert [selection.gain_unknown for selection in read_selections(copied_loop.store)] == ["", "", "", reason, ""]


def test_nothing_is_forecast_after_a_roll_back_by_hand(copied_loop: Any) -> None:
    config = load_config(copied_loop.root)
    before = preview_selection(copied_loop.store, config).gain
    assert before is not None
    assert "are expected to bring" in before.sentence
    assert gain_sentence(gain_to_json(before)) == before.sentence
    ModelRegistry(copied_loop.store).rollback("found bad in service")
    gain = preview_selection(copied_loop.store, config).gain
    assert gain is not None
    assert gain.expected is None
    assert gain.sentence == (
        "the model in service is round 1's, and round 2's, the newest of the learning curve, is no longer in service: "
        "what 12 labels will bring is not known"
    )


def test_no_pool_agreement_is_estimated_for_written_answers(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(task=WRITTEN, label={"per_round": 6}, select={"explore": 1.0, "focus": 0.0}))
    loop.run(1)
    loop.run(until="label")
    assert [report["pool_agreement"] for report in label_reports(loop.store)] == [None, None]
