"""A teacher in the loop: which one it is counts, and not where it lies or how that is spelled."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


def settings(teacher: str | None) -> dict[str, Any]:
    return {"objective": "distill", "distill": {"teacher": teacher, "top_k": 4}, "epochs": 1}


def trained(loop: Any) -> Any:
    """The last training."""
    return [run for run in loop.metadata.runs(status="done") if run.stage == "train"][-1]


def test_a_teacher_is_identified_by_its_content(
    small: Any, open_loop: Open, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small(rounds=1, train=settings("teacher"))
    write_tiny_model(root / "teacher", seed=3)
    monkeypatch.chdir(tmp_path)  # relative to the workspace, wherever one is
    loop = open_loop(root)
    loop.run()
    first = trained(loop)
    teacher = loop.metadata.artifact(first.inputs["teacher"])
    assert teacher.kind == "teacher"
    kept = loop.store.artifacts.path(teacher.id) / "model.safetensors"
    assert kept.read_bytes() == (root / "teacher" / "model.safetensors").read_bytes()
    assert str(tmp_path) not in str(first.config)

    def again(name: str, seed: int) -> str:
        other = small(name, rounds=1, train=settings("./at/last" if seed == 3 else "teacher"))
        write_tiny_model(other / ("at/last" if seed == 3 else "teacher"), seed=seed)
        there = open_loop(other)
        there.run()
        return str(trained(there).key)

    assert again("same", 3) == first.key
    assert again("other", 4) != first.key


def test_another_teacher_under_the_same_path_is_not_taken_for_the_same(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, train=settings("teacher"))
    write_tiny_model(root / "teacher", seed=3)
    loop = open_loop(root)
    loop.run(until="dataset")
    loop.run(until="train")
    first = trained(loop)
    shutil.rmtree(root / "teacher")
    write_tiny_model(root / "teacher", seed=4)
    loop.run()
    assert trained(loop).inputs["teacher"] != first.inputs["teacher"]
    assert trained(loop).key != first.key


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        (None, "train.distill.teacher: distillation needs a teacher"),
        ("nowhere", "train.distill.teacher: no folder `nowhere`"),
        (".", "is no model: it holds no config.json"),
    ],
)
def test_a_teacher_that_is_not_there_is_found_out_before_any_work(small: Any, teacher: str | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config(small(train=settings(teacher)))


def test_other_objectives_look_at_no_teacher(small: Any) -> None:
    given = {"objective": "sft", "distill": {"teacher": "nowhere"}}
    assert load_config(small(train=given)).train.distill.teacher == "nowhere"
