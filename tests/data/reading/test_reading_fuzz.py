"""Reading any file gives records or clear error messages; exported files read back."""

import gzip
import io
import json
import re
from dataclasses import dataclass
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data.reading.reader import check_file, read, scan_records
from posttrain.data.reading.rows import MAX_MESSAGE, Problem, is_utf16
from posttrain.data.records.record import RECORD, assign_ids, concat, content_ids, records
from posttrain.data.versions.export import export_file
from posttrain.store.errors import UserError

fuzz_settings = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

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


@dataclass(frozen=True)
class Outcome:
    """The result of reading a file.

    Attributes:
        records: RECORD table of what `read` gave before it raised.
        refusal: the message that it raised; None if it did not.
        problems: the problems of `scan_records`, in its order.
        check_problems: the problems of `check_file`, in its order.
    """

    records: pa.Table
    refusal: str | None
    problems: list[Problem]
    check_problems: list[Problem]


def outcome(path: Path) -> Outcome:
    """Read, scan and check a file; any exception but a UserError of `read` goes through."""
    tables, refusal = [], None
    try:
        for table in read(path, name=path.name, batch=1):
            tables.append(table)  # a list(...) would lose the tables before the error
    except UserError as error:
        refusal = str(error)
    problems = [item for item in scan_records(path, name=path.name) if isinstance(item, Problem)]
    return Outcome(concat(tables), refusal, problems, check_file(path, labels=["a"], name=path.name))


def assert_sound(result: Outcome, name: str) -> None:
    """The records and the refusal are well formed, and `read`, `scan_records` and `check_file` agree."""
    records, lines = result.records, result.records["line"].to_pylist()
    assert records.schema == RECORD
    records.validate(full=True)
    assert all(re.fullmatch("[0-9a-f]{20}", id) for id in records["id"].to_pylist() + records["input_id"].to_pylist())
    assert assign_ids(records).equals(records)
    assert set(records["source"].to_pylist()) <= {name}
    assert lines == sorted(lines)
    if not re.search(r"\.json\b", name):  # an array may stand on one line
        assert len(lines) == len(set(lines))
    first = next((problem for problem in result.problems if problem.blocking), None)
    # The refusal is the first problem, and may count others of its kind.
    assert (result.refusal is None) == (first is None)
    if first is not None:
        place = first.file if first.line is None else f"{first.file}:{first.line}"
        assert str(result.refusal).startswith(f"{place}: {first.message[:100]}")
        assert first.fix is None or first.fix[:100] in str(result.refusal)
    assert records.num_rows or result.problems
    for problem in result.check_problems:
        location, message = name if problem.line is None else f"{name}:{problem.line}", str(problem.error())
        assert message.startswith(f"{location}: ")
        assert message.isprintable(), "one line"
        assert len(message) < 2 * MAX_MESSAGE + 100
    about_records = {"unknown label", "duplicate", "conflicting labels"}
    assert [problem for problem in result.check_problems if problem.kind not in about_records] == result.problems


def contents(result: Outcome) -> list[dict[str, Any]]:
    """The records without their source and line."""
    return list(result.records.drop_columns(["source", "line"]).to_pylist())


def reported_lines(path: Path) -> list[int]:
    """The line of every record, and of every problem that has one."""
    lines = [item.line if isinstance(item, Problem) else item["line"] for item in scan_records(path)]
    return [line for line in lines if line is not None]


def kinds(result: Outcome) -> list[str]:
    return [problem.kind for problem in result.problems]


@fuzz_settings
@given(CONTENT, st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.zst"]))
def test_any_bytes(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    result = outcome(tmp_path / name)
    assert_sound(result, name)
    assert result.records.num_rows <= content.count(b"\n") + content.count(b"{") + content.count(b"\r") + 1
    if name.endswith((".parquet", ".gz", ".zst")):  # random bytes are no such file
        assert kinds(result) == ["damaged file"] if content else len(result.problems) == 1
    # A first line that opens an array is refused for the whole file, once.
    is_array = content.removeprefix(b"\xef\xbb\xbf").startswith(b"[")
    if name == "a.jsonl" and not is_utf16(content) and not is_array:
        assert len(reported_lines(tmp_path / name)) == sum(bool(line.strip()) for line in content.split(b"\n"))


@fuzz_settings
@given(CONTENT, st.integers(0, 400), st.sampled_from(["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.jsonl.zst"]))
def test_any_truncated_compressed_bytes(tmp_path: Path, content: bytes, stop: int, name: str) -> None:
    compressed = gzip.compress(content) if name.endswith("gz") else pa.compress(content, codec="zstd", asbytes=True)
    (tmp_path / name).write_bytes(bytes(compressed)[:stop])
    plain = tmp_path / name.rpartition(".")[0]
    plain.write_bytes(content)
    result, expected = outcome(tmp_path / name), outcome(plain)
    assert_sound(result, name)
    if stop < len(compressed):
        assert result.refusal is not None
        assert contents(result) == contents(expected)[: result.records.num_rows]
    else:
        assert contents(result) == contents(expected)
        assert kinds(result) == kinds(expected)


@pytest.mark.slow
@fuzz_settings
@given(ROWS)
def test_any_json_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    array, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    array.write_text(json.dumps(rows))
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_line, by_array = outcome(lines), outcome(array)
    assert_sound(by_line, lines.name)
    assert_sound(by_array, array.name)
    assert reported_lines(lines) == list(range(1, len(rows) + 1))
    assert contents(by_line) == contents(by_array)


@fuzz_settings
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=3), st.data())
def test_damaged_parquet(tmp_path: Path, blocks: list[bytes], data: st.DataObject) -> None:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "n": [1.5, None]}), sink)
    content = bytearray(sink.getvalue())
    for block in blocks:
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + len(block)] = block
    (tmp_path / "a.parquet").write_bytes(bytes(content))
    result = outcome(tmp_path / "a.parquet")
    assert_sound(result, "a.parquet")
    assert (result.refusal is None) == (not result.problems)
    if bytes(content) == sink.getvalue():
        assert result.records["text"].to_pylist() == ["a", "b"]
        assert result.records["line"].to_pylist() == [1, 2]
        assert not result.problems


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12).filter(
    # Reading refuses these as answers: programs write them for missing values.
    lambda text: not text.isspace() and text not in ("nan", "NaN", "NAN")
)
PROMPTS = st.tuples(
    st.lists(st.just("system"), max_size=1), st.lists(st.sampled_from(["user", "assistant"]), max_size=2)
).flatmap(
    lambda roles: st.tuples(
        *(st.fixed_dictionaries({"role": st.just(role), "content": TEXTS}) for role in (*roles[0], *roles[1], "user"))
    ).map(list)
)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """RECORD tables of one shape, as reading gives them."""
    shape = draw(st.sampled_from(["text", "prompt", "preference"]))
    rows = []
    for line in range(1, draw(st.integers(1, 4)) + 1):
        prompt = None if shape == "text" else draw(PROMPTS)
        text = draw(TEXTS) if shape == "text" else None
        completion = draw(TEXTS if shape == "preference" else st.none() | TEXTS) if shape != "text" else None
        # Reading skips pairs of equal answers.
        rejected = draw(TEXTS.filter(partial(ne, completion))) if shape == "preference" else None
        id, input_id = content_ids(prompt, completion, rejected, text)
        meta = draw(st.dictionaries(st.sampled_from("abc"), st.integers() | TEXTS, max_size=2))
        row = {"id": id, "input_id": input_id, "prompt": prompt, "completion": completion, "rejected": rejected}
        row |= {"text": text, "group": draw(st.none() | TEXTS), "source": "x", "line": line}
        rows.append({**row, "meta": json.dumps(meta, ensure_ascii=False, sort_keys=True)})
    return records(rows)


@pytest.mark.slow
@fuzz_settings
@given(tables(), st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet"]))
def test_exported_tables_read_back(tmp_path: Path, table: pa.Table, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.unlink(missing_ok=True)
    export_file(table, path)
    result = concat(list(read(path, name="x")))
    columns = [name for name in RECORD.names if name != "line"]
    assert result.select(columns).to_pylist() == table.select(columns).to_pylist()


TURN_WITHOUT_UNICODE = b'[{"role": "\\ud800"}]'
DEEP_TEXT = b'{"text": "a", "meta": "' + b"[" * 500 + b'"}'
DEEP_OBJECT = b'{"a":' * 300 + b"1" + b"}" * 300
OPEN_QUOTE = b'text\n"a\rb'
NO_RECORDS = "the file holds no records; put records into it, or name another file"


@pytest.mark.parametrize(
    ("name", "content", "refusals"),
    [
        ("a.jsonl", b'{"messages": %s}' % json.dumps(TURN_WITHOUT_UNICODE.decode()).encode(), [
            ":1: `messages` must be a list of turns with `role` and `content`",
        ]),
        ("a.csv", b'messages\n"%s"' % TURN_WITHOUT_UNICODE.replace(b'"', b'""'), [
            ":2: `messages` must be a list of turns with `role` and `content`",
        ]),
        ("a.json", DEEP_OBJECT, [":1: broken JSON: nested too deeply (over 100 levels)"]),
        ("a.jsonl", DEEP_OBJECT, [":1: broken JSON: nested too deeply (over 100 levels)"]),
        ("a.csv", DEEP_OBJECT, [f": {NO_RECORDS}"]),
        ("a.tsv", DEEP_TEXT, [f": {NO_RECORDS}"]),
        ("a.jsonl", OPEN_QUOTE, [
            ":1: broken JSON: Expecting value (column 1)", ":2: broken JSON: Invalid control character at (column 3)",
        ]),
        ("a.csv", OPEN_QUOTE, [":2: broken CSV: a quoted field never closes; quote fields that hold the delimiter"]),
    ],
)  # fmt: skip
def test_files_of_past_failures_are_refused(tmp_path: Path, name: str, content: bytes, refusals: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    result = outcome(tmp_path / name)
    assert_sound(result, name)
    assert [str(problem.error()) for problem in result.problems] == [f"{name}{refusal}" for refusal in refusals]
    assert result.records.num_rows == 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_text_of_many_brackets_is_a_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(DEEP_TEXT)
    result = outcome(tmp_path / name)
    assert result.problems == []
    assert result.records["text"].to_pylist() == ["a"]
    assert result.records["meta"].to_pylist() == [json.dumps({"meta": "[" * 500})]
