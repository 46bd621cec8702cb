"""A tokenised training set: the encoded units, deterministic bytes, reuse, and detection of damage."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.models import tiny
from posttrain.models.chat import ChatTemplate
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError, WorkError
from posttrain.train.data import tokenise as blocks
from posttrain.train.data.encoding import Encoder, encode
from posttrain.train.data.record_columns import RecordColumns
from posttrain.train.data.token_set import DTYPES, RECORDS, TokenSet
from posttrain.train.data.tokenise import tokenise

MakeRecords = Callable[..., pa.Table]

TASK = TaskConfig(system="Name the intent.")


def encoder(task: TaskConfig = TASK, template: str | None = None) -> Encoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return Encoder(ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id])), task)


def with_column(records: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    index = records.schema.get_field_index(name)
    return records.set_column(index, records.schema.field(name), pa.array(values, records.schema.field(name).type))


@pytest.fixture
def pairs(records: pa.Table) -> pa.Table:
    margins = [json.dumps({"margin": row}) if row % 3 else "{}" for row in range(len(records))]
    return with_column(with_column(records, "rejected", ["no"] * len(records)), "meta", margins)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def record_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of records of each call that tokenises."""
    result: list[int] = []

    original = blocks.tokenise_blocks

    def count_records(encoder: Encoder, records: pa.Table, *arguments: Any) -> Any:
        result.append(len(records))
        return original(encoder, records, *arguments)

    monkeypatch.setattr("posttrain.train.data.tokenise.tokenise_blocks", count_records)
    return result


def test_a_token_set_holds_the_encoded_units(
    fresh: Callable[..., LanguageModel], records: pa.Table, tmp_path: Path
) -> None:
    lm = fresh()
    result = tokenise(lm, records, 50, "completion", tmp_path)
    units, cut = encode(lm, records, 50)
    assert list(result) == units
    assert [result[-1], result[2:5], result[:]] == [units[-1], units[2:5], units]
    assert (len(result), result.cut, result.record_ids) == (10, cut, records["id"].to_pylist())
    assert cut
    assert result.longest.tolist() == [len(unit[0].ids) for unit in units]
    assert result.largest_id == max(max(unit[0].ids) for unit in units)
    assert result.meta["supervised_tokens"] == sum(sum(unit[0].supervised) for unit in units)
    assert result.targets.tolist() == [-1] * 10
    with pytest.raises(IndexError):
        result[10]


def test_pairs_are_units_of_two(pairs: pa.Table, tmp_path: Path) -> None:
    result = tokenise(encoder(), pairs, 100, "pair", tmp_path)
    assert list(result) == encode(encoder(), pairs, 100, "pair")[0]
    sizes = [[len(sequence.ids) for sequence in unit] for unit in result]
    assert result.longest.tolist() == [max(unit) for unit in sizes]
    assert RecordColumns(pairs).margins().tolist() == [0, 1, 2, 0, 4, 5, 0, 7, 8, 0]


def test_labels_are_the_targets(records: pa.Table, tmp_path: Path) -> None:
    labels_by_row = [row % 2 == 0 for row in range(10)]
    labelled = with_column(records, "meta", [json.dumps({"label": label}) for label in labels_by_row])
    assert tokenise(encoder(), labelled, 100, "labelled", tmp_path).targets.tolist() == [
        int(label) for label in labels_by_row
    ]
    labels = ["top up", "refund", "card lost", "card stolen", "x"]
    result = tokenise(encoder(TaskConfig(labels=labels)), records, 100, "class", tmp_path)
    assert [labels[target] for target in result.targets] == records["completion"].to_pylist()


def test_tokens_stay_on_the_disk(records: pa.Table, tmp_path: Path) -> None:
    result = tokenise(encoder(), records, 100, "completion", tmp_path)
    assert isinstance(result.shards[0].ids.base, np.memmap)
    assert isinstance(result.shards[0].supervised.base, np.memmap)
    assert result.shards[0].ids.dtype == np.int32


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_processes(
    pairs: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tokenise(encoder(), pairs, 60, "pair", tmp_path / "whole", 1)
    monkeypatch.setattr(blocks, "_BLOCK_RECORDS", 3)
    expected = contents(reference.folder)
    assert len(expected) == 6
    for processes in (1, 3):
        actual = tokenise(encoder(), pairs, 60, "pair", tmp_path / str(processes), processes)
        assert contents(actual.folder) == expected


@pytest.mark.slow
def test_the_first_bad_record_is_named(records: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_RECORDS", 3)
    answers = [None if row in (4, 9) else "x" for row in range(10)]
    with pytest.raises(UserError, match=f"^f:5: record {5:020x}: it has no answer"):
        tokenise(encoder(), with_column(records, "completion", answers), 100, "completion", tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*") if path.name != ".lock")


@pytest.mark.slow
def test_all_records_that_are_too_long_are_counted(
    records: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_RECORDS", 3)
    answers = ["x" * 90 if row in (1, 2, 4, 9) else None if row == 7 else "x" for row in range(10)]
    long = with_column(records, "completion", answers)
    for processes in (1, 2):
        with pytest.raises(UserError, match=f"^f:2: record {2:020x}: .* in 80 tokens, and 3 more like it; raise"):
            tokenise(encoder(), long, 80, "completion", tmp_path, processes)
    with pytest.raises(UserError, match=f"^f:8: record {8:020x}: it has no answer"):
        tokenise(encoder(), long.slice(5), 80, "completion", tmp_path)
    with pytest.raises(UserError, match=f"^f:10: record {10:020x}: .* prompt in 80 tokens; raise"):
        tokenise(encoder(), long.slice(8), 80, "completion", tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*") if path.name != ".lock")


@pytest.mark.slow
def test_a_killed_process_is_reported(records: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_RECORDS", 3)
    monkeypatch.setattr(blocks, "_read_block", lambda *arguments: os._exit(9))
    with pytest.raises(WorkError, match=r"a process that tokenised was killed: set train\.loader\.processes to 1"):
        tokenise(encoder(), records, 100, "completion", tmp_path, 2)


def test_a_token_set_is_reused(records: pa.Table, tmp_path: Path, record_counts: list[int]) -> None:
    first = tokenise(encoder(), records, 100, "completion", tmp_path)
    repeated = tokenise(encoder(), records, 100, "completion", tmp_path)
    assert record_counts == [10]
    assert (repeated.folder, list(repeated)) == (first.folder, list(first))


def test_calling_a_tokenizer_does_not_change_the_key(
    records: pa.Table, tmp_path: Path, record_counts: list[int]
) -> None:
    tokenise(encoder(), records, 100, "completion", tmp_path)
    used = encoder()
    used.chat.tokenizer("some words", truncation=True, max_length=2)
    tokenise(used, records, 100, "completion", tmp_path)
    assert record_counts == [10]


def test_the_chunks_of_a_table_do_not_change_the_key(
    records: pa.Table, tmp_path: Path, record_counts: list[int]
) -> None:
    tokenise(encoder(), records, 100, "completion", tmp_path)
    tokenise(encoder(), pa.concat_tables([records.slice(0, 3), records.slice(3)]), 100, "completion", tmp_path)
    tokenise(encoder(), pa.Table.from_pylist(records.to_pylist(), records.schema), 100, "completion", tmp_path)
    tokenise(encoder(), pa.concat_tables([records, records]).slice(10), 100, "completion", tmp_path)
    assert record_counts == [10]


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 50},
        {"encoder": {"task": TaskConfig(system="Say what is asked.")}},
        {"encoder": {"task": TaskConfig(system="Name the intent.", template="It says: {prompt}")}},
        {"encoder": {"template": tiny._TEMPLATE.replace("<|assistant|>", "<|assistant|>>")}},
        {"encoder": "stop"},
        {"encoder": "token"},
        {"shape": "teacher"},
        {"records": "order"},
        {"records": "space"},
        {"records": "meta"},
    ],
    ids=str,
)
def test_the_key_holds_everything_that_changes_the_tokens(
    records: pa.Table, tmp_path: Path, record_counts: list[int], change: dict[str, Any]
) -> None:
    arguments = {"encoder": encoder(), "records": records, "max_length": 100, "shape": "completion"}
    first = tokenise(*arguments.values(), tmp_path)
    if isinstance(change.get("encoder"), dict):
        change = {"encoder": encoder(**change["encoder"])}
    if change == {"encoder": "stop"}:
        change = {"encoder": Encoder(ChatTemplate(byte_tokenizer(), frozenset([256, 257])), TASK)}
    if change == {"encoder": "token"}:
        change = {"encoder": encoder()}
        change["encoder"].chat.tokenizer.add_tokens(["card"])
    if change == {"records": "order"}:
        change = {"records": records.take(list(reversed(range(10))))}
    if change == {"records": "space"}:  # an id ignores differences in white space
        padded_answers = [f"{answer} " for answer in records["completion"].to_pylist()]
        change = {"records": with_column(records, "completion", padded_answers)}
    if change == {"records": "meta"}:
        change = {"records": with_column(records, "meta", ['{"label": true}'] * 10)}
    second = tokenise(*(arguments | change).values(), tmp_path)
    assert record_counts == [10, 10]
    assert second.folder != first.folder
    assert list(tokenise(*arguments.values(), tmp_path)) == list(first)
    assert record_counts == [10, 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((f"shard-00000/{name}", ("flip", "cut", "remove")[at % 3]) for at, name in enumerate((*DTYPES, RECORDS))),
        *(("manifest.json", how) for how in ("flip", "cut", "remove")),
    ],
)
def test_a_damaged_set_is_rebuilt(
    records: pa.Table, tmp_path: Path, record_counts: list[int], caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    first = tokenise(encoder(), records, 100, "completion", tmp_path)
    original, file = contents(first.folder), first.folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(bytes(content) if how == "flip" else bytes(content[:-1]))
    with caplog.at_level(logging.WARNING, "posttrain"):
        repaired = tokenise(encoder(), records, 100, "completion", tmp_path)
    assert record_counts == [10, 10]
    assert contents(repaired.folder) == original
    if (name, how) != ("manifest.json", "remove"):  # without it there is no set
        assert f"{name} " in caplog.text
        assert "tokenised data are thrown away" in caplog.text


def test_a_set_can_be_opened_by_its_folder(records: pa.Table, tmp_path: Path) -> None:
    result = tokenise(encoder(), records, 100, "completion", tmp_path)
    assert list(TokenSet(result.folder)) == list(result)
