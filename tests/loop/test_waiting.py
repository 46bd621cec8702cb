"""Rounds that wait for labels, new records or triggers."""

import csv
import datetime
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.label.queue import Queue
from posttrain.loop.config import load_config
from posttrain.loop.label_reports import label_reports
from posttrain.loop.open_batch import export_batch, import_batch, missing_answers
from posttrain.store.errors import UserError
from posttrain.web.loop_report import headline, read_loop

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
WAITS = (
    "labels for round 1: fill the label column of labels/round-1.csv (12 records) or answer on the pages "
    "(posttrain label serve), then run again"
)


@pytest.fixture(scope="module")
def waiting_workspace(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace whose first round waits for people to fill a file."""

    def build(folder: Path) -> None:
        shutil.copytree(begun_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, rounds=1, label={"annotator": "people"})
        loop = loop_class(folder)
        assert loop.run() == WAITS
        loop.store.close()

    return Path(build_once("waiting", build))


@pytest.fixture
def waiting_loop(waiting_workspace: Path, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a copy of `waiting_workspace`."""
    return open_loop(shutil.copytree(waiting_workspace, tmp_path / "workspace", symlinks=True))


@pytest.fixture
def fill(small: Any) -> Callable[..., Path]:
    """Fill the label column of a batch, all of it or the first ``count`` rows."""
    truth = {row["text"]: row["label"] for row in small.rows()}

    def fill_labels(source: Path, target: Path | None = None, count: int | None = None) -> Path:
        with source.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows[:count]:
            row["label"] = truth[row["prompt"]]
        target = target or source
        small.write(target, rows, list(rows[0]))
        return target

    return fill_labels


def test_two_people_finish_a_round_by_files_alone(
    begun_workspace: Path, small: Any, open_loop: Open, fill: Callable[..., Path], tmp_path: Path
) -> None:
    root = shutil.copytree(begun_workspace, tmp_path / "workspace", symlinks=True)
    label = {"annotator": "people", "queue": {"overlap": 2}}
    small.configure(root, rounds=1, label=label)
    loop = open_loop(root)
    assert "labels/round-1.NAME.csv" in str(loop.run())
    given = tmp_path / "sent.csv"
    config = load_config(root)
    assert export_batch(loop.store, config, given) == 12
    mine = fill(given, tmp_path / "round-1-ana.csv")
    for _ in range(2):
        assert import_batch(loop.store, config, mine) == (12, 12)
        missing = str(missing_answers(loop.store, config))
        assert missing.startswith("0 of 12 are decided, 12 answers are wanted; answer on the pages")
        assert "of 2 people, so far those of ana: each fills a copy, labels/round-1.NAME.csv" in missing
    # The row has what was missing when the loop looked last.
    assert "so far those of ana" in str(loop.status["waiting"])
    with pytest.raises(UserError, match=r"--annotator: `a/b` cannot be part of a file's name"):
        import_batch(loop.store, config, mine, "a/b")
    assert import_batch(loop.store, config, fill(given, tmp_path / "filled.csv"), "bo") == (12, 12)
    assert missing_answers(loop.store, config) is None
    assert sorted(path.name for path in (root / "labels").iterdir()) == [
        "round-1.ana.csv",
        "round-1.bo.csv",
        "round-1.csv",
    ]
    assert loop.run() is None
    assert label_reports(loop.store)[0]["annotators"] == {"ana, bo": 12}


def test_a_round_resumes_once_its_label_file_is_filled_and_rules_know_the_quality_of_its_labels(
    small: Any, waiting_loop: Any, fill: Callable[..., Path]
) -> None:
    loop, root = waiting_loop, waiting_loop.root
    batch = root / "labels" / "round-1.csv"
    assert loop.status["waiting"] == WAITS
    tiles = {name: (value, remark) for value, name, remark in headline(read_loop(loop.store, load_config(root)))}
    assert tiles["labels answered"] == ("0", "of 12 asked")
    assert loop.status["rounds"][1]["status"] == "waiting"
    assert "0 of 12 are filled in labels/round-1.csv" in loop.run()
    fill(batch, count=5)
    assert "5 of 12 are filled" in loop.run()
    fill(batch)
    # One person's answers agree with nobody's: alpha is undefined, and no rule about it holds.
    rules = ["label.answers >= 12", "label.alarms == 0", "label.alpha > 0.5"]
    label = {"annotator": "people"}
    small.configure(root, rounds=1, label=label, gate={"deploy": rules})
    stages_before = len(loop.stages())
    assert loop.run() is None
    assert loop.stages(after=stages_before) == [
        f"1 {name}" for name in ("label", "dataset", "train", "evaluate", "decide")
    ]
    assert loop.status["waiting"] is None
    (report,) = label_reports(loop.store)
    assert (report["round"], report["labels"], report["annotators"]) == (1, 12, {"file": 12})
    decision = loop.metadata.rounds()[1].decision
    assert [(rule["values"], rule["holds"]) for rule in decision["rules"][:3]] == [
        ("label.answers = 12", True),
        ("label.alarms = 0", True),
        ("label.alpha = nan", False),
    ]
    small.configure(root, rounds=2, label=label, gate={"deploy": rules}, triggers={"all": ["label.answers > 12"]})
    assert loop.run() == "a trigger for round 2: label.answers > 12 (label.answers = 12)"
    small.configure(root, rounds=2, label=label, gate={"deploy": rules}, triggers={"any": ["label.answers == 12"]})
    assert loop.run(until="drift") is None
    assert len(loop.metadata.rounds()) == 3


def test_a_batch_is_exported_and_its_labels_are_imported(
    small: Any, waiting_loop: Any, fill: Callable[..., Path], tmp_path: Path
) -> None:
    loop, root = waiting_loop, waiting_loop.root
    small.configure(root, rounds=2, label={"annotator": "people"})
    config = load_config(root)
    out = tmp_path / "batch.csv"
    assert export_batch(loop.store, config, out) == 12
    assert out.read_bytes() == (root / "labels" / "round-1.csv").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        export_batch(loop.store, config, out)
    with pytest.raises(UserError, match="no such folder"):
        export_batch(loop.store, config, tmp_path / "none" / "batch.csv")
    assert import_batch(loop.store, config, fill(out, count=3)) == (3, 12)
    assert "3 of 12" in loop.run()
    assert import_batch(loop.store, config, fill(out)) == (12, 12)
    assert "round 2" in loop.run()
    assert len(loop.labelled_inputs(1)) == 12
    # The second batch comes with the champion's answers.
    export_batch(loop.store, config, tmp_path / "second.csv")
    with (tmp_path / "second.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["suggestion"] in small.labels for row in rows)
    assert not {row["id"] for row in rows} & set(loop.labelled_inputs(1))
    with pytest.raises(UserError, match="no record of the batch has the id"):
        import_batch(loop.store, config, out)


def test_export_and_import_need_a_waiting_round(
    small: Any, open_loop: Open, finished_copy: Path, tmp_path: Path
) -> None:
    for root in (small(), finished_copy):
        loop, config = open_loop(root), load_config(root)
        with pytest.raises(UserError, match="no round waits for labels"):
            export_batch(loop.store, config, tmp_path / "batch.csv")
        with pytest.raises(UserError, match="no round waits for labels"):
            import_batch(loop.store, config, tmp_path / "batch.csv")


def test_an_import_replaces_a_filled_file_with_a_wrong_label(
    waiting_loop: Any, fill: Callable[..., Path], tmp_path: Path
) -> None:
    loop, root = waiting_loop, waiting_loop.root
    batch = root / "labels" / "round-1.csv"
    right = fill(batch, tmp_path / "right.csv")
    batch.write_text(right.read_text().replace(",card", ",crad", 1))
    with pytest.raises(UserError, match=r"labels/round-1.csv:\d+: label `crad` .*did you mean `card`"):
        loop.run()
    assert loop.status["rounds"][1]["status"] == "waiting"
    assert "fill the label column" in loop.status["waiting"]
    assert import_batch(loop.store, load_config(root), right) == (12, 12)
    assert loop.run(until="label") is None
    assert loop.status["waiting"] is None


def test_a_resumed_round_no_longer_waits(
    waiting_loop: Any, fill: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, root = waiting_loop, waiting_loop.root
    fill(root / "labels" / "round-1.csv")
    waiting_during_training = []

    def train(*arguments: Any) -> Any:
        waiting_during_training.append(loop.status["waiting"])
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.loop.stages.train.Train.execute", train)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert waiting_during_training == [None]


def test_an_exported_batch_does_not_change(small: Any, waiting_loop: Any, fill: Callable[..., Path]) -> None:
    loop, root = waiting_loop, waiting_loop.root
    batch = root / "labels" / "round-1.csv"
    batch_before = batch.read_text()
    small.write(root / "data" / "pool" / "more.csv", small.rows()[80:90], ["text"])
    small.configure(root, rounds=1, label={"annotator": "people", "per_round": 5}, select={"strategy": "random"})
    assert "0 of 12 are filled" in loop.run()
    fill(batch)
    # Stopped after the labels were read, and with new inputs: still the same batch.
    loop.run(until="dataset")
    assert loop.status["waiting"] is None
    small.write(root / "data" / "pool" / "again.csv", small.rows()[90:95], ["text"])
    loop.run(until="dataset")
    assert [row.split(",")[0] for row in batch_before.splitlines()] == [
        row.split(",")[0] for row in batch.read_text().splitlines()
    ]
    assert len(loop.labelled_inputs(1)) == 12
    assert loop.status["rounds"][1]["labels"] == 12


def test_labelled_records_alone_start_a_round(small: Any, open_loop: Open) -> None:
    root = small(rounds=5, train={"epochs": 1}, data={"pool": [], "labelled": ["labelled.csv"]})
    small.write(root / "labelled.csv", small.rows()[:20])
    loop = open_loop(root)
    waits = "new inputs or labels: there is no pool, and all labels are used (posttrain data add FILE)"
    assert loop.run() == waits
    assert [entry.status for entry in loop.metadata.rounds()] == ["done", "done", "waiting"]
    assert loop.status["waiting"] == waits
    assert loop.run() == waits
    small.write(root / "data" / "labelled" / "more.csv", small.rows()[20:30])
    assert loop.run(until="dataset") is None
    assert [entry.detail.get("labels") for entry in loop.metadata.rounds()] == [20, 20, 30]


def test_a_trigger_waits_for_new_records(small: Any, begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(triggers={"any": ["new_records >= 10", "urgent"]})
    root = loop.root
    waits = "a trigger for round 1: new_records >= 10 (new_records = 0); urgent (urgent = 0)"
    assert loop.run() == waits
    assert loop.status["waiting"] == waits
    assert loop.run() == waits
    assert len(loop.metadata.rounds()) == 1
    small.write(root / "data" / "pool" / "a.csv", small.rows()[80:89], ["text"])
    assert "new_records = 9" in loop.run()
    small.write(root / "data" / "pool" / "b.csv", small.rows()[85:90], ["text"])
    # Round 1 starts; its records do not start round 2.
    assert loop.run() == waits.replace("round 1", "round 2")
    assert [entry.status for entry in loop.metadata.rounds()] == ["done", "done"]
    assert "waits_for" not in loop.metadata.rounds()[0].detail or loop.metadata.rounds()[0].detail["waits_for"] is None


def test_an_urgent_run_needs_a_rule_that_names_it(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(triggers={"all": ["new_records >= 10"]})
    assert loop.run(urgent=True) is not None
    assert len(loop.metadata.rounds()) == 1


def test_new_labels_start_a_round(small: Any, begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(rounds=1, triggers={"all": ["new_labels >= 5"]}, data={"labelled": ["labelled.csv"]})
    small.write(loop.root / "labelled.csv", small.rows()[80:84])
    assert "new_labels = 4" in loop.run()
    small.write(loop.root / "data" / "labelled" / "more.csv", small.rows()[82:89])
    assert loop.run(until="dataset") is None
    assert loop.metadata.rounds()[1].detail["labels"] == 9 + 12


def test_a_trigger_measures_days_since_training(small: Any, copied_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = copied_loop
    small.configure(loop.root, rounds=3, triggers={"all": ["days_since_training > 7"]})
    assert "round 3: days_since_training > 7 (days_since_training = " in loop.run()

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
            return cls.fromtimestamp(datetime.datetime.now(tz).timestamp() + 8 * 86400, tz)

    monkeypatch.setattr("posttrain.loop.history.datetime", Later)
    assert loop.run(until="drift") is None
    assert len(loop.metadata.rounds()) == 4


def test_degradation_is_measured_on_the_current_test_set_after_an_urgent_round(
    small: Any, begun_loop: Callable[..., Any]
) -> None:
    train = {"epochs": 12, "learning_rate": 4.0e-3, "precision": "float32"}
    loop = begun_loop(train=train, label={"per_round": 30}, triggers={"any": ["degradation > 0.2", "urgent"]})
    waits = loop.run(urgent=True)
    assert "trigger for round 2: degradation > 0.2 (degradation = 0)" in waits, "one round is urgent"
    assert loop.metadata.rounds()[1].detail["metrics"]["accuracy"] >= 0.8
    # The labels of all test records change.
    relabelled_rows = [
        {**row, "label": small.labels[(small.labels.index(row["label"]) + 1) % 4]} for row in small.rows()
    ]
    small.write(loop.root / "test.csv", relabelled_rows[60:80])
    assert loop.run(until="drift") is None
    assert len(loop.metadata.rounds()) == 3


def test_a_candidate_of_an_open_round_may_be_promoted_by_hand(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    from posttrain.loop.model_registry import ModelRegistry

    loop = evaluated_loop()
    orphan = loop.metadata.runs(stage="train")[-1].output
    small.configure(loop.root, rounds=4, triggers={"all": ["degradation > 0.5"]})
    assert "round 4" in loop.run()
    ModelRegistry(loop.store).promote(orphan, round=None)
    assert "degradation = 0)" in loop.run()
    assert loop.status["champion"]["id"] == orphan
    assert loop.status["champion"]["metrics"] == {}


def test_a_round_takes_up_what_people_answered_on_the_pages(waiting_loop: Any, small: Any) -> None:
    """Ten items answered through the queue, one dropped and one decided in review."""
    loop = waiting_loop
    truth = {row["text"]: row["label"] for row in small.rows()}
    queue = Queue(loop.store.metadata)
    task = queue.next("anna")
    assert task is not None
    assert (task.batch, task.labels, task.suggestion) == ("round-1", list(small.labels), None)
    assert task.reason
    queue.drop(task.item, "root")
    flagged = queue.next("anna")
    assert flagged is not None
    queue.flag(flagged.item, "anna", "no sense")
    while (task := queue.next("anna")) is not None:
        queue.answer(task.item, "anna", truth[task.content["prompt"][-1]["content"]])
    assert "11 of 12 are decided, 1 item is in review" in loop.run()
    queue.resolve(flagged.item, "root", truth[flagged.content["prompt"][-1]["content"]])
    small.configure(loop.root, rounds=2, label={"annotator": "people", "per_round": 12})
    assert "round 2" in loop.run()
    # The dropped record is not selected again.
    second = {item.record for item in queue.items("round-2")}
    assert len(second) == 12
    assert not second & {item.record for item in queue.items("round-1")}
    scores = [run for run in loop.store.metadata.runs(stage="score") if run.round == 2]
    assert scores[-1].config["dropped"] == [item.record for item in queue.items("round-1", "dropped")]
    (report,) = label_reports(loop.store)
    assert (report["labels"], report["dropped"], report["annotators"]) == (11, 1, {"anna": 10, "root": 1})
    assert queue.batches("done")[0].name == "round-1"
    assert len(loop.labelled_inputs(1)) == 11


def test_a_round_asks_for_no_labels_where_none_are_wanted(small: Any, begun_loop: Callable[..., Any]) -> None:
    label = {"annotator": "people", "file": None, "per_round": 0}
    loop = begun_loop(rounds=2, label=label, train={"epochs": 1}, data={"labelled": ["labelled.csv"]})
    small.write(loop.root / "labelled.csv", small.rows()[100:130])
    assert loop.run() == "new labels, as label.per_round is 0 (posttrain data add FILE --to labelled)"
    assert [entry.status for entry in loop.metadata.rounds()] == ["done", "done", "waiting"]
    assert len(loop.trained_on(1)) == 30
    assert not (loop.root / "labels").exists()
