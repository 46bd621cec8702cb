"""What the paths of ``posttrain train`` are relative to, and what lies there."""

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
def places(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and all that it names, and the current folder beside it with the same names."""
    for parent, label in (("conf", "card"), ("here", "loan")):
        folder = tmp_path / parent
        folder.mkdir()
        for model in ("student", "teacher"):
            shutil.copytree(tiny_model, folder / model)
        rows = [{"prompt": f"{at} {label}", "completion": label} for at in range(4)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "labels.txt").write_text(f"{label}\nother\n", encoding="utf-8")
    config = {
        "model": "student",
        "data": "data.jsonl",
        "task": {"labels": "labels.txt"},
        "train": {"objective": "distill", "distill": {"teacher": "teacher"}, "epochs": 1},
    }
    (tmp_path / "conf" / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_paths_of_a_config_are_relative_to_its_folder(places: Path) -> None:
    conf, here = places / "conf", places / "here"
    result = read_settings(Path("../conf/config.yaml"), {}, [])
    assert (result.model, result.data) == (str(conf / "student"), str(conf / "data.jsonl"))
    assert result.train.distill.teacher == str(conf / "teacher")
    assert result.task.labels == ["card", "other"]
    changes = ["train.distill={teacher: teacher}", "task.labels=labels.txt", "data=data.jsonl"]
    result = read_settings(Path("../conf/config.yaml"), {"model": "student"}, changes)
    assert (result.model, result.data) == (str(here / "student"), str(here / "data.jsonl"))
    assert result.train.distill.teacher == str(here / "teacher")
    assert result.task.labels == ["loan", "other"]


def test_who_is_wrong_is_named(places: Path, posttrain: Call) -> None:
    arguments = ("train", "--config", "../conf/config.yaml", "--out", "out")
    assert posttrain(*arguments, "--set", "train.learning_rate=-1").mistake.startswith("--set: `train.learning_rate`")
    file = places / "conf" / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("epochs: 1", "epochs: 0"), encoding="utf-8")
    assert posttrain(*arguments).mistake.startswith("../conf/config.yaml: `train.epochs`")


def test_what_has_no_path_keeps_its_name(places: Path) -> None:
    for model, data in (("tiny", "train@v2"), ("smollm2-135m", "train"), ("somebody/something", "dataset-12ab")):
        result = read_settings(Path("../conf/config.yaml"), {"model": model, "data": data}, ["train.objective=sft"])
        assert (result.model, result.data) == (model, data)


def test_what_is_not_in_the_configs_folder_is_not_looked_for_elsewhere(places: Path, posttrain: Call) -> None:
    for name, says in (
        ("labels.txt", "task.labels: no such file: labels.txt"),
        ("data.jsonl", "conf/data.jsonl: there is no such file"),
        ("teacher", "train.distill.teacher: no folder `teacher`"),
        ("student", "model: `student` is no model"),
    ):
        (places / "conf" / name).rename(places / "conf" / "away")
        assert says in posttrain("train", "--config", "../conf/config.yaml", "--out", "out").mistake
        (places / "conf" / "away").rename(places / "conf" / name)
    assert not Path("out").exists()


def test_its_own_config_does_it_again_from_anywhere(places: Path, posttrain: Call) -> None:
    assert posttrain("train", "--config", "../conf/config.yaml", "--out", "out").code == 0
    os.chdir(places)
    assert posttrain("train", "--config", "here/out/config.yaml", "--out", "twin").code == 0
    models = [(places / out / "model.safetensors").read_bytes() for out in ("here/out", "twin")]
    assert models[0] == models[1]
    again = posttrain("train", "--config", "conf/config.yaml", "--out", "here/out")
    assert "is done" in again.err, "the same files, otherwise spelled"


@pytest.mark.parametrize("what", ["teacher", "student", "data.jsonl"])
def test_other_content_under_the_same_path_is_noticed(places: Path, posttrain: Call, what: str) -> None:
    arguments = ("train", "--config", "../conf/config.yaml", "--out", "out")
    assert posttrain(*arguments).code == 0
    path = places / "conf" / what
    path = path if path.is_file() else path / "generation_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("card", "cash") + "\n", encoding="utf-8")
    name = {"student": "model", "data.jsonl": "data"}.get(what, what)
    assert (
        f"begun otherwise: the content of the {name} has changed; name another --out" in posttrain(*arguments).mistake
    )


def test_another_label_of_the_same_answers_is_noticed(tmp_path: Path, posttrain: Call) -> None:
    data = tmp_path / "data.jsonl"
    arguments = ("train", "--model", "tiny", "--data", data, "--objective", "kto", "--set", "train.epochs=1")
    for desirable, code in ((True, 0), (False, 2)):
        rows = [{"prompt": f"{at}", "completion": "x", "label": desirable} for at in range(4)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        ended = posttrain(*arguments, "--out", tmp_path / "out")
        assert ended.code == code, ended
    assert "the content of the data has changed" in ended.mistake
