"""Records in memory are read as the same records in a file of JSON lines are."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.reading.memory import read_memory
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.store.errors import UserError

ROWS = [
    {"id": 1, "prompt": "my card is gone", "completion": "card", "weight": 0.5},
    {"id": 2, "prompt": "Größe 😀", "completion": "cash", "weight": 2.0},
    {"id": 3, "prompt": "charged twice", "completion": "cash", "weight": 1.0},
]

SHAPES = [
    ROWS,
    [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]} for text in "ab"],
    [{"prompt": text, "chosen": "yes", "rejected": "no"} for text in "ab"],
    [{"text": text} for text in "ab"],
    [{"instruction": text, "input": "", "output": "yes"} for text in "ab"],
    [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]} for text in "ab"],
]


class Dataset:
    """Stands for ``datasets.Dataset``, whose formatted batches are Arrow tables."""

    def __init__(self, table: pa.Table, format: str | None = None) -> None:
        self.table, self.format = table, format
        self.features: dict[str, Any] = {}

    def with_format(self, format: str) -> "Dataset":
        return Dataset(self.table, format)

    def iter(self, batch_size: int) -> Any:
        assert self.format == "arrow"
        for start in range(0, self.table.num_rows, min(batch_size, 2)):
            yield self.table.slice(start, min(batch_size, 2))


class Stream:
    """Stands for a polars DataFrame: it gives an Arrow stream, of large strings, and nothing else is known of it."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        large = [pa.large_string() if field.type == pa.string() else field.type for field in self.table.schema]
        schema = pa.schema(list(zip(self.table.column_names, large, strict=True)))
        return self.table.cast(schema).__arrow_c_stream__(requested_schema)


def frame(*args: Any, **options: Any) -> Any:
    import pandas as pd

    return pd.DataFrame(*args, **options)


KINDS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "table": pa.Table.from_pylist,
    "batch": lambda rows: pa.RecordBatch.from_pylist(rows),
    "pandas": lambda rows: frame(rows, index=range(7, 7 + len(rows))),
    "pandas with a text index": lambda rows: frame(rows, index=[f"row {row}" for row in range(len(rows))]),
    "stream": lambda rows: Stream(pa.Table.from_pylist(rows)),
    "dataset": lambda rows: Dataset(pa.Table.from_pylist(rows)),
}


def from_file(rows: list[dict[str, Any]], folder: Path) -> pa.Table:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return concat(read(file))


def content(table: pa.Table) -> list[dict[str, Any]]:
    return table.drop_columns(["source", "line"]).to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    for rows in SHAPES:
        table = concat(read_memory(KINDS[kind](rows), "data"))
        assert content(table) == content(from_file(rows, tmp_path))
        assert set(table["source"].to_pylist()) == {"data"}
        assert table["line"].to_pylist() == list(range(1, len(rows) + 1))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(["note", "score", "meta"]), _JSON), min_size=1, max_size=4))
def test_any_other_columns_are_kept_as_those_of_a_file(tmp_path_factory: Any, extras: list[dict[str, Any]]) -> None:
    rows = [{"prompt": f"input {number}", "completion": "x", **extra} for number, extra in enumerate(extras)]
    folder = tmp_path_factory.mktemp("rows")
    assert content(concat(read_memory(rows, "data"))) == content(from_file(rows, folder))


def test_numpy_values_are_plain_numbers_and_texts(tmp_path: Path) -> None:
    plain = [{"prompt": "a", "completion": "b", "n": 3, "share": 0.5, "vector": [1, 2], "flag": True}]
    numpy = {"n": np.int64(3), "share": np.float64(0.5), "vector": np.array([1, 2]), "flag": np.bool_(True)}
    rows = [{"prompt": np.str_("a"), "completion": "b", **numpy}]
    assert content(concat(read_memory(rows, "data"))) == content(from_file(plain, tmp_path))


def test_columns_are_renamed_and_missing_values_are_no_answer() -> None:
    rows = frame({"question": ["a", "b"], "answer": ["x", float("nan")]})
    table = concat(read_memory(rows, "data", {"prompt": "question", "completion": "answer"}))
    assert table["completion"].to_pylist() == ["x", None]


MISTAKES: list[tuple[Any, str]] = [
    ([*ROWS, {"text": "a"}], "data[3]: has the shape `text`, but data[0] has the shape `prompt`; keep one shape in "),
    ([*ROWS, "a"], "data[3]: a record must be a dictionary, not str"),
    ([ROWS[0], {**ROWS[1], "completion": 5}], "data[1]: `completion` is not text but int 5"),
    ([ROWS[0], {**ROWS[1], "id": 1}], "data[1]: the id `1` also occurs on data[0], with other content; "),
    ([{1: "a"}], "data[0]: the key 1 is not text; use texts as keys"),
    ([{"prompt": "a\0", "completion": "b"}], "data[0]: `prompt` holds a NUL character"),
    ([{"prompt": "\ud800", "completion": "b"}], "data[0]: holds bytes or characters that are not UTF-8"),
    (
        [{"question": "a", "completion": "b"}],
        "data[0]: the columns question, completion are not a shape that we know; ",
    ),
    (lambda: frame({"promt": ["a"]}), "data: the columns promt are not a shape that we know; did you mean `prompt`"),
    (lambda: frame({"text": ["a", 3]}), "data: cannot be read as an Arrow table: "),
    (lambda: frame({"text": ["a"]})["text"], "data: cannot be read as an Arrow table: "),
    (pa.table({"text": ["a", None]}), "data[1]: `text` is missing or null"),
    (pa.table({"text": pa.array([], pa.string())}), "data: holds no records that can be used; put records into it"),
    ([], "data: holds no records that can be used; put records into it"),
    ({"text": ["a"]}, "data: is one dictionary; give a list of dictionaries, an Arrow table, "),
    ({"train": Dataset(pa.table({}))}, "data: holds the splits train; name one of them, such as data['train']"),
    (5, "data: int holds no records that can be read; give a list of dictionaries, "),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_index(data: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        list(read_memory(data() if callable(data) else data, "data"))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_skipped_records_are_reported() -> None:
    request = {"messages": [{"role": "user", "content": "a"}]}
    answered = {**request, "choices": [{"message": {"role": "assistant", "content": "b"}}]}
    skipped: list[Any] = []
    table = concat(read_memory([answered, {**request, "error": "late"}], "data", skipped=skipped.append))
    assert table.num_rows == 1
    assert [problem.file for problem in skipped] == ["data[1]"]


def test_class_labels_of_a_dataset_are_read_by_their_names() -> None:
    data = Dataset(pa.table({"text": ["a", "b", "c"], "intent": [1, 0, -1]}))
    data.features = {"text": SimpleNamespace(dtype="string"), "intent": SimpleNamespace(names=["no", "yes"])}
    columns = {"prompt": "text", "completion": "intent"}
    assert concat(list(read_memory(data, "data", columns)))["completion"].to_pylist() == ["yes", "no", None]
