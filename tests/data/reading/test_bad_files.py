"""Each bad file raises one line that names the problem, its position and the fix; `check_file` finds every problem."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from posttrain.data.reading.reader import check_file, read
from posttrain.data.records.record import concat
from posttrain.store.errors import UserError

COLUMNS = {"prompt": "text", "completion": "category"}
USER = {"role": "user", "content": "a"}
GOOD = '{"prompt": "a", "completion": "b"}\n'


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


BAD = [
    ("a.jsonl", b"", None, "a.jsonl: the file holds no records"),
    ("a.jsonl", b"\n \n", None, "a.jsonl: the file holds no records"),
    ("a.csv", b"", None, "a.csv: the file holds no records"),
    ("a.csv", b"text,category\n", None, "a.csv: the file holds no records"),
    ("a.json", b"[]", None, "a.json: the file holds no records"),
    ("a.parquet", b"", None, "a.parquet: the file holds no records"),
    ("a.parquet", b"PAR1 but not really", None, "a.parquet: cannot be read: "),
    ("a.xlsx", b"x", None, "a.xlsx: `.xlsx` is not a format we read; use one of .jsonl, .json, .csv, .tsv"),
    (
        "a.jsonl",
        GOOD.encode() + b'\n{"prompt": \n',
        None,
        "a.jsonl:3: broken JSON: Expecting value (column 11)",
    ),
    ("a.jsonl", b'{"prompt": "a", "score": NaN}\n', None, "a.jsonl:1: broken JSON: `NaN` is not JSON"),
    ("a.jsonl", b"[" * 100_000 + b"\n", None, "a.jsonl:1: broken JSON: nested too deeply"),
    ("a.jsonl", b'["a"]\n', None, "a.jsonl:1: a record must be a JSON object"),
    ("a.json", b'[\n{"text": "a"},\n{"text" "b"}]', None, "a.json:3: broken JSON: Expecting ':'"),
    ("a.json", b'[\n{"text": "a"}\n\n{"text": "b"}]', None, "a.json:4: broken JSON: `,` or `]` expected"),
    ("a.json", b'[\n{"text": "a"},\n', None, "a.json:3: broken JSON"),
    ("a.json", b'[{"text": "a"}]\nmore', None, "a.json:1: something follows the end of the array"),
    (
        "a.jsonl",
        GOOD.encode() + b'{"prompt": "caf\xe9"}\n',
        None,
        "a.jsonl:2: holds bytes that are not UTF-8",
    ),
    ("a.json", b'[{"text": "a"},\n{"text": "caf\xe9"}]', None, "a.json:2: holds bytes that are not UTF-8"),
    ("a.csv", b"prompt\none\ncaf\xe9\n", None, "a.csv:3: holds bytes or characters that are not UTF-8"),
    ("a.csv", "prompt\nx".encode("utf-16"), None, "a.csv:1: the file is UTF-16, not UTF-8"),
    ("a.jsonl", '{"prompt": "x"}'.encode("utf-16"), None, "a.jsonl:1: the file is UTF-16, not UTF-8"),
    ("a.jsonl", b'{"prompt": "\\ud800"}\n', None, "a.jsonl:1: holds bytes or characters that are not UTF-8"),
    (
        "a.jsonl",
        jsonl({"prompt": "a"}, {"prompt": "b"}, {"text": "c"}),
        None,
        "a.jsonl:3: has the shape `text`, but line 1 has the shape `prompt`; keep one shape in one file",
    ),
    (
        "a.jsonl",
        jsonl({"promt": "a"}),
        None,
        "a.jsonl:1: the columns promt are not a shape that we know; did you",
    ),
    ("a.csv", b"question,reply\na,b\n", None, "a.csv:1: the columns question, reply are not a shape"),
    (
        "a.csv",
        b"txt,category\na,b\n",
        COLUMNS,
        "a.csv:1: there is no column `text`; the columns are txt, category; did you mean `txt`?",
    ),
    (
        "a.jsonl",
        jsonl({"text": "a", "category": "b"}, {"text": "c"}),
        COLUMNS,
        "a.jsonl:2: there is no column `category`",
    ),
    ("a.jsonl", jsonl({"prompt": 7}), None, "a.jsonl:1: `prompt` is not text but int 7"),
    ("a.jsonl", jsonl({"prompt": None}), None, "a.jsonl:1: `prompt` is missing or null"),
    (
        "a.jsonl",
        jsonl({"prompt": "a", "completion": 3}),
        None,
        "a.jsonl:1: `completion` is not text but int 3",
    ),
    ("a.jsonl", jsonl({"prompt": "a", "group": [1]}), None, "a.jsonl:1: the group `[1]` is neither"),
    ("a.csv", b"prompt,completion\na,b\n  ,b\n", None, "a.csv:3: the prompt is empty"),
    ("a.jsonl", jsonl({"text": " "}), None, "a.jsonl:1: `text` is empty"),
    (
        "a.jsonl",
        jsonl({"prompt": "a", "chosen": "b", "rejected": ""}),
        None,
        "a.jsonl:1: `rejected` is empty",
    ),
    (
        "a.jsonl",
        jsonl({"messages": [{"role": "usr", "content": "a"}]}),
        None,
        "a.jsonl:1: turn 1 of `messages` has the role `usr`; did you mean `user`?",
    ),
    (
        "a.jsonl",
        jsonl({"messages": [{"role": "assistant", "content": "a"}]}),
        None,
        "a.jsonl:1: no user turn stands before the answer",
    ),
    (
        "a.jsonl",
        jsonl({"messages": [USER, {"role": "system", "content": "b"}, USER]}),
        None,
        "a.jsonl:1: a system turn can only be the first",
    ),
    ("a.jsonl", jsonl({"messages": []}), None, "a.jsonl:1: `messages` must be a list of turns"),
    ("a.jsonl", jsonl({"messages": "hello"}), None, "a.jsonl:1: `messages` must be a list of turns"),
    (
        "a.jsonl",
        jsonl({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [1]}]}),
        None,
        "a.jsonl:1: turn 2 of `messages` has `tool_calls`, which records cannot hold",
    ),
    ("a.csv", b'prompt,completion\n"a\nb",c\nd\n', None, "a.csv:4: 1 fields where the header names 2"),
    (
        "a.csv",
        b"prompt,completion\na,b,c\n",
        None,
        "a.csv:2: 3 fields where the header names 2; quote fields",
    ),
    (
        "a.csv",
        b'prompt,completion\na,b\n"c,d\ne,f\n',
        None,
        "a.csv:3: broken CSV: a quoted field never closes",
    ),
    ("a.csv", b"prompt,prompt\na,b\n", None, "a.csv:1: column `prompt` stands in the header twice"),
    (
        "a.csv",
        b'prompt,completion\n"a\nb","c\nd\ne,f\n',
        None,
        "a.csv:3: broken CSV: a quoted field never closes; quote fields",
    ),
    ("a.csv", b'prompt,completion\n"a\nb","c"d\n', None, "a.csv:3: broken CSV: ',' expected after '\"'"),
    (
        "a.csv",
        b'prompt,completion\na,b\n"c,d\ne,f\ng",h,i\n',
        None,
        "a.csv:3: 3 fields where the header names 2, in a row that runs to line 5; is the quote meant that opens on",
    ),
    ("a.csv", b"prompt\ra\rb\r", None, "a.csv:1: broken CSV: a carriage return ends no line here"),
    ("a.csv", b"prompt\na\0b\n", None, "a.csv:2: `prompt` holds a NUL character"),
    ("a.csv", "prompt\nx".encode("utf-16-le"), None, "a.csv:1: the file is UTF-16, not UTF-8"),
    ("a.jsonl", '{"prompt": "x"}'.encode("utf-16-be"), None, "a.jsonl:1: the file is UTF-16, not UTF-8"),
    ("a.jsonl", GOOD.encode() + b'{"prompt": "a\0b"}\n', None, "a.jsonl:2: holds a NUL character"),
    ("a.jsonl", b'{"prompt": "a\\u0000b"}\n', None, "a.jsonl:1: `prompt` holds a NUL character"),
    ("a.json", b'[{"text": "a"},\n\0]', None, "a.json:2: holds a NUL character"),
    ("a.json", b'[{"text": "a\\ud800"}]', None, "a.json:1: holds bytes or characters that are not UTF-8"),
    ("a.jsonl", b'{"text": "a", "n": %s}\n' % (b"9" * 5000), None, "a.jsonl:1: broken JSON: a number has thousands"),
    ("a.json", b'[{"text": "a", "n": %s}]\n' % (b"9" * 5000), None, "a.json:1: broken JSON: a number has thousands"),
    (
        "a.jsonl",
        b'{"text": "a", "n": ' + b"[" * 101 + b"]" * 101 + b"}\n",
        None,
        "a.jsonl:1: broken JSON: nested too deeply (over 100 levels)",
    ),
    (
        "a.jsonl",
        jsonl({"id": 1, "text": "a"}, {"id": 2, "text": "b"}, {"id": 1, "text": "c"}),
        None,
        "a.jsonl:3: the id `1` also occurs on line 1, with other content; give every record an id of its own",
    ),
    ("a.csv", b"id,text\nx,a\ny,c\nx,b\n", None, "a.csv:4: the id `x` also occurs on line 2, with other content"),
    (
        "a.jsonl",
        jsonl({f"column {number}": "a" for number in range(10_000)}),
        None,
        "a.jsonl:1: there are 10,000 columns; the most that are read are 1,000; keep those that the records are made",
    ),
    ("a.jsonl", b'{"prompt": "a", "prompt": "b"}\n', None, "a.jsonl:1: the key `prompt` occurs twice in one object"),
    (
        "a.jsonl",
        GOOD.encode() + b'{"messages": [{"role": "user", "content": "a: b", "content" : "c"}]}\n',
        None,
        "a.jsonl:2: the key `content` occurs twice in one object; keep the right one",
    ),
    (
        "a.json",
        b'[{"text": "a"},\n{"text": "a",\n "text" \n : "b"}]',
        None,
        "a.json:2: the key `text` occurs twice in one object",
    ),
    (
        "a.jsonl",
        b'[{"text": "a"},\n{"text": "b"}]\n',
        None,
        "a.jsonl:1: broken JSON: the file is not JSON lines but one array",
    ),
    (
        "a.jsonl",
        b'[{"text": "a"}]\n',
        None,
        "a.jsonl:1: a record must be a JSON object, and this is an array; a file that",
    ),
    (
        "a.csv",
        b"prompt,completion\na,b\nc,NaN\n",
        None,
        "a.csv:3: the answer is NaN, which is not text but a missing number",
    ),
    (
        "a.jsonl",
        jsonl({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]}),
        None,
        "a.jsonl:1: turn 2 of `conversations` calls a tool (`function_call`), which records cannot hold; leave such",
    ),
    (
        "a.jsonl",
        jsonl({"prompt": "a", "history": "b"}),
        None,
        "a.jsonl:1: `history` is not a list of earlier questions",
    ),
    (
        "a.jsonl",
        jsonl({"system": "a", "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}),
        None,
        "a.jsonl:1: the column `system` and the system turn of the conversation differ; keep one of them",
    ),
    (
        "a.jsonl",
        jsonl({"prompt": "a", "completion": "b", "system": 3}),
        None,
        "a.jsonl:1: `system` is not text but int",
    ),
    ("a.jsonl", jsonl({"a\nb" * 100: 1}), None, "a.jsonl:1: the columns a ba ba b"),
    ("a.jsonl", jsonl({"prompt": {"a": "b" * 10_000}}), None, 'a.jsonl:1: `prompt` is not text but dict {"a": "bbb'),
    ("a.jsonl", jsonl({}), COLUMNS, "a.jsonl:1: there is no column `text`; the columns are (none)"),
]


@pytest.mark.parametrize(("name", "content", "columns", "line"), BAD, ids=[case[3][:50] for case in BAD])
def test_a_bad_file_raises_one_clear_line(
    tmp_path: Path, name: str, content: bytes, columns: dict[str, str] | None, line: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read(path, columns, name=name))
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    problems = check_file(path, columns, name=name)
    assert str(error.value) == str(problems[0].error())


def test_a_folder_without_data_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data: the folder holds no \.arrow files; name a file, or a folder"):
        list(read(tmp_path, name="data"))


def test_a_folder_with_a_damaged_state_raises(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json does not list the data files"):
        list(read(tmp_path, name="data"))


def test_a_folder_whose_state_points_outside_raises(tmp_path: Path) -> None:
    (tmp_path / "secret.arrow").write_bytes(b"x")
    inner = tmp_path / "data"
    inner.mkdir()
    (inner / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(UserError, match=r"^data: cannot be read: .*data/secret\.arrow"):
        list(read(inner, name="data"))


def test_numbers_in_parquet_raise(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": ["a", "b"], "completion": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^a\.parquet:1: `completion` is not text but int 1 \(and 1 more"):
        list(read(tmp_path / "a.parquet", name="a.parquet"))


def test_nan_labels_raise(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "completion": [float("nan"), 1.0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^a\.parquet:1: `completion` is NaN, not text; fill it in, or leave it empty"):
        list(read(tmp_path / "a.parquet", name="a.parquet"))
    (tmp_path / "a.csv").write_text("prompt,completion\na,nan\nb,\nc,Nan called\n")
    assert [(problem.line, problem.kind) for problem in check_file(tmp_path / "a.csv")] == [
        (2, "NaN"),
        (3, "no answer"),
    ]


def test_nan_is_a_text_where_the_format_has_null(tmp_path: Path) -> None:
    rows = [{"prompt": "Min Nan", "completion": "nan"}, {"prompt": "not a number", "completion": "NaN"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(*rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert concat(list(read(tmp_path / name)))["completion"].to_pylist() == ["nan", "NaN"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_thousand_columns_are_read_and_more_are_refused(tmp_path: Path, suffix: str) -> None:
    for count in (1_000, 1_001):
        row = {"text": "a", **{f"column {number}": "b" for number in range(count - 1)}}
        path = tmp_path / f"{count}.{suffix}"
        match suffix:
            case "jsonl":
                path.write_bytes(jsonl(row))
            case "csv":
                path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
            case "parquet":
                pyarrow.parquet.write_table(pa.Table.from_pylist([row]), path)
    assert len(json.loads(concat(list(read(tmp_path / f"1000.{suffix}")))["meta"][0].as_py())) == 999
    [problem] = check_file(tmp_path / f"1001.{suffix}")
    assert (problem.line, problem.kind) == (1, "too many columns")


def test_keys_and_colons_in_texts_are_no_repeated_keys(tmp_path: Path) -> None:
    rows = [
        {"text": 'a: "b": c', "meta": {"text": "d", "deep": [[{"text": 1}, {"text": 2}]]}},
        {"text": '{"text": 1, "text": 2}'},
    ]
    (tmp_path / "a.jsonl").write_bytes(jsonl(*rows))
    assert concat(list(read(tmp_path / "a.jsonl")))["text"].to_pylist() == [row["text"] for row in rows]


def test_a_missing_file_raises_before_the_first_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^nope\.jsonl: there is no such file; check the path$"):
        read(tmp_path / "nope.jsonl", name="nope.jsonl")
    with pytest.raises(UserError, match=r"check the path; a dataset of the Hub is hub:owner/name:SPLIT$"):
        read(tmp_path / "owner/name", name="owner/name")


def test_missing_answers_are_reported_only_beside_others(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": ""}, {"prompt": "c"}]
    for name, part in (("mixed", rows), ("inputs", rows[1:3])):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*part))
    problems = check_file(tmp_path / "mixed.jsonl")
    assert [(problem.line, problem.kind, problem.blocking) for problem in problems] == [
        (2, "no answer", False),
        (3, "no answer", False),
    ]
    assert check_file(tmp_path / "inputs.jsonl") == []


def test_a_gzip_file_cut_in_its_first_line_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 100)[:20])
    [problem] = check_file(tmp_path / "a.jsonl.gz")
    assert (problem.line, problem.fix) == (1, "get the file again")


def test_one_id_with_equal_content_is_a_duplicate(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"id": 1, "text": "a"}, {"id": "1", "text": " a"}, {"id": 1, "text": "b"}))
    result = [(problem.line, problem.kind) for problem in check_file(tmp_path / "a.jsonl")]
    assert result == [(2, "duplicate"), (3, "duplicate id")]


def test_byte_order_marks_and_windows_line_ends(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": b'{"text": "a"}\r\n{"text": "b"}\r\n',
        "a.json": b'[{"text": "a"},\r\n{"text": "b"}]\r\n',
        "a.csv": b'text\r\n"a"\r\nb\r\n',
    }.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert concat(list(read(tmp_path / name)))["text"].to_pylist() == ["a", "b"]


def test_equal_records_on_one_line_are_duplicates(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "a"}]')
    assert [problem.kind for problem in check_file(tmp_path / "a.json")] == ["duplicate"]


def test_repeated_columns_in_parquet_raise(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^a\.parquet:1: a column stands there twice"):
        list(read(tmp_path / "a.parquet", name="a.parquet"))


def test_a_damaged_column_name_in_parquet_raises(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet", store_schema=False)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes().replace(b"text", b"\x80ext"))
    with pytest.raises(UserError, match=r"^a\.parquet: cannot be read: "):
        list(read(tmp_path / "a.parquet", name="a.parquet"))


def test_a_damaged_arrow_file_raises(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"ARROW1\0\0 not really")
    with pytest.raises(UserError, match=r"^data: cannot be read: "):
        list(read(tmp_path, name="data"))


def test_check_finds_every_planted_problem(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "one", "completion": "card"}',
        b'{"prompt": "two", "completion": "crad"}',
        b'{"prompt": ',
        b'{"text": "three"}',
        b'{"prompt": " one ", "completion": "card"}',
        b'{"prompt": "", "completion": "card"}',
        b'{"prompt": "one", "completion": "cash"}',
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "four", "completion": "cash"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    result = [(problem.line, problem.kind) for problem in check_file(tmp_path / "a.jsonl", labels=["card", "cash"])]
    assert result == [
        (2, "unknown label"),
        (3, "broken JSON"),
        (4, "mixed shapes"),
        (5, "duplicate"),
        (6, "empty prompt"),
        (7, "conflicting labels"),
        (8, "encoding"),
    ]


def test_check_names_the_nearest_label_and_the_first_of_duplicates(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\nx,crad\ny,card\ny,card\ny,cash\n")
    result = [str(problem.error()) for problem in check_file(tmp_path / "a.csv", labels=["cash", "card"], name="a.csv")]
    assert result == [
        "a.csv:2: label `crad` is not in the label set; did you mean `card`?",
        "a.csv:4: the same record as line 3; only the first is used",
        "a.csv:5: the same input is `cash` here and `card` on line 3; keep the right one",
    ]


def test_check_continues_after_a_bad_csv_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\na"b,c\n"d"e,f\ng\nh,i\n\xff,j\nk,l\n')
    result = [(problem.line, problem.kind) for problem in check_file(tmp_path / "a.csv")]
    assert result == [(3, "broken CSV"), (4, "broken CSV"), (6, "encoding")]


def test_check_of_a_good_file_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    assert check_file(tmp_path / "a.jsonl", labels=["b"]) == []
