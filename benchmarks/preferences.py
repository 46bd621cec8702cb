"""Anthropic's HH pairs as token ids, for the benchmarks."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Turns = list[dict[str, str]]

_ROLES = {"Human": "user", "Assistant": "assistant"}


def hh_pairs(model: str, data: str, count: int, longest: int) -> list[Row]:
    """The first pairs of two different answers to one conversation that fit.

    They are token ids by the names ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.

    Args:
        model: folder whose template and tokenizer are used.
        data: ``hh_*.jsonl.gz``.
        count: how many.
        longest: tokens of prompt and answer at most.
    """
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm, found = load_language_model(Path(model), TaskConfig()), []
    for prompt, chosen, rejected in _conversations(data):
        asked = lm.prompt_ids(prompt)
        row = {"prompt_ids": asked, "chosen_ids": lm.answer_ids(chosen), "rejected_ids": lm.answer_ids(rejected)}
        if len(asked) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= longest:
            found.append(row)
        if len(found) == count:
            return found
    raise SystemExit(f"{data} has but {len(found)} pairs of at most {longest} tokens")


def units(rows: list[Row]) -> list[Any]:
    """The pairs as the trainer takes them."""
    from posttrain.models.chat import TokenizedExample

    return [
        [
            TokenizedExample(row["prompt_ids"] + row[side], [False] * len(row["prompt_ids"]) + [True] * len(row[side]))
            for side in ("chosen_ids", "rejected_ids")
        ]
        for row in rows
    ]


def _conversations(data: str) -> Iterator[tuple[Turns, str, str]]:
    with gzip.open(data, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            chosen, rejected = _turns(row["chosen"]), _turns(row["rejected"])
            prompt = chosen[:-1]
            answers = [turns[-1] for turns in (chosen, rejected)]
            alike = len(chosen) == len(rejected) and prompt == rejected[:-1]
            if alike and prompt and prompt[-1]["role"] == "user" and all(turn["content"] for turn in prompt):
                better, worse = (turn["content"] for turn in answers)
                if better and worse and better != worse and answers[0]["role"] == "assistant":
                    yield prompt, better, worse


def _turns(text: str) -> Turns:
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    return [{"role": _ROLES[role], "content": said.strip()} for role, said in zip(parts[::2], parts[1::2], strict=True)]
