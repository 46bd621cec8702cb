"""``posttrain select explain``, for records of the test set, of the training set and of the pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.cli.main import main

pytestmark = pytest.mark.slow

Call = Callable[..., Any]

ODD = "zebra umbrella quartz"


@pytest.fixture(scope="module")
def trained_workspace(request: Any, small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose training set holds a near copy of one test record, unlike all others."""
    make = small_anywhere(tmp_path_factory.mktemp("trained_workspace"))
    train = {"full": {}, "lora": {"method": "lora", "learning_rate": 2e-2}}[request.param]
    root: Path = make(
        data={"pool": [], "labelled": ["labelled.csv"]}, rounds=1, train={**train, "epochs": 8, "batch_size": 8}
    )
    rows = make.rows()
    make.write(root / "labelled.csv", [*rows[:30], {"text": f"{ODD} today", "label": "loan"}])
    make.write(root / "test.csv", [*rows[60:68], {"text": ODD, "label": "loan"}])
    with pytest.raises(SystemExit, match="0"):
        main(["run", "-w", str(root)])
    return root


@pytest.fixture
def records(posttrain: Call) -> Callable[[Path, int, str], list[dict[str, Any]]]:
    """``records(workspace, round, set)``: the records of the round's pool, test set or dataset."""

    def read_records(root: Path, round: int, name: str) -> list[dict[str, Any]]:
        id = posttrain("show", str(round), "-w", root, "--json").json["detail"][name]
        rows: list[dict[str, Any]] = parquet.read_table(
            root / ".posttrain" / "artifacts" / id / "records.parquet"
        ).to_pylist()
        return rows

    return read_records


@pytest.mark.parametrize("trained_workspace", ["full", "lora"], indirect=True, scope="module")
def test_a_near_copy_of_a_test_record_has_the_most_influence_on_its_answer(
    trained_workspace: Path, posttrain: Call, records: Any
) -> None:
    record = next(row for row in records(trained_workspace, 1, "test") if row["prompt"][0]["content"] == ODD)
    result = posttrain("select", "explain", "-w", trained_workspace, record["id"], "--json").json
    assert result["kind"] == "evaluated"
    assert result["prediction"]["expected"] == "loan"
    side = "towards" if result["prediction"]["predicted"] == "loan" else "against"
    assert result[side][0]["input"] == f"{ODD} today"
    assert result["looked_at"] == result["training"] == 31


@pytest.mark.parametrize("trained_workspace", ["lora"], indirect=True, scope="module")
def test_the_influence_of_records_is_printed(trained_workspace: Path, posttrain: Call, records: Any) -> None:
    record = next(row for row in records(trained_workspace, 1, "test") if row["prompt"][0]["content"] == ODD)
    command = ["select", "explain", "-w", trained_workspace, record["id"][:10]]
    result = posttrain(*command, "--json").json
    output = posttrain(*command).out
    assert f"the champion answers `{result['prediction']['predicted']}`" in output
    assert f"{ODD} today" in output
    assert result["parameters"] in output


@pytest.mark.parametrize("trained_workspace", ["lora"], indirect=True, scope="module")
def test_among_limits_the_records_to_the_most_similar(trained_workspace: Path, posttrain: Call, records: Any) -> None:
    record = next(row for row in records(trained_workspace, 1, "test") if row["prompt"][0]["content"] == ODD)
    command = ["select", "explain", "-w", trained_workspace, record["id"], "--among", "4", "--n", "4"]
    result = posttrain(*command, "--json").json
    influences = result["towards"] + result["against"]
    assert result["looked_at"] == len(influences) == 4
    assert f"{ODD} today" in {row["input"] for row in influences}
    assert sum(abs(row["share"]) for row in influences) == pytest.approx(1)


def test_a_training_record_is_explained_by_its_rounds(finished_copy: Path, posttrain: Call, records: Any) -> None:
    rows = records(finished_copy, 2, "dataset")
    first, last = (
        posttrain("select", "explain", "-w", finished_copy, row["id"], "--json").json for row in rows[:: len(rows) - 1]
    )
    for result, row, round in ((first, rows[0], 1), (last, rows[-1], 2)):
        assert result["kind"] == "training"
        assert result["since"] == round
        assert result["labelled_by"]["annotator"] == "oracle"
        assert result["labelled_by"]["round"] == round
        entry = result["rounds"][-1]
        assert entry["round"] == round
        assert entry["labelled"]["label"] == row["completion"]
        assert entry["chosen"]["rank"] in range(1, 13)
    assert first["rounds"][0]["chosen"]["reason"] == "cold_start"
    assert last["rounds"][0]["chosen"] is None
    assert "labelled `" in posttrain("select", "explain", "-w", finished_copy, rows[0]["id"]).out


def test_a_pool_record_is_explained_by_its_scores_and_neighbours(
    finished_copy: Path, posttrain: Call, records: Any
) -> None:
    training_inputs = {row["input_id"] for row in records(finished_copy, 2, "dataset")}
    row = next(row for row in records(finished_copy, 2, "pool") if row["input_id"] not in training_inputs)
    result = posttrain("select", "explain", "-w", finished_copy, row["id"], "--json").json
    assert result["kind"] == "pool"
    assert [entry["round"] for entry in result["rounds"]] == [1, 2]
    assert [entry["chosen"] for entry in result["rounds"]] == [None, None]
    detail = posttrain("show", "2", "-w", finished_copy, "--json").json["detail"]
    table = parquet.read_table(finished_copy / ".posttrain" / "artifacts" / detail["scores"] / "scores.parquet")
    scores = next(entry for entry in table.to_pylist() if entry["id"] == row["id"])
    assert result["rounds"][1]["scores"]["entropy"] == scores["entropy"]
    assert result["rounds"][1]["scores"]["predicted"] == scores["predicted"]
    similarities = [entry["similarity"] for entry in result["nearest"]]
    assert len(similarities) == 5
    assert similarities == sorted(similarities, reverse=True)
    assert {entry["id"] for entry in result["nearest"]} <= {
        entry["id"] for entry in records(finished_copy, 2, "dataset")
    }
    assert "labelled records nearest to it" in posttrain("select", "explain", "-w", finished_copy, row["id"]).out


def test_unusable_arguments_of_explain_are_refused_in_one_line(
    finished_copy: Path, small: Any, posttrain: Call, records: Any
) -> None:
    def explain(*arguments: str, root: Path = finished_copy) -> str:
        mistake: str = posttrain("select", "explain", "-w", root, *arguments).mistake
        return mistake

    ids = sorted(row["id"] for row in records(finished_copy, 2, "pool"))
    assert "no record here is called `ffffffff0000`" in explain("ffffffff0000")
    assert "is too short" in explain(ids[0][:3])
    root = small("new")
    assert "there is no champion yet" in explain(ids[0], root=root)
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
    test = records(root, 0, "test")[0]["id"]
    assert "the champion is the base model" in explain(test, root=root)


def test_an_ambiguous_prefix_is_refused(finished_copy: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.inspect.explanation._MIN_PREFIX", 1)
    outcomes = (posttrain("select", "explain", "-w", finished_copy, digit) for digit in "0123456789abcdef")
    assert any("could be records of" in outcome.mistake for outcome in outcomes if outcome.code == 2)
