"""Whatever a file holds, reading it ends in records or in clear lines; what we export we read back."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data.check import check
from posttrain.data.export import export
from posttrain.data.normalise import identify, identities
from posttrain.data.problem import LONGEST_MESSAGE, Problem
from posttrain.data.reading import read, scan
from posttrain.data.schema import RECORD, concat, records
from posttrain.store.errors import UserError

ours = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

BLOCKS = st.sampled_from(
    [
        b'"', b"'", b",", b"\t", b"\n", b"\r\n", b"\r", b"{", b"}", b"[", b"]", b":", b"\\", b"\\u", b"\\ud800", b"\0",
        b"\xff\xfe", b"\xef\xbb\xbf", b"\xe9", b" ", b"text", b'{"text": "a"}\n', b'"prompt": ', b"NaN", b"1e999",
        b"9" * 5000, b"[" * 200, b'{"a":' * 150, b"text,completion\n", b"null", b"\xf0\x9f\x98\x80", b"-", b"id",
    ]
)  # fmt: skip
CONTENT = st.one_of(st.binary(max_size=200), st.lists(BLOCKS, max_size=25).map(b"".join))

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "usr"]) | SCALARS,
        "from": st.sampled_from(["human", "gpt"]),
        "content": st.text(max_size=8) | SCALARS,
        "value": st.text(max_size=8),
        "tool_calls": SCALARS,
    },
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.lists(TURN, max_size=3)
    ),
    max_leaves=6,
)
COLUMN = st.sampled_from(
    [
        "id", "input_id", "prompt", "completion", "chosen", "rejected", "text", "messages", "conversations", "group",
        "instruction", "input", "output", "request", "response", "body", "choices", "error", "custom_id", "meta", "x",
    ]
)  # fmt: skip
DIALOGUE = st.lists(st.sampled_from(["\n\nHuman:", "\n\nAssistant:", " a", "\n"]), max_size=6).map("".join)
ROWS = st.lists(st.dictionaries(COLUMN, VALUES | DIALOGUE, max_size=6), max_size=4)


def look(path: Path) -> None:
    """Read and check a file; both find the same first problem, and every problem is one short line."""
    found = list(scan(path, name=path.name))
    problems = [one for one in found if isinstance(one, Problem)]
    assert found
    for problem in problems:
        said = str(problem.error())
        assert said.isprintable()
        assert len(said) < 2 * LONGEST_MESSAGE + 100
    blocking = [problem for problem in problems if problem.blocking]
    if blocking:
        with pytest.raises(UserError) as caught:
            list(read(path, name=path.name))
        assert str(caught.value) == str(blocking[0].error())
    else:
        table = concat(list(read(path, name=path.name)))
        table.validate(full=True)
        assert table.num_rows == len(found) - len(problems)
        assert identify(table).equals(table)
    check(path, labels=["a"])


@ours
@given(CONTENT, st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.zst"]))
def test_any_bytes(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    look(tmp_path / name)


@ours
@given(CONTENT, st.integers(0, 400), st.sampled_from(["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.jsonl.zst"]))
def test_any_compressed_bytes_cut_anywhere(tmp_path: Path, content: bytes, stop: int, name: str) -> None:
    packed = gzip.compress(content) if name.endswith("gz") else pa.compress(content, codec="zstd", asbytes=True)
    (tmp_path / name).write_bytes(bytes(packed)[:stop])
    look(tmp_path / name)


@ours
@given(ROWS, st.booleans())
def test_any_json_rows(tmp_path: Path, rows: list[dict[str, Any]], whole: bool) -> None:
    path = tmp_path / ("a.json" if whole else "a.jsonl")
    path.write_text(json.dumps(rows) if whole else "".join(json.dumps(row) + "\n" for row in rows))
    look(path)


@ours
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=3), st.data())
def test_damaged_parquet(tmp_path: Path, blocks: list[bytes], data: st.DataObject) -> None:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "n": [1.5, None]}), sink)
    content = bytearray(sink.getvalue())
    for block in blocks:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + len(block)] = block
    (tmp_path / "a.parquet").write_bytes(bytes(content))
    look(tmp_path / "a.parquet")


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda text: not text.isspace()
)
PROMPTS = st.tuples(
    st.lists(st.just("system"), max_size=1), st.lists(st.sampled_from(["user", "assistant"]), max_size=2)
).flatmap(
    lambda roles: st.tuples(
        *(st.fixed_dictionaries({"role": st.just(role), "content": WORDS}) for role in (*roles[0], *roles[1], "user"))
    ).map(list)
)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """RECORD tables of one shape, as reading gives them."""
    shape = draw(st.sampled_from(["text", "prompt", "preference"]))
    rows = []
    for line in range(1, draw(st.integers(1, 4)) + 1):
        prompt = None if shape == "text" else draw(PROMPTS)
        text = draw(WORDS) if shape == "text" else None
        completion = draw(WORDS if shape == "preference" else st.none() | WORDS) if shape != "text" else None
        rejected = draw(WORDS) if shape == "preference" else None
        id, input_id = identities(prompt, completion, rejected, text)
        meta = draw(st.dictionaries(st.sampled_from("abc"), st.integers() | WORDS, max_size=2))
        row = {"id": id, "input_id": input_id, "prompt": prompt, "completion": completion, "rejected": rejected}
        row |= {"text": text, "group": draw(st.none() | WORDS), "source": "x", "line": line}
        rows.append({**row, "meta": json.dumps(meta, ensure_ascii=False, sort_keys=True)})
    return records(rows)


@ours
@given(tables(), st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet"]))
def test_what_is_exported_reads_back(tmp_path: Path, table: pa.Table, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.unlink(missing_ok=True)
    export(table, path)
    back = concat(list(read(path, name="x")))
    kept = [name for name in RECORD.names if name != "line"]
    assert back.select(kept).to_pylist() == table.select(kept).to_pylist()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_what_was_once_found(tmp_path: Path, name: str) -> None:
    for content in (
        b'{"messages": "[{\\"role\\": \\"\\\\ud800\\"}]"}',
        b'{"text": "a", "meta": "' + b"[" * 500 + b'"}',
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'text\n"a\rb',
    ):
        (tmp_path / name).write_bytes(content)
        look(tmp_path / name)
