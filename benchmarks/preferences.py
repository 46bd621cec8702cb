"""Reads Anthropic's HH pairs as token ids, for the benchmarks."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Turns = list[dict[str, str]]

_ROLES = {"Human": "user", "Assistant": "assistant"}


def hh_pairs(model: str, data: str, count: int, max_length: int) -> list[Row]:
    """Return the first pairs of two different answers to one conversation that fit in the length.

    A row has the token ids ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.

    Args:
        model: the folder of the chat template and tokenizer.
        data: ``hh_*.jsonl.gz``.
        count: number of pairs.
        max_length: maximum tokens of prompt and answer.
    """
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm, rows = load_language_model(Path(model), TaskConfig()), []
    for prompt, chosen, rejected in conversations(data):
        prompt_ids = lm.prompt_ids(prompt)
        row = {"prompt_ids": prompt_ids, "chosen_ids": lm.answer_ids(chosen), "rejected_ids": lm.answer_ids(rejected)}
        if len(prompt_ids) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) <= max_length:
            rows.append(row)
        if len(rows) == count:
            return rows
    raise SystemExit(f"{data} has only {len(rows)} pairs of at most {max_length} tokens")


def pair_units(rows: list[Row]) -> list[Any]:
    """Return the pairs in the form that the trainer takes."""
    from posttrain.models.chat import TokenizedExample

    return [
        [
            TokenizedExample(row["prompt_ids"] + row[side], [False] * len(row["prompt_ids"]) + [True] * len(row[side]))
            for side in ("chosen_ids", "rejected_ids")
        ]
        for row in rows
    ]


def conversations(data: str) -> Iterator[tuple[Turns, str, str]]:
    """Yield prompt, chosen and rejected answer of each pair of two different answers to one conversation."""
    with gzip.open(data, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            chosen, rejected = _turns(row["chosen"]), _turns(row["rejected"])
            prompt = chosen[:-1]
            answers = [turns[-1] for turns in (chosen, rejected)]
            same_prompt = len(chosen) == len(rejected) and prompt == rejected[:-1]
            if same_prompt and prompt and prompt[-1]["role"] == "user" and all(turn["content"] for turn in prompt):
                chosen_answer, rejected_answer = (turn["content"] for turn in answers)
                answers_differ = chosen_answer and rejected_answer and chosen_answer != rejected_answer
                if answers_differ and answers[0]["role"] == "assistant":
                    yield prompt, chosen_answer, rejected_answer


def _turns(text: str) -> Turns:
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    messages = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[role], "content": content.strip()} for role, content in messages]
