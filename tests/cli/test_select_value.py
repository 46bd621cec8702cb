"""``posttrain select value``, on files and on the labels of the loop, and the use of its output."""

import csv
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as parquet
import pytest
import yaml

pytestmark = pytest.mark.slow

Call = Callable[..., Any]

COLUMNS = ["--column", "prompt=text", "--column", "completion=label"]


def test_wrong_labels_have_the_worst_values(small: Any, posttrain: Call, tmp_path: Path) -> None:
    rows = small.rows()
    wrong = [5, 40, 77, 120, 150]
    for row in wrong:
        rows[row]["label"] = small.labels[(small.labels.index(rows[row]["label"]) + 1) % 4]
    small.write(tmp_path / "noisy.csv", rows)
    out = tmp_path / "values.csv"
    result = posttrain("select", "value", tmp_path / "noisy.csv", *COLUMNS, "--worst", "5", "--out", out, "--json").json
    assert {row["line"] - 2 for row in result["worst"]} == set(wrong)
    assert all(row["weight"] < 0.1 for row in result["worst"])
    assert sum(row["harmful"] for row in result["worst"]) >= 3
    assert result["harmful"] == len([row for row in csv.DictReader(out.open()) if row["harmful"] == "true"])
    value_rows = list(csv.DictReader(out.open()))
    assert len(value_rows) == len(rows)
    assert [row["id"] for row in value_rows[:5]] == [row["id"] for row in result["worst"]]
    assert "no test record" in result["advice"][0]
    # The file of values can be read as data with weights.
    again = posttrain("select", "value", out, "--column", "prompt=input", "--column", "completion=label", "--json").json
    assert again["worst"][0]["id"] == result["worst"][0]["id"]


def test_each_source_and_each_label_has_a_value(small: Any, posttrain: Call, tmp_path: Path) -> None:
    rows = small.rows()
    for number, row in enumerate(rows[84:]):
        row["label"] = small.labels[number % 4]
    small.write(tmp_path / "good.csv", rows[:84])
    small.write(tmp_path / "noise.csv", rows[84:])
    files = [tmp_path / "good.csv", tmp_path / "noise.csv"]
    output = posttrain("select", "value", *files, *COLUMNS, "--by", "source", "--json").json
    assert output["folds"] == 10
    assert "measured on each of 10 parts of the records in turn" in output["advice"][0]
    worst = output["worst"]
    assert [Path(row["name"]).name for row in worst] == ["noise.csv", "good.csv"]
    assert [row["records"] for row in worst] == [84, 84]
    assert worst[1]["total"] == pytest.approx(84 * worst[1]["value"])
    labels = posttrain("select", "value", *files, *COLUMNS, "--by", "label", "--json").json
    assert {row["name"] for row in labels["worst"]} == set(small.labels)


def test_only_the_labels_of_the_loop_are_valued_and_the_result_is_cached(finished_copy: Path, posttrain: Call) -> None:
    command = ["select", "value", "-w", finished_copy, "--worst", "100", "--json"]
    result = posttrain(*command).json
    sources = {row["source"] for row in result["worst"]}
    assert result["valued"] == len(result["worst"]) == 24
    assert sources == {"pool.csv"}
    before = set((finished_copy / ".posttrain" / "artifacts").iterdir())
    assert posttrain(*command).json == result
    assert set((finished_copy / ".posttrain" / "artifacts").iterdir()) == before


SLOW = ["--method", "tmc_shapley", "--draws", "60", "--folds", "3", "--worst", "100", "--json"]


def kill_after_blocks(command: list[str], scratch: Path, folder: Path) -> set[Path]:
    """Kill a call in the folder once it has written three blocks; returns the blocks."""
    process = forked.start(command, folder, folder / "killed.log")
    while len(block_files(scratch)) < 3 and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, (folder / "killed.log").read_text()
    return block_files(scratch)


def block_files(scratch: Path) -> set[Path]:
    """Returns the blocks below the folder."""
    # `rglob` fails on a folder that the other process removes meanwhile; `os.walk` passes over it.
    return {Path(folder, name) for folder, _, names in os.walk(scratch) for name in names if name.endswith(".block")}


@pytest.fixture
def written_blocks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The blocks that this process writes."""
    from posttrain.store import files

    paths: list[Path] = []
    write = files.write_atomically
    monkeypatch.setattr(files, "write_atomically", lambda path, content: (paths.append(path), write(path, content)))
    return paths


def test_a_killed_call_resumes(
    finished_copy: Path, posttrain: Call, tmp_path: Path, written_blocks: list[Path]
) -> None:
    reference = Path(shutil.copytree(finished_copy, tmp_path / "other", symlinks=True))
    scratch = finished_copy / ".posttrain" / "scratch"
    finished_blocks = kill_after_blocks(["select", "value", "-w", str(finished_copy), *SLOW], scratch, tmp_path)
    resumed = posttrain("select", "value", "-w", finished_copy, *SLOW).json
    assert written_blocks
    assert not finished_blocks & set(written_blocks)
    assert not block_files(scratch)
    assert resumed == posttrain("select", "value", "-w", reference, *SLOW).json


def test_a_killed_call_on_files_resumes_from_blocks_beside_its_output(
    small: Any, posttrain: Call, tmp_path: Path, written_blocks: list[Path]
) -> None:
    small.write(tmp_path / "answers.csv", small.rows()[:40])
    command = ["select", "value", str(tmp_path / "answers.csv"), *COLUMNS, *SLOW, "--out"]
    scratch = tmp_path / "values.csv.unfinished"
    finished_blocks = kill_after_blocks([*command, str(tmp_path / "values.csv")], scratch, tmp_path)
    resumed = posttrain(*command, tmp_path / "values.csv").json
    assert written_blocks
    assert not finished_blocks & set(written_blocks)
    assert not scratch.exists()
    assert resumed["worst"] == posttrain(*command, tmp_path / "other.csv").json["worst"]
    assert (tmp_path / "values.csv").read_bytes() == (tmp_path / "other.csv").read_bytes()


def test_harmful_records_are_dropped_from_training_and_not_selected_again(finished_copy: Path, posttrain: Call) -> None:
    names = ["id", "input_id", "harmful"]
    worst = posttrain("select", "value", "-w", finished_copy, "--json").json["worst"]
    with (finished_copy / "values.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(
            {**{name: row[name] for name in names[:2]}, "harmful": number < 2} for number, row in enumerate(worst)
        )
    config = yaml.safe_load((finished_copy / "posttrain.yaml").read_text())
    config["data"]["steps"].insert(0, {"drop": {"file": "values.csv"}})
    config["rounds"] = 3
    (finished_copy / "posttrain.yaml").write_text(yaml.safe_dump(config))
    assert posttrain("run", "-w", finished_copy).code == 0
    round_3 = posttrain("show", "3", "-w", finished_copy, "--json").json["detail"]
    artifacts = finished_copy / ".posttrain" / "artifacts"
    dropped = {row["input_id"] for row in worst[:2]}
    train = parquet.read_table(artifacts / round_3["dataset"] / "records.parquet")
    assert len(train) == 24 - 2 + 12
    assert not dropped & set(train["input_id"].to_pylist())
    assert not dropped & set(
        parquet.read_table(artifacts / round_3["pool"] / "records.parquet")["input_id"].to_pylist()
    )
    removed = parquet.read_table(artifacts / round_3["dataset"] / "rejected.parquet").to_pylist()
    assert {(row["step"], row["reason"], row["input_id"]) for row in removed} == {
        ("drop", "named", id) for id in dropped
    }
    # Changed content of the same file counts as other data.
    text = (finished_copy / "values.csv").read_text().replace("True", "False")
    (finished_copy / "values.csv").write_text(text)
    assert posttrain("run", "-w", finished_copy, "--rounds", "4", "--until", "collect").code == 0
    pool = posttrain("show", "4", "-w", finished_copy, "--json").json["detail"]["pool"]
    assert dropped <= set(parquet.read_table(artifacts / pool / "records.parquet")["input_id"].to_pylist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "knn_shaply"], "--method: no method `knn_shaply`; did you mean `knn_shapley`?"),
        (["--by", "file"], "--by: nothing is valued by `file`"),
        (["--draws", "5"], "knn_shapley draws nothing at random"),
        (["--method", "banzhaf"], "--method: no method `banzhaf`"),
        (["--method", "data_oob", "--folds", "5"], "data_oob holds nothing out"),
        (["--out", "values.xls"], "`.xls` is not a supported format"),
        (["--out", "nowhere/values.csv"], "there is no such folder"),
        (["nothing.csv"], "nothing.csv"),
    ],
)
def test_unusable_arguments_of_value_are_refused_in_one_line(
    small: Any, posttrain: Call, arguments: list[str], message: str
) -> None:
    answers = small() / "answers.csv"
    assert message in posttrain("select", "value", answers, *COLUMNS, *arguments).mistake


def test_free_text_answers_are_refused(posttrain: Call, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(8)]
    (tmp_path / "open.jsonl").write_text("".join(json.dumps(row) + os.linesep for row in rows))
    assert "no label stands with two different inputs" in posttrain("select", "value", tmp_path / "open.jsonl").mistake


def test_values_need_a_run_and_labels(small: Any, posttrain: Call) -> None:
    root = small()
    assert "nothing has run here yet" in posttrain("select", "value", "-w", root).mistake
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
    assert "nothing has been labelled here yet" in posttrain("select", "value", "-w", root).mistake
