"""Strategies by round, the end of labelling, and the pool agreement estimated from explored records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from open_loops import WRITTEN

from posttrain.inspect.preview import preview_selection
from posttrain.loop.config import load_config
from posttrain.loop.gain import gain_sentence, gain_to_json
from posttrain.loop.label_reports import label_reports
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import read_rounds
from posttrain.loop.score_files import BATCH
from posttrain.loop.selection_report import selection_section
from posttrain.loop.selections import read_selections
from posttrain.report.section import Fold
from posttrain.select.strategy import NeighbourAgreement
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


def _selections(loop: Any) -> list[dict[str, Any]]:
    rounds = loop.metadata.rounds()[1:]
    return [loop.store.artifacts.get(entry.detail["selection"]).meta for entry in rounds if "selection" in entry.detail]


def test_auto_covers_until_confidence_predicts_errors(begun_loop: Callable[..., Any]) -> None:
    """With a learning rate of almost zero the model's uncertainty stays noise."""
    train = {"epochs": 1, "learning_rate": 1.0e-12}
    loop = begun_loop(rounds=2, select={"strategy": "auto"}, train=train)
    loop.run(1)
    loop.run(until="select")
    first, second = _selections(loop)
    assert first["strategy"] == "facility_location"
    assert second["strategy"] == "facility_location"
    assert set(second["reasons"]) <= {"cold_start", "explore"}


def test_auto_covers_while_no_answer_is_right_and_estimates_no_pool_agreement(
    small: Any, written_loop: Callable[..., Any]
) -> None:
    """The tiny model's written answers are all wrong, so confidence cannot predict errors."""
    loop = written_loop()
    loop.run(2, until="select")
    first, second = (set(item["reasons"]) for item in _selections(loop))
    assert first == {"cold_start"}
    assert second <= {"cold_start", "explore"}
    small.configure(loop.root, task=WRITTEN, label={"per_round": 6}, select={"explore": 1.0, "focus": 0.0})
    loop.run(2, until="label")
    assert set(_selections(loop)[1]["reasons"]) == {"explore"}
    assert [report["pool_agreement"] for report in label_reports(loop.store)] == [None, None]


def test_auto_does_not_cover_where_neighbours_do_not_share_labels(
    small: Any, begun_loop: Callable[..., Any], copied_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy that is named and needs no trained model stays."""
    monkeypatch.setattr("posttrain.loop.stages.select.confidence_predicts_errors", lambda confidence, right: True)
    monkeypatch.setattr(
        "posttrain.loop.stages.score.neighbour_agreement", lambda *_: NeighbourAgreement(0.01, 0.05, 500)
    )
    loops = begun_loop(), copied_loop
    for loop, number, strategy in zip(loops, (1, 3), ("random", "margin"), strict=True):
        small.configure(loop.root, select={"strategy": "auto"})
        loop.run(number, until="select")
        assert _selections(loop)[-1]["strategy"] == strategy
        scores = loop.store.artifacts.get(loop.metadata.rounds()[number].detail["scores"]).meta
        assert scores["neighbours_kappa"] == 0.01
        assert scores["unscored"] == 0
        section = selection_section(read_selections(read_rounds(loop.store)))
        summary = next(block.remark for block in section.blocks if isinstance(block, Fold))
        assert summary.endswith(f"by {strategy}, as neighbours hardly share labels (kappa 0.01)")
    selection = loops[0].metadata.rounds()[1].detail["selection"]
    batch = parquet.read_table(loops[0].store.artifacts.path(selection) / BATCH)
    assert set(batch["why"].to_pylist()) == {"drawn at random, as neighbours hardly share labels (kappa 0.01)"}
    small.configure(copied_loop.root, select={"strategy": "typiclust"})
    copied_loop.run(3, until="select")
    assert _selections(copied_loop)[-1]["strategy"] == "typiclust"


def test_auto_follows_confidence_that_predicts_errors(
    small: Any, copied_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.select.confidence_predicts_errors", lambda confidence, right: True)
    small.configure(copied_loop.root, select={"strategy": "auto", "options": {"dimensions": 16}})
    copied_loop.run(3, until="select")
    selection = _selections(copied_loop)[2]
    assert selection["strategy"] == "facility_location"
    assert selection["options"] == {"by": "least_confidence", "dimensions": 16}
    assert "strategy" in selection["reasons"]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"strategy": "margn"}, "margn"),
        ({"strategy": "top"}, "none is named"),
        ({"strategy": "auto", "options": {"relevance": 1}}, "relevance"),
        ({"strategy": "mmr", "options": {"relevances": 1}}, "relevances"),
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
    assert loop.run(until="select") is None
    outlook = loop.metadata.rounds()[3].detail["results"]["select"]
    assert outlook["expected_gain"]["low"] <= outlook["expected_gain"]["gain"] <= outlook["expected_gain"]["high"]
    assert len(outlook["agreements"]) == 1, "the base model scores nothing, and two champions have answered since"
    assert "can hardly bring" in outlook["why_stop"]


def test_the_loop_stops_at_the_label_budget(small: Any, copied_loop: Any) -> None:
    small.configure(copied_loop.root, rounds=4, label={"per_round": 12, "budget": 24})
    assert copied_loop.run() == "a larger label.budget: all 24 labels are used up"
    small.configure(copied_loop.root, rounds=4, label={"per_round": 12, "budget": 32})
    copied_loop.run(until="label")
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


def test_successive_champions_are_compared(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    """A candidate is refused in round 3, so one model scores rounds 3 and 4: it is not compared with itself."""
    loop = evaluated_loop(gate={"deploy": ["accuracy > 2"]}, label={"per_round": 12})
    loop.run(3)
    loop.run(4, until="select")
    outlooks = [entry.detail["results"]["select"] for entry in loop.metadata.rounds()[1:]]
    assert [len(item["agreements"]) for item in outlooks] == [0, 0, 1, 1]
    # The model in service is not the newest of the curve in round 4 alone.
    assert [item["expected_gain"] is not None for item in outlooks] == [False, True, True, False]
    reason = "the model in service is round 2's, and round 3's, the newest of the learning curve, was refused"
    assert [item["unknown"] for item in outlooks] == [None, None, None, reason]
    assert gain_sentence(outlooks[3]) == f"{reason}: what 12 labels will bring is not known"
    assert [selection.gain_unknown for selection in read_selections(read_rounds(loop.store))] == ["", "", "", reason]


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
