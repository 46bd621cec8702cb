"""Settings and records that the chosen objective would not use, and the forms of `train.objective`."""

from pathlib import Path
from typing import Any

import pytest

from posttrain import UserError, train
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.config import DpoConfig
from posttrain.train.standalone import TrainJobConfig

SETTINGS = {"train": {"epochs": 1, "precision": "float32"}}


def thumbs(*labels: object) -> list[dict[str, object]]:
    return [{"prompt": f"q{n}", "completion": f"a{n}", "label": label} for n, label in enumerate(labels)]


@pytest.mark.slow
def test_answers_that_people_called_bad_are_not_learned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 3 records have `label: false`, and sft would learn .*; train with kto"):
        train("tiny", thumbs(True, False, True), tmp_path / "out", settings=SETTINGS)
    with pytest.raises(UserError, match=r"2 of 3 records have `label: false`"):  # as CSV has them
        train("tiny", thumbs("true", "False", "false"), tmp_path / "out", settings=SETTINGS)
    assert not (tmp_path / "out" / "config.yaml").exists()
    train("tiny", thumbs(True, True), tmp_path / "good", settings=SETTINGS)
    train("tiny", thumbs(True, False), tmp_path / "kto", objective="kto", settings=SETTINGS)


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        ({"name": "sft", "beta": 0.5}, "`train.objective`: sft has no `beta`; it has label_smoothing, focal"),
        ({"beta": 0.5}, "`train.objective`: sft has no `beta`"),
        ({"name": "ipo", "beta": 0}, "`train.objective.beta`: Input should be greater than 0"),
        ({"name": "dop"}, "`train.objective`: there is no objective `dop`; did you mean `dpo`"),
        ("dop", "`train.objective`: there is no objective `dop`; did you mean `dpo`"),
        ("grpo", "`train.objective`: there is no `grpo`; reinforcement learning is not supported"),
        (["dpo"], "`train.objective`: an objective is its name, or a section with its name and settings"),
    ],
)
def test_another_objectives_setting_is_an_error_that_names_what_there_is(objective: Any, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        TrainJobConfig.read({"model": "tiny", "data": "a", "train": {"objective": objective}}, "file")
    assert str(caught.value).startswith(f"file: {problem}")
    assert "\n" not in str(caught.value)


def test_the_name_alone_is_short_for_a_section() -> None:
    short, long = (TrainConfig.read({"objective": value}, "file") for value in ("dpo", {"name": "dpo", "beta": 0.1}))
    assert short == long == TrainConfig(objective=DpoConfig())
    assert TrainConfig.read(short.model_dump(mode="json"), "file") == short
    assert short.model_dump(mode="json")["objective"] == {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}
