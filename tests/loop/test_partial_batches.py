"""Skipped records and partial batches: every record of a batch is accounted for, whenever a run is killed."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.label.people import PeopleAnnotator
from posttrain.label.queue import Queue
from posttrain.loop.batch_counts import BatchCounts, batch_counts, read_unlabelled
from posttrain.loop.stages.dataset import BuildDataset
from posttrain.loop.stages.train import Train
from posttrain.loop.state import RoundState
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def waiting_workspace(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace whose first round waits for people."""

    def build(folder: Path) -> None:
        shutil.copytree(begun_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, rounds=2, label={"annotator": "people"})
        loop = loop_class(folder)
        loop.run()
        loop.store.close()

    return Path(build_once("waiting for people", build))


@pytest.fixture
def waiting(waiting_workspace: Path, open_loop: Open, tmp_path: Path) -> Callable[[str], Any]:
    """Opens the loop of a copy of `waiting_workspace`."""
    return lambda name="a": open_loop(shutil.copytree(waiting_workspace, tmp_path / name, symlinks=True))


def fill(root: Path, truth: dict[str, str], labels: int, skips: int, name: str = "round-1") -> list[str]:
    """Label the first rows of a batch and skip the next ones; returns the ids of the rest."""
    path = root / "labels" / f"{name}.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for at, row in enumerate(rows):
        row["label"] = truth[row["prompt"]] if at < labels else ""
        row["skip"] = "cannot tell" if labels <= at < labels + skips else ""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [row["id"] for row in rows[labels + skips :]]


@pytest.fixture
def truth(small: Any) -> dict[str, str]:
    return {row["text"]: row["label"] for row in small.rows()}


def state_of(loop: Any, number: int) -> RoundState:
    return RoundState.from_row(loop.metadata.round(number))


def test_a_partial_round_accounts_for_every_record(waiting: Any, truth: dict[str, str]) -> None:
    loop = waiting()
    rest = fill(loop.root, truth, labels=7, skips=2)
    assert "9 of 12 are filled in labels/round-1.csv" in loop.run()
    # For this round alone: the next one waits for its own batch.
    assert "labels for round 2: fill" in loop.run(partial=True)
    state = state_of(loop, 1)
    expected = BatchCounts(asked=12, answered=7, skipped=2, left=3, used=7, skips={"cannot tell": 2})
    assert batch_counts(state) == expected
    assert state.labels == state.labels_new == 7
    reasons = read_unlabelled(loop.store, state.id("labelled"))
    assert sorted(reasons.values()) == ["cannot tell"] * 2 + ["left"] * 3
    assert {id for id, reason in reasons.items() if reason == "left"} == set(rest)
    # 60 records, without 7 labelled and 2 skipped ones: the rest of the batch is in the pool again.
    scores = loop.store.artifacts.get(state_of(loop, 2).id("scores"))
    assert scores.meta["pool"] == 51
    # A second time it needs an answer to the new batch.
    with pytest.raises(UserError, match="no record of round 2's batch is decided yet"):
        loop.run(partial=True)
    assert "labels for round 2" in loop.status["waiting"]


def test_a_kill_changes_nothing(waiting: Any, truth: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the batch is closed, after that, after the labels are stored, and in training."""

    def answer(loop: Any) -> None:
        queue = Queue(loop.store.metadata)
        for at in range(6):
            task = queue.next("anna")
            assert task is not None
            if at == 5:
                queue.drop(task.item, "root", "cannot tell")
            else:
                queue.answer(task.item, "anna", truth[task.content["prompt"][-1]["content"]], seconds=1)

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    whole = waiting("whole")
    answer(whole)
    whole.run(partial=True)
    killed = waiting("killed")
    answer(killed)
    for owner, name in (
        (Queue, "finish_batch"),
        (PeopleAnnotator, "unlabelled"),
        (BuildDataset, "run"),
        (Train, "run"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, kill)
            with pytest.raises(Killed):
                killed.run(partial=True)
    # The batch is closed since the second kill: to continue needs no option any more.
    assert "labels for round 2" in killed.run()
    for number in (1, 2):
        first, second = state_of(whole, number), state_of(killed, number)
        assert (first.labelled, first.dataset, first.candidate, first.selection) == (
            *(second.labelled, second.dataset, second.candidate, second.selection),
        )
        assert batch_counts(first) == batch_counts(second)


def test_a_batch_that_is_skipped_as_a_whole_makes_way_for_another(waiting: Any, truth: dict[str, str]) -> None:
    loop = waiting()
    fill(loop.root, truth, labels=0, skips=12)
    assert loop.run() == "another run, which selects other records: every record of the batch was skipped"
    assert "fill the label column of labels/round-1-2.csv (12 records)" in loop.run()
    queue = Queue(loop.store.metadata)
    first, second = ({item.record for item in queue.items(name)} for name in ("round-1", "round-1-2"))
    assert len(second) == 12
    assert not first & second
    fill(loop.root, truth, labels=12, skips=0, name="round-1-2")
    loop.run(until="dataset")
    counts = batch_counts(state_of(loop, 1))
    assert counts == BatchCounts(asked=12, answered=12, used=12)


def test_an_item_that_everybody_skips_holds_the_round_no_longer_than_people_want(
    waiting: Any, truth: dict[str, str]
) -> None:
    loop = waiting()
    queue = Queue(loop.store.metadata)
    hard = queue.next("anna")
    assert hard is not None
    for name in ("anna", "ben", "cem"):
        queue.skip(hard.item, name, "no idea")
    while (task := queue.next("anna")) is not None:
        queue.answer(task.item, "anna", truth[task.content["prompt"][-1]["content"]])
    assert loop.run().endswith("run again; or continue without the rest: posttrain run --partial")
    loop.run(partial=True, until="dataset")
    assert batch_counts(state_of(loop, 1)) == BatchCounts(asked=12, answered=11, left=1, used=11)


def test_rejected_labels_and_duplicates_add_up(small: Any, waiting: Any, truth: dict[str, str]) -> None:
    """While people label, a file brings one of the answers, and another answer to another input."""
    loop = waiting()
    fill(loop.root, truth, labels=12, skips=0)
    with (loop.root / "labels" / "round-1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    other = next(label for label in small.labels if label != rows[1]["label"])
    added = [(rows[0]["prompt"], rows[0]["label"]), (rows[1]["prompt"], other)]
    small.write(loop.root / "data" / "labelled" / "a.csv", [{"text": text, "label": label} for text, label in added])
    assert loop.run(until="dataset") is None
    state = state_of(loop, 1)
    counts = batch_counts(state)
    assert counts is not None
    assert (counts.asked, counts.answered, counts.used, counts.duplicates) == (12, 12, 10, 1)
    assert list(counts.rejected.values()) == [1]
    assert counts.sentence.startswith("12 asked: 10 used, 1 duplicate, 1 rejected (")
