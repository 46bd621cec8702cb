"""``posttrain train --inspect`` shows what the objective learns from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

PAIR = {"prompt": "hi", "chosen": "good", "rejected": "bad"}


@pytest.fixture
def inspect(tmp_path: Path, posttrain: Call) -> Callable[..., list[str]]:
    """``inspect(row, *options)``: the lines that are printed of a record."""

    def lines(row: dict[str, Any], *options: str) -> list[str]:
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps(row) + "\n", encoding="utf-8")
        ended = posttrain("train", "--model", "tiny", "--data", data, "--inspect", "1", *options)
        assert ended.code == 0, ended
        return [line for line in ended.out.splitlines() if line]

    return lines


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (("orpo",), ["[trained] <|user|>hi<|end|><|assistant|>good<|end|>"]),
        (
            ("orpo", "--set", "train.orpo.likelihood=completion"),
            ["[context] <|user|>hi<|end|><|assistant|>", "[trained] good<|end|>"],
        ),
        (("dpo",), ["[context] <|user|>hi<|end|><|assistant|>", "[trained] good<|end|>"]),
    ],
)
def test_a_pair(inspect: Callable[..., list[str]], options: tuple[str, ...], chosen: list[str]) -> None:
    shown = inspect(PAIR, "--objective", *options)
    assert shown[1:-3] == chosen
    assert f"  10 tokens, {10 if len(chosen) == 1 else 5} trained " in shown[0]
    assert "  9 tokens, 4 trained " in shown[-3]
    assert shown[-2:] == ["[context] <|user|>hi<|end|><|assistant|>", "[trained] bad<|end|>"]


def test_a_reward(inspect: Callable[..., list[str]]) -> None:
    shown = inspect(PAIR, "--objective", "reward")
    assert ["trained" in line for line in shown] == [False] * 4
    assert ["tokens, read to its end for one reward " in line for line in shown] == [True, False, True, False]
    assert shown[1::2] == [f"[context] <|user|>hi<|end|><|assistant|>{output}<|end|>" for output in ("good", "bad")]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("hi", ["[context] <|user|>hi<|end|><|assistant|>"]),
        ("hello to you", ["[cut off] <|user|>hello t", "[context] o you<|end|><|assistant|>"]),
    ],
)
def test_a_class(inspect: Callable[..., list[str]], prompt: str, shown: list[str]) -> None:
    """Of 8 tokens, one is left for what is predicted behind the text."""
    settings = ("--set", "task.labels=[greeting, other]", "--set", "train.max_length=8")
    row = {"prompt": prompt, "completion": "greeting"}
    title, *result = inspect(row, "--objective", "classification", *settings)
    assert f"  {len(prompt) + 3} tokens, read to its end for its class " in title
    assert result == shown
