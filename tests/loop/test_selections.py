"""The batches of the rounds: chosen records, reasons, and notes about missing files."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from _pytest.logging import LogCaptureHandler

from posttrain.loop import selections
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.loop.record import read_rounds
from posttrain.loop.selections import Selection
from posttrain.store.workspace import Workspace
from posttrain.web.loop_report import report_page
from posttrain.web.page import render_page

pytestmark = pytest.mark.slow

_LEARNS: dict[str, Any] = {
    "label": {"per_round": 16},
    "train": {"epochs": 6, "learning_rate": 4.0e-3, "precision": "float32"},
}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the run of `finished_loop` says."""
    return []


@pytest.fixture(scope="module")
def finished_loop(
    small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> Iterator[tuple[Workspace, Any]]:
    """A workspace with two rounds, the second by margin; treat it as read-only."""
    small = small_anywhere(tmp_path_factory.mktemp("selection"))
    root = small(select={"strategy": "margin", "pool_sample": 40}, **_LEARNS)
    store = Workspace.create(root, load_config(root).store)
    log, handler = logging.getLogger("posttrain"), LogCaptureHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        Loop(store, load_config(root)).run()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines += [record.getMessage() for record in handler.records]
    yield store, small
    store.close()


@pytest.fixture
def reopened_workspace(finished_loop: tuple[Workspace, Any]) -> Iterator[Workspace]:
    """The same workspace opened again, so that nothing is verified yet."""
    store = Workspace.open(finished_loop[0].root, load_config(finished_loop[0].root).store)
    yield store
    store.close()


def read_selections(store: Workspace) -> list[Selection]:
    return selections.read_selections(read_rounds(store))


def page_of(store: Workspace) -> str:
    return render_page(report_page(store, load_config(store.root)))


def _artifact(store: Workspace, role: str, number: int = 2) -> Path:
    return store.artifacts.path(store.metadata.rounds()[number].detail[role])


def test_each_record_has_its_reason_score_answer_label_and_text(finished_loop: tuple[Workspace, Any]) -> None:
    store, small = finished_loop
    first, second = read_selections(store)
    truth = {row["text"]: row["label"] for row in small.rows()}
    batch = parquet.read_table(_artifact(store, "selection") / "batch.parquet").to_pylist()
    scores = parquet.read_table(_artifact(store, "scores") / "scores.parquet").to_pylist()
    margins = {row["id"]: row["margin"] for row in scores}
    assert [item.round for item in (first, second)] == [1, 2]
    assert (second.strategy, second.score, second.records, second.scored, second.pool) == (
        "margin",
        "margin",
        16,
        40,
        44,
    )
    assert [(item.rank, item.id, item.reason) for item in second.chosen] == [
        (row["rank"], row["id"], row["reason"]) for row in batch
    ]
    assert [item.score for item in second.chosen] == [margins[row["id"]] for row in batch]
    assert [item.predicted for item in second.chosen] == [row["predicted"] for row in batch]
    assert [item.label for item in second.chosen] == [truth[item.input] for item in second.chosen]
    assert sum(second.reasons.values()) == 16
    assert sorted(second.scores.tolist()) == sorted(margins.values())
    assert second.missing == ()
    # The map: all chosen records, the other scored records, and the labels of the first round.
    assert second.map is not None
    assert set(second.map.chosen) == {item.id for item in second.chosen}
    assert (len(second.map.pool), len(second.map.labelled)) == (24, 16)


def test_a_cold_round_has_a_map_and_a_note_about_missing_scores(
    finished_loop: tuple[Workspace, Any], lines: list[str]
) -> None:
    first, _ = read_selections(finished_loop[0])
    assert [line for line in lines if "chosen by" in line] == [
        "  chosen by facility_location: margin needs a champion that a round has trained"
    ]
    assert (first.strategy, first.reasons) == ("facility_location", {"cold_start": 16})
    assert {item.score for item in first.chosen} == {None}
    assert {item.label for item in first.chosen} <= set(finished_loop[1].labels)
    assert first.missing == (
        "There are no scores: no model had been trained yet, so what it is unsure of says nothing.",
    )
    assert first.map is not None
    assert len(first.map.labelled) == 0


def _with_estimate(monkeypatch: pytest.MonkeyPatch, store: Workspace, estimate: dict[str, Any]) -> None:
    rows = store.metadata.rounds()
    results = {**rows[2].detail["results"], "select": estimate}
    rows[2] = dataclasses.replace(rows[2], detail={**rows[2].detail, "results": results})
    monkeypatch.setattr(store.metadata, "rounds", lambda: rows)


def test_the_expected_gain_is_compared_with_the_achieved_gain(
    finished_loop: tuple[Workspace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = finished_loop
    _, before, now = store.metadata.rounds()
    assert [item.decision and item.decision["action"] for item in (before, now)] == ["deploy", "deploy"]
    first, second = read_selections(store)
    assert first.gain is None, "one measurement gives no estimate"
    assert second.gain is not None
    expected_gain = now.detail["results"]["select"]["expected_gain"]
    assert dataclasses.astuple(second.gain)[:5] == (
        2,
        "accuracy",
        expected_gain["gain"],
        expected_gain["low"],
        expected_gain["high"],
    )
    achieved = now.detail["metrics"]["accuracy"] - before.detail["metrics"]["accuracy"]
    assert second.gain.achieved == pytest.approx(achieved)
    assert "Expected and achieved gain in accuracy, in points" in page_of(store)
    # With another metric there is no achieved gain; a reason to stop is shown.
    _with_estimate(
        monkeypatch,
        store,
        {
            "labels": 16,
            "agreements": [],
            "expected_gain": {**expected_gain, "metric": "token_f1"},
            "why_stop": "champions answer alike",
        },
    )
    _, second = read_selections(store)
    assert second.gain is not None
    assert second.gain.achieved is None
    page = page_of(store)
    assert "More labels may no longer pay off: champions answer alike." in page


def test_older_rounds_are_summarised_without_reading_their_files(
    reopened_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selections, "SELECTIONS_SHOWN", 1)
    first, second = read_selections(reopened_workspace)
    assert (first.records, first.chosen, first.map) == (16, (), None)
    assert len(second.chosen) == 16


@pytest.mark.parametrize(
    ("role", "file", "message", "intact"),
    [
        ("selection", "batch.parquet", "The batch cannot be read: artifact selection-", "scores"),
        ("scores", "scores.parquet", "The scores cannot be read: artifact scores-", "chosen"),
        ("labelled", "labels.parquet", "The records cannot be read: artifact labels-", "chosen"),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_shown(
    reopened_workspace: Workspace, role: str, file: str, message: str, intact: str
) -> None:
    path = reopened_workspace.home / "artifacts" / reopened_workspace.metadata.rounds()[2].detail[role] / file
    content, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o644)
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        first, second = read_selections(reopened_workspace)
        page = page_of(reopened_workspace)
    finally:
        path.write_bytes(content)
        path.chmod(mode)
    assert [sentence.startswith(message) for sentence in second.missing] == [True]
    assert f"{file} differs from its checksum" in second.missing[0]
    assert len(getattr(second, intact)) > 0
    assert all(record.score is not None for record in second.chosen), "the batch has the entropy too"
    assert (second.round, second.records) == (2, 16)
    assert len(first.chosen) == 16
    assert message in page


def test_a_batch_that_waits_for_labels_is_shown(small: Callable[..., Path]) -> None:
    root = small(rounds=1, label={"annotator": "people"})
    store = Workspace.create(root, load_config(root).store)
    Loop(store, load_config(root)).run()
    (waiting,) = read_selections(store)
    page = page_of(store)
    store.close()
    assert (len(waiting.chosen), {record.label for record in waiting.chosen}, waiting.gain) == (12, {None}, None)
    assert all(record.input for record in waiting.chosen)
    assert "All 12 records" in page
