"""Features of a training's task: sizes, lengths and answers, centroids that tell data apart, and the model's size."""

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.records.record import records
from posttrain.tune.trainings.features import data_task, early_losses, model_features
from posttrain.tune.transfer.past import distances
from posttrain.tune.transfer.warm_start import PastStudy


def table(prompts: list[str], answers: list[str | None]) -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "completion": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return records(rows)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence model takes seconds."""
    monkeypatch.setattr("posttrain.tune.trainings.features._embedded", lambda texts: {})


def test_numbers() -> None:
    task = data_task(table(["ab", "abcd", "abcdef", "abcd"], ["x", "x", "yyy", "yyy"]))
    assert task.features == pytest.approx(
        {
            "records": math.log10(4),
            "input length": math.log10(5),
            "input spread": math.sqrt(2) / 4,
            "answer length": math.log10(3),
            "different answers": math.log10(2),
            "answer entropy": math.log(2),
        }
    )
    assert "answer entropy" not in data_task(table(["a"], [None])).features
    assert data_task(table([], [])).centroids == {}


def test_centroids_tell_data_apart() -> None:
    bank = [f"my card number {n} was declined at the bank" for n in range(10)]
    other = [f"the bank declined card {n} of mine" for n in range(10)]
    code = [f"def function_{n}(argument): return argument" for n in range(10)]
    task, near, far = (data_task(table(texts, ["a"] * 10)) for texts in (bank, other, code))
    studies = [PastStudy("study", None, each, ()) for each in (near, far)]  # type: ignore[arg-type]
    first, second = distances(task, studies)
    assert first is not None
    assert second is not None
    assert first < second
    assert data_task(table(bank, ["a"] * 10)) == task


def test_the_model_and_the_first_losses(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert model_features(tiny_model)["model size"] == pytest.approx(math.log10(count), abs=0.01)
    assert model_features(tmp_path) == early_losses(tmp_path) == {}
    (tmp_path / "early").mkdir()
    for number, value in ((0, 2.0), (2, 4.0), (3, 100.0)):
        (tmp_path / "early" / f"{number:04d}.json").write_text(str(value))
    assert early_losses(tmp_path) == {"loss at step 10": 3.0}  # of the first three trials
