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
