"""The normal form of a record's content, and the identities that are hashes of it."""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

Turn = Mapping[str, str]


def normal_text(text: str) -> str:
    """NFC, without outer whitespace, inner runs of whitespace folded to one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def input_id(prompt: Sequence[Turn] | None, text: str | None) -> str:
    """20 hex characters that two records share exactly when their normalised inputs are equal."""
    return _digest([_turns(prompt), _normal(text)])


def record_id(prompt: Sequence[Turn] | None, completion: str | None, rejected: str | None, text: str | None) -> str:
    """20 hex characters that two records share exactly when their normalised contents are equal."""
    return _digest([_turns(prompt), _normal(completion), _normal(rejected), _normal(text)])


def identify(table: pa.Table) -> pa.Table:
    """``table`` with ``id`` and ``input_id`` computed anew from the content."""
    columns = (table[name].to_pylist() for name in ("prompt", "completion", "rejected", "text"))
    ids, input_ids = [], []
    for prompt, completion, rejected, text in zip(*columns, strict=True):
        ids.append(record_id(prompt, completion, rejected, text))
        input_ids.append(input_id(prompt, text))
    return _replace(_replace(table, "id", ids), "input_id", input_ids)


def without_answers(table: pa.Table) -> pa.Table:
    """``table`` as a pool: ``completion`` and ``rejected`` null, identities to match."""
    nothing = [None] * table.num_rows
    return identify(_replace(_replace(table, "completion", nothing), "rejected", nothing))


def input_texts(table: pa.Table) -> list[str]:
    """What is compared to find like inputs, one text a record: its text, or its turns one a line.

    The system turn is left out: it is the same in a whole file and would make all of it look alike.
    """
    return [
        text if prompt is None else "\n".join(turn["content"] for turn in prompt if turn["role"] != "system")
        for prompt, text in zip(table["prompt"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]


Field = Literal["input", "answer", "all"]
"""Which words of a record a step reads: its prompt or text, its answer (both of a preference pair), or all of them."""


def texts_of(table: pa.Table, field: Field = "all") -> list[str]:
    """One text a record, its parts one a line; ``""`` where there are none."""
    inputs = input_texts(table) if field != "answer" else [None] * table.num_rows
    better, worse = (
        table[name].to_pylist() if field != "input" else [None] * table.num_rows for name in ("completion", "rejected")
    )
    return ["\n".join(part for part in parts if part is not None) for parts in zip(inputs, better, worse, strict=True)]


def _normal(text: str | None) -> str | None:
    return None if text is None else normal_text(text)


def _turns(prompt: Sequence[Turn] | None) -> list[list[str]] | None:
    return None if prompt is None else [[turn["role"], normal_text(turn["content"])] for turn in prompt]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _replace(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))
