"""The folders that the paths of ``posttrain train`` are relative to, and changes of the files there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli.train_options import read_settings

Call = Callable[..., Any]


@pytest.fixture
def two_folders(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and the files that it names, and the current folder with files of the same names."""
    for parent, label in (("conf", "card"), ("here", "loan")):
        folder = tmp_path / parent
        folder.mkdir()
        for model in ("student", "teacher"):
            shutil.copytree(tiny_model, folder / model)
        rows = [{"prompt": f"{number} {label}", "completion": label} for number in range(4)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "labels.txt").write_text(f"{label}\nother\n", encoding="utf-8")
    config = {
        "model": "student",
        "data": "data.jsonl",
        "task": {"labels": "labels.txt"},
        "train": {"objective": {"name": "distill", "teacher": "teacher"}, "epochs": 1},
    }
    (tmp_path / "conf" / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_paths_of_a_config_are_relative_to_its_folder(two_folders: Path) -> None:
    conf, here = two_folders / "conf", two_folders / "here"
    result = read_settings(Path("../conf/config.yaml"), {}, [])
    assert (result.model, result.data) == (str(conf / "student"), str(conf / "data.jsonl"))
    assert result.train.teacher == str(conf / "teacher")
    assert result.task.labels == ["card", "other"]
    changes = ["train.objective.teacher=teacher", "task.labels=labels.txt", "data=data.jsonl"]
    result = read_settings(Path("../conf/config.yaml"), {"model": "student"}, changes)
    assert (result.model, result.data) == (str(here / "student"), str(here / "data.jsonl"))
    assert result.train.teacher == str(here / "teacher")
    assert result.task.labels == ["loan", "other"]


def test_a_wrong_value_names_the_option_or_the_config(two_folders: Path, posttrain: Call) -> None:
    arguments = ("train", "--config", "../conf/config.yaml", "--out", "out")
    assert posttrain(*arguments, "--set", "train.learning_rate=-1").mistake.startswith("--set: `train.learning_rate`")
    file = two_folders / "conf" / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("epochs: 1", "epochs: 0"), encoding="utf-8")
    assert posttrain(*arguments).mistake.startswith("../conf/config.yaml:6: `train.epochs`")


def test_names_that_are_no_paths_stay_unchanged(two_folders: Path) -> None:
    for model, data in (("tiny", "train@v2"), ("smollm2-135m", "train"), ("somebody/something", "dataset-12ab")):
        result = read_settings(Path("../conf/config.yaml"), {"model": model, "data": data}, ["train.objective=sft"])
        assert (result.model, result.data) == (model, data)


def test_files_are_searched_only_in_the_configs_folder(two_folders: Path, posttrain: Call) -> None:
    for name, message in (
        ("labels.txt", "task.labels: no such file: labels.txt"),
        ("data.jsonl", "conf/data.jsonl: there is no such file"),
        ("teacher", "train.objective.teacher: no folder `teacher`"),
        ("student", "model: `student` is not a model"),
    ):
        (two_folders / "conf" / name).rename(two_folders / "conf" / "away")
        assert message in posttrain("train", "--config", "../conf/config.yaml", "--out", "out").mistake
        (two_folders / "conf" / "away").rename(two_folders / "conf" / name)
    assert not Path("out").exists()


@pytest.mark.slow
def test_the_written_config_repeats_the_training_from_any_folder(two_folders: Path, posttrain: Call) -> None:
    assert posttrain("train", "--config", "../conf/config.yaml", "--out", "out").code == 0
    os.chdir(two_folders)
    assert posttrain("train", "--config", "here/out/config.yaml", "--out", "twin").code == 0
    models = [(two_folders / out / "model.safetensors").read_bytes() for out in ("here/out", "twin")]
    assert models[0] == models[1]
    again = posttrain("train", "--config", "conf/config.yaml", "--out", "here/out")
    assert "is done" in again.err, "the same files by other paths"


@pytest.mark.parametrize("file", ["teacher", "student", "data.jsonl"])
def test_changed_content_at_the_same_path_is_refused(two_folders: Path, posttrain: Call, file: str) -> None:
    arguments = ("train", "--config", "../conf/config.yaml", "--out", "out")
    assert posttrain(*arguments).code == 0
    path = two_folders / "conf" / file
    path = path if path.is_file() else path / "generation_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("card", "cash") + "\n", encoding="utf-8")
    name = {"student": "model", "data.jsonl": "data"}.get(file, file)
    assert (
        f"began with other settings: the content of the {name} has changed; name another --out"
        in posttrain(*arguments).mistake
    )


@pytest.mark.slow
def test_changed_labels_of_the_same_answers_are_refused(tmp_path: Path, posttrain: Call) -> None:
    data = tmp_path / "data.jsonl"
    arguments = ("train", "--model", "tiny", "--data", data, "--objective", "kto", "--set", "train.epochs=1")
    for desirable, code in ((True, 0), (False, 2)):
        rows = [{"prompt": f"{number}", "completion": "x", "label": desirable} for number in range(4)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        outcome = posttrain(*arguments, "--out", tmp_path / "out")
        assert outcome.code == code, outcome
    assert "the content of the data has changed" in outcome.mistake
