"""Features of a training's task: sizes, lengths and answers, and the model's size."""

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.records.record import records
from posttrain.tune.trainings.features import data_features, model_features


def table(prompts: list[str], answers: list[str | None]) -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "completion": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return records(rows)


def test_numbers() -> None:
    features = data_features(table(["ab", "abcd", "abcdef", "abcd"], ["x", "x", "yyy", "yyy"]))
    assert features == pytest.approx(
        {
            "records": math.log10(4),
            "input length": math.log10(5),
            "input spread": math.sqrt(2) / 4,
            "answer length": math.log10(3),
            "different answers": math.log10(2),
            "answer entropy": math.log(2),
        }
    )
    assert "answer entropy" not in data_features(table(["a"], [None]))
    assert data_features(table([], [])) == {"records": 0.0, "input length": 0.0, "input spread": 0.0}


def test_the_size_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert model_features(tiny_model)["model size"] == pytest.approx(math.log10(count), abs=0.01)
    assert model_features(tmp_path) == {}
