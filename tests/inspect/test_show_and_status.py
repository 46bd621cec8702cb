"""The status of a loop, and the history of its models, records and rounds."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.versions.version import Version
from posttrain.inspect.preview import preview_selection
from posttrain.inspect.show import show
from posttrain.loop.config import load_config
from posttrain.loop.record import read_rounds
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.state import RoundState, save_state
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


def test_the_status_has_rounds_champion_and_times(finished_loop: Any) -> None:
    state = json.loads(json.dumps(finished_loop.status, allow_nan=False))
    assert state["round"] == state["rounds_wanted"] == 2
    assert state["waiting"] is None
    assert state["champion"].keys() >= {"id", "round", "metrics"}
    assert (state["champion"]["id"], state["champion"]["round"]) == (finished_loop.champion, 2)
    assert state["champion"]["metrics"] == state["rounds"][2]["metrics"]
    assert state["champion"]["metrics"]["accuracy"] == pytest.approx(state["rounds"][2]["metrics"]["accuracy"])
    assert [entry["round"] for entry in state["rounds"]] == [0, 1, 2]
    assert [entry["labels"] for entry in state["rounds"]] == [0, 12, 24]
    assert [entry["decision"] for entry in state["rounds"]] == ["baseline", "deploy", "deploy"]
    counts = [entry["batch"] and entry["batch"]["sentence"] for entry in state["rounds"]]
    assert counts == [None, "12 asked: 12 used", "12 asked: 12 used"]
    assert state["rollback"] is None
    for entry in state["rounds"]:
        assert entry["seconds"] > 0
        assert sum(entry["stages"].values()) <= entry["seconds"]
        assert entry["model_seconds"] <= sum(entry["stages"].values())
        # A stage runs several times in a round, such as the evaluations of candidate and champion.
        runs = finished_loop.metadata.runs(round=entry["round"], status="done")
        assert sum(entry["stages"].values()) == pytest.approx(sum(run.seconds for run in runs))


def test_the_status_of_a_new_workspace(small: Any, open_loop: Open) -> None:
    state = open_loop(small()).status
    stages = state.pop("stages")
    assert {(stage["state"], stage["seconds"]) for stage in stages} == {("open", 0)}
    assert [stage["name"] for stage in stages][:3] == ["collect", "fetch", "drift"]
    assert state == {
        "round": None,
        "rounds_wanted": 2,
        "champion": None,
        "canary": None,
        "waiting": None,
        "rounds": [],
        "final": None,
        "rollback": None,
        "working": False,
    }


def test_the_status_of_an_open_round(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop()
    loop.run(until="train")
    state = loop.status
    assert state["round"] == 1
    assert [entry["status"] for entry in state["rounds"]] == ["done", "open"]
    assert state["rounds"][1]["decision"] is None
    assert state["rounds"][1]["metrics"] == {}
    assert state["champion"]["round"] == 0
    states = {stage["name"]: stage["state"] for stage in state["stages"]}
    # The base model was fetched in round 0, whose work this round shares.
    assert states["collect"] == states["fetch"] == states["train"] == "done"
    assert states["evaluate"] == states["deploy"] == "open"


def test_a_stage_runs_only_while_a_process_holds_the_lock(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop()
    loop.run(until="drift")
    loop.metadata.start_run("train", "0" * 64, round=1)
    with loop.store.hold("loop", "busy"):
        loop.metadata.start_run("train", "1" * 64, round=1)
        assert {stage["name"]: stage["state"] for stage in loop.status["stages"]}["train"] == "running"
        assert loop.status["working"]
    assert {stage["name"]: stage["state"] for stage in loop.status["stages"]}["train"] == "failed"
    note = loop.store.home / "loop.lock.json"
    for text in (
        "",
        "[]",
        "{}",
        '{"pid": 1e99, "host": "x"}',
        json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename}),
    ):
        note.write_text(text)
        assert loop.status["working"] is (text == '{"pid": 1e99, "host": "x"}')


def test_the_champion_shows_its_training_records(finished_loop: Any, small: Any) -> None:
    result = show(finished_loop.store, "champion")
    assert result["type"] == "artifact"
    assert result["id"] == finished_loop.champion
    assert [entry["action"] for entry in result["deployments"]] == ["promote"]
    training_set = result["trained_on"]
    assert training_set["dataset"] == finished_loop.metadata.rounds()[2].detail["dataset"]
    assert {record["input_id"] for record in training_set["records"]} == {
        *finished_loop.labelled_inputs(1),
        *finished_loop.labelled_inputs(2),
    }
    pool = [row["text"] for row in small.rows()[:60]]
    truth = {row["text"]: row["label"] for row in small.rows()}
    for record in training_set["records"]:
        assert record["source"] == "pool.csv"
        # The line is that of the message in the file.
        text = pool[record["line"] - 2]
        assert truth[text] == record["completion"]
        assert record["meta"]["labelled_by"]["annotator"] == "oracle"
    stages = {relative["run"]["stage"] for relative in result["ancestors"] if relative["run"]}
    assert {"train", "dataset", "label", "select", "score", "collect pool", "fetch"} <= stages


def test_a_record_shows_the_models_trained_on_it(finished_loop: Any) -> None:
    models = [entry.candidate for entry in finished_loop.metadata.rounds()]
    for round, expected_models in ((1, models[1:]), (2, models[2:])):
        (pool_id,) = _pool_ids(finished_loop, finished_loop.labelled_inputs(round)[:1])
        for text in (
            finished_loop.labelled_inputs(round)[0],
            finished_loop.labelled_inputs(round)[0][:10],
            pool_id,
            pool_id[:10],
        ):
            result = show(finished_loop.store, text)
            assert result["type"] == "record"
            assert result["record"]["input_id"] == finished_loop.labelled_inputs(round)[0]
            assert result["record"]["completion"] is not None
            assert result["models"] == expected_models
            assert {entry["name"] for entry in result["in"]} == {"pool", "train"}


def test_of_several_answers_to_an_input_the_requested_one_is_shown(small: Any, begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(
        rounds=1, data={"labelled": ["more.csv"]}, task={"labels": None, "max_new_tokens": 4}, label={"per_round": 2}
    )
    text = small.rows()[0]["text"]
    small.write(loop.root / "more.csv", [{"text": text, "label": answer} for answer in ("cash", "a loan")])
    loop.run(1)
    labelled = loop.store.artifacts.path(loop.metadata.named("labelled")) / "records.parquet"
    import pyarrow.parquet as parquet

    for record in parquet.read_table(labelled).to_pylist():
        result = show(loop.store, record["id"])
        assert (result["record"]["id"], result["record"]["completion"]) == (record["id"], record["completion"])
        assert result["models"] == [loop.metadata.rounds()[1].candidate]


def test_an_unlabelled_record_has_no_models(finished_loop: Any) -> None:
    import pyarrow.parquet as parquet

    pool = finished_loop.metadata.rounds()[2].detail["pool"]
    inputs = parquet.read_table(finished_loop.store.artifacts.path(pool) / "records.parquet")["input_id"].to_pylist()
    unlabelled = next(
        input for input in inputs if input not in {*finished_loop.labelled_inputs(1), *finished_loop.labelled_inputs(2)}
    )
    result = show(finished_loop.store, unlabelled)
    assert result["models"] == []
    assert result["record"]["completion"] is None


def test_a_rejected_record_shows_its_step(small: Any, open_loop: Open) -> None:
    root = small(rounds=1)
    rows = small.rows()
    small.write(root / "pool.csv", [*rows[:60], rows[0]], ["text"])
    loop = open_loop(root)
    loop.run(0, until="collect")
    import pyarrow.parquet as parquet

    pool = loop.metadata.rounds()[0].detail["pool"]
    (rejected,) = parquet.read_table(loop.store.artifacts.path(pool) / "rejected.parquet").to_pylist()
    result = show(loop.store, rejected["id"])
    assert [(entry["name"], entry["step"]) for entry in result["rejected_from"]] == [("pool", rejected["step"])]


@pytest.mark.parametrize(
    ("text", "kind"),
    [("champion", "model"), ("pool@v1", "dataset"), ("train@v2", "dataset"), ("test@v1", "dataset")],
)
def test_names_and_versions_can_be_shown(finished_loop: Any, text: str, kind: str) -> None:
    result = show(finished_loop.store, text)
    assert (result["type"], result["kind"]) == ("artifact", kind)
    assert text in [*result["names"], "champion"]


def test_every_kind_of_artifact_every_stage_and_round_can_be_shown(finished_loop: Any) -> None:
    for row in {row.kind: row for row in finished_loop.metadata.artifacts()}.values():
        for text in (row.id, row.id.partition("-")[2]):
            result = show(finished_loop.store, text)
            assert (result["type"], result["id"]) == ("artifact", row.id)
            json.dumps(result)
    for run in {run.stage: run for run in finished_loop.metadata.runs()}.values():
        result = show(finished_loop.store, run.id)
        assert (result["type"], result["stage"], result["status"]) == ("run", run.stage, "done")
        json.dumps(result)
    for number, text in enumerate(("0", "round 1", "round2")):
        result = show(finished_loop.store, text)
        assert (result["type"], result["number"]) == ("round", number)
        json.dumps(result)


@pytest.mark.parametrize(
    "text", ["", "nothing", "model-", "7", "round 7", "²", "pool@v9", "deadbeefdeadbeef", "run-", "%", "round x"]
)
def test_unknown_texts_are_refused(finished_loop: Any, text: str) -> None:
    with pytest.raises(UserError):
        show(finished_loop.store, text)


def test_the_beginning_of_several_ids_is_refused(finished_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number:020x}" for number in range(2)]

    class Two:
        def tables(self, columns: list[str]) -> list[pa.Table]:
            return [pa.table(dict.fromkeys(columns, texts))]

        def rejected(self) -> list[pa.Table]:
            return []

    monkeypatch.setattr(Version, "open", lambda artifacts, id: Two())
    with pytest.raises(UserError, match="`00000000` could be records of 2 inputs; give more of the id"):
        show(finished_loop.store, "0" * 8)


def test_a_missing_champion_is_refused(small: Any, open_loop: Open) -> None:
    with pytest.raises(UserError, match="no champion yet; posttrain run"):
        show(open_loop(small()).store, "champion")


def test_the_next_round_labels_the_previewed_batch(small: Any, copied_loop: Any, open_loop: Open) -> None:
    new_root = small("new")
    with pytest.raises(UserError, match="no champion yet"):
        preview_selection(open_loop(new_root).store, load_config(new_root))
    loop, root = copied_loop, copied_loop.root
    before = loop.metadata.rounds(), loop.metadata.deployments()
    result = preview_selection(loop.store, load_config(root))
    chosen = result.records
    assert result.gain is not None
    assert result.gain.sentence.startswith("12 labels are expected to bring")
    assert (loop.metadata.rounds(), loop.metadata.deployments()) == before
    texts = {row["text"] for row in small.rows()[:60]}
    assert [row["rank"] for row in chosen] == list(range(1, 13))
    assert all(row["input"] in texts for row in chosen)
    runs_before = len(loop.stages())
    loop.run(3, until="label")
    assert {row["id"] for row in chosen} == set(_pool_ids(loop, loop.labelled_inputs(3)))
    assert {"3 score", "3 select"}.isdisjoint(loop.stages(after=runs_before)), (
        "the round reuses the work of the preview"
    )


def _pool_ids(loop: Any, inputs: list[str]) -> list[str]:
    import pyarrow.parquet as parquet

    pool = loop.metadata.rounds()[2].detail["pool"]
    table = parquet.read_table(loop.store.artifacts.path(pool) / "records.parquet", columns=["id", "input_id"])
    return [row["id"] for row in table.to_pylist() if row["input_id"] in inputs]


def test_a_round_that_was_measured_on_other_test_records_says_so(tmp_path: Path) -> None:
    with Workspace.create(tmp_path) as store:
        for number, test in enumerate(("dataset-a", "dataset-a", "dataset-b")):
            store.metadata.open_round(number, None)
            save_state(store.metadata, number, RoundState(test=test))
        lines = [list(map(str, Evaluate.report(record).lines)) for record in read_rounds(store).rounds]
    assert lines == [
        [],
        [],
        ["measured on other test records than round 1: the figures of both cannot be compared"],
    ]
