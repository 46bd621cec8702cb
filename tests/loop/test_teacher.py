"""A teacher in the loop is identified by its content, not by its path."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow


def settings(teacher: str | None) -> dict[str, Any]:
    return {"objective": {"name": "distill", "teacher": teacher, "top_k": 4}, "epochs": 1}


def last_training(loop: Any) -> Any:
    """The run of the last training."""
    return [run for run in loop.metadata.runs(status="done") if run.stage == "train"][-1]


def test_a_teacher_is_identified_by_its_content(
    small: Any, begun_loop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = begun_loop()
    root = loop.root
    write_tiny_model(root / "teacher", seed=3)
    small.configure(root, rounds=1, train=settings("teacher"))
    monkeypatch.chdir(tmp_path)  # the path is relative to the workspace, not to the working directory
    loop.run(until="train")
    first = last_training(loop)
    teacher = loop.metadata.artifact(first.inputs["teacher"])
    assert teacher.kind == "teacher"
    weights = loop.store.artifacts.path(teacher.id) / "model.safetensors"
    assert weights.read_bytes() == (root / "teacher" / "model.safetensors").read_bytes()
    assert str(tmp_path) not in str(first.config)
    # Another one at the same path is another training, and the same one at another path is the same.
    shutil.rmtree(root / "teacher")
    write_tiny_model(root / "teacher", seed=4)
    loop.run(until="train")
    other = last_training(loop)
    assert other.inputs["teacher"] != first.inputs["teacher"]
    assert other.key != first.key
    write_tiny_model(root / "sub/folder", seed=3)
    small.configure(root, rounds=1, train=settings("./sub/folder"))
    loop.run(until="train")
    assert len(loop.metadata.runs(stage="train", status="done")) == 2


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (None, "train.objective.teacher: distillation needs a teacher"),
        ("nowhere", "train.objective.teacher: no folder `nowhere`"),
        (".", "is not a model: it holds no config.json"),
    ],
)
def test_a_missing_teacher_is_refused_before_any_work(small: Any, teacher: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(small(train=settings(teacher)))
