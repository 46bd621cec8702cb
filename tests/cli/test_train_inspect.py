"""``posttrain train --inspect`` shows the tokens that the objective trains on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

PAIR = {"prompt": "hi", "chosen": "good", "rejected": "bad"}


@pytest.fixture
def inspect(tmp_path: Path, posttrain: Call) -> Callable[..., list[str]]:
    """``inspect(row, *options)``: the lines printed for a record."""

    def lines(row: dict[str, Any], *options: str) -> list[str]:
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps(row) + "\n", encoding="utf-8")
        outcome = posttrain("train", "--model", "tiny", "--data", data, "--inspect", "1", *options)
        assert outcome.code == 0, outcome
        return [line for line in outcome.out.splitlines() if line]

    return lines


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (("orpo",), ["[trained] <|user|>hi<|end|><|assistant|>good<|end|>"]),
        (
            ("orpo", "--set", "train.objective.likelihood=completion"),
            ["[context] <|user|>hi<|end|><|assistant|>", "[trained] good<|end|>"],
        ),
        (("dpo",), ["[context] <|user|>hi<|end|><|assistant|>", "[trained] good<|end|>"]),
    ],
)
def test_inspect_shows_both_answers_of_a_pair(
    inspect: Callable[..., list[str]], options: tuple[str, ...], chosen: list[str]
) -> None:
    lines = inspect(PAIR, "--objective", *options)
    assert lines[1:-3] == chosen
    assert f"  10 tokens, {10 if len(chosen) == 1 else 5} trained " in lines[0]
    assert "  9 tokens, 4 trained " in lines[-3]
    assert lines[-2:] == ["[context] <|user|>hi<|end|><|assistant|>", "[trained] bad<|end|>"]


def test_inspect_shows_pairs_of_a_reward_model_as_context(inspect: Callable[..., list[str]]) -> None:
    lines = inspect(PAIR, "--objective", "reward")
    assert ["trained" in line for line in lines] == [False] * 4
    assert ["tokens, read to its end for one reward " in line for line in lines] == [True, False, True, False]
    assert lines[1::2] == [f"[context] <|user|>hi<|end|><|assistant|>{output}<|end|>" for output in ("good", "bad")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["[context] <|user|>hi<|end|><|assistant|>"]),
        ("hello to you", ["[cut off] <|user|>hello t", "[context] o you<|end|><|assistant|>"]),
    ],
)
def test_inspect_cuts_off_the_beginning_of_a_text_for_classification(
    inspect: Callable[..., list[str]], prompt: str, expected: list[str]
) -> None:
    """Of 8 tokens one is reserved for the class."""
    settings = ("--set", "task.labels=[greeting, other]", "--set", "train.max_length=8")
    row = {"prompt": prompt, "completion": "greeting"}
    title, *result = inspect(row, "--objective", "classification", *settings)
    assert f"  {len(prompt) + 3} tokens, read to its end for its class " in title
    assert result == expected


@pytest.mark.parametrize("content", ["prompt,completion,label\nhi,x,{}\n", "prompt;completion;label\nhi;x;{}\n"])
@pytest.mark.parametrize("label", ["1", "true", "False"])
def test_kto_reads_labels_of_csv(tmp_path: Path, posttrain: Call, content: str, label: str) -> None:
    (tmp_path / "data.csv").write_text(content.format(label))
    command = ("train", "--model", "tiny", "--data", tmp_path / "data.csv", "--inspect", "1")
    outcome = posttrain(*command, "--objective", "kto")
    assert (outcome.code, outcome.err) == (0, "")
    outcome = posttrain(*command)
    assert (outcome.code, "label is not used" in outcome.err) == (0, True)


def test_train_names_columns_that_it_does_not_use(tmp_path: Path, posttrain: Call) -> None:
    row = {"instruction": "hi", "output": "x", "system_prompt": "Be kind.", "weight": 1, "id": "a"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    command = ("train", "--model", "tiny", "--data", tmp_path / "data.jsonl", "--inspect", "1")
    outcome = posttrain(*command, "--set", "train.weight=weight")
    assert outcome.code == 0, outcome
    assert "data.jsonl: system_prompt is not used, only kept in `meta`; name what is with `columns`" in outcome.err
    outcome = posttrain(*command, "--set", "columns={system: system_prompt}")
    assert "weight is not used" in outcome.err
    assert "Be kind." in outcome.out


def test_records_that_name_images_are_counted(tmp_path: Path, posttrain: Call) -> None:
    rows = [{"prompt": f"q{row}", "completion": "a", "meta": {"image": "cat.png"} if row else {}} for row in range(3)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    outcome = posttrain("train", "--model", "tiny", "--data", data, "--inspect", "1")
    assert "2 records name an image" in outcome.err
