"""Settings and records that the chosen objective would not use as they are meant."""

import logging
from pathlib import Path

import pytest

from posttrain import UserError, train
from posttrain.train.config import TrainConfig, unused_sections

SETTINGS = {"train": {"epochs": 1, "precision": "float32"}}


def thumbs(*labels: bool) -> list[dict[str, object]]:
    return [{"prompt": f"q{n}", "completion": f"a{n}", "label": label} for n, label in enumerate(labels)]


def test_answers_that_people_called_bad_are_not_learned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 3 records have `label: false`, and sft would learn .*; train with kto"):
        train("tiny", thumbs(True, False, True), tmp_path / "out", settings=SETTINGS)
    assert not (tmp_path / "out" / "config.yaml").exists()
    train("tiny", thumbs(True, True), tmp_path / "good", settings=SETTINGS)
    train("tiny", thumbs(True, False), tmp_path / "kto", objective="kto", settings=SETTINGS)


@pytest.mark.parametrize("objective", ["sft", "ipo"])
def test_another_objectives_settings_are_named(objective: str) -> None:
    config = TrainConfig.read({"objective": objective, "dpo": {"beta": 0.5}, "ipo": {"beta": 0.2}}, "train")
    assert unused_sections(config) == [name for name in ("dpo", "ipo") if name != objective]
    assert unused_sections(TrainConfig(objective=objective)) == []


def test_a_training_says_that_a_section_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"train": {**SETTINGS["train"], "dpo": {"beta": 0.5}}}
    with caplog.at_level(logging.WARNING, "posttrain"):
        train("tiny", thumbs(True), tmp_path / "out", settings=settings)
    assert "train.dpo is set, and train.objective is sft: it changes nothing" in caplog.text
