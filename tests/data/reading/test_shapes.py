"""Every shape in every format becomes the same records."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from posttrain.data.reading.memory import read_memory
from posttrain.data.reading.reader import check_file, read
from posttrain.data.reading.rows import Problem
from posttrain.data.records.record import RECORD, concat
from posttrain.store.errors import UserError

USER = {"role": "user", "content": "Where is it?"}
SYSTEM = {"role": "system", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "Here."}


def read_row(folder: Path, row: dict[str, Any], columns: dict[str, str] | None = None) -> dict[str, Any]:
    path = folder / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    table = concat(list(read(path, columns)))
    assert table.num_rows == 1
    return dict(table.to_pylist()[0])


@pytest.mark.parametrize(
    ("row", "prompt", "completion", "rejected"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER], "Here.", None),
        ({"messages": [USER]}, [USER], None, None),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER], "Here.", None),
        ({"prompt": "Where is it?", "completion": "Here."}, [USER], "Here.", None),
        ({"prompt": "Where is it?"}, [USER], None, None),
        ({"prompt": "Where is it?", "completion": " "}, [USER], None, None),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER], "Here.", None),
        ({"prompt": "Where is it?", "chosen": "Here.", "rejected": "No."}, [USER], "Here.", "No."),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]},
            [USER],
            "Here.",
            "No.",
        ),
        (
            {
                "prompt": "Where is it?",
                "chosen": [USER, ANSWER],
                "rejected": [USER, {**ANSWER, "content": "No."}],
            },
            [USER],
            "Here.",
            "No.",
        ),
        (
            {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, {**ANSWER, "content": "No."}]},
            [SYSTEM, USER],
            "Here.",
            "No.",
        ),
        ({"instruction": "Where is it?", "input": "", "output": "Here."}, [USER], "Here.", None),
        (
            {"instruction": "Where is it?", "input": "A box.", "output": "Here."},
            [{"role": "user", "content": "Where is it?\n\nA box."}],
            "Here.",
            None,
        ),
        ({"messages": [{**SYSTEM, "role": "developer"}, USER, ANSWER]}, [SYSTEM, USER], "Here.", None),
        (
            {"conversations": [{"from": "developer", "value": "Be kind."}, {"from": "human", "value": "Where is it?"}]},
            [SYSTEM, USER],
            None,
            None,
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Where is it?"},
                    {"from": "gpt", "value": "Here."},
                ]
            },
            [USER],
            "Here.",
            None,
        ),
    ],
)
def test_a_shape_becomes_turns_and_answers(
    tmp_path: Path,
    row: dict[str, Any],
    prompt: list[dict[str, str]],
    completion: str | None,
    rejected: str | None,
) -> None:
    record = read_row(tmp_path, row)
    assert (record["prompt"], record["completion"], record["rejected"]) == (prompt, completion, rejected)
    assert record["text"] is None
    assert record["line"] == 1
    assert record["source"].endswith("one.jsonl")


def test_plain_text_has_no_prompt(tmp_path: Path) -> None:
    record = read_row(tmp_path, {"text": "Once."})
    assert (record["text"], record["prompt"], record["completion"]) == ("Once.", None, None)


def test_unmapped_columns_become_meta(tmp_path: Path) -> None:
    row = {"text": "Where is it?", "category": "place", "user": 7, "time": 1.5, "prompt": "not meant"}
    record = read_row(tmp_path, row, {"prompt": "text", "completion": "category", "group": "user"})
    assert (record["prompt"], record["completion"], record["group"]) == ([USER], "place", "7")
    assert json.loads(record["meta"]) == {"time": 1.5, "prompt": "not meant"}


def test_other_keys_of_turns_become_meta(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi", "weight": 0}, {"from": "gpt", "value": "Yes", "weight": None}]
    assert json.loads(read_row(tmp_path, {"conversations": turns})["meta"]) == {"turns": [{"weight": 0}, {}]}


def test_ids_ignore_only_whitespace_and_unicode_form(tmp_path: Path) -> None:
    variants = [
        read_row(tmp_path, {"prompt": text, "completion": "a"})
        for text in ("Caf\u00e9  au lait ", "Cafe\u0301 au\nlait")
    ]
    assert variants[0]["id"] == variants[1]["id"]
    assert variants[0]["prompt"][0]["content"] == "Caf\u00e9  au lait "
    lower_case = read_row(tmp_path, {"prompt": "caf\u00e9 au lait", "completion": "a"})
    other_answer = read_row(tmp_path, {"prompt": "Caf\u00e9 au lait", "completion": "b"})
    assert len({variants[0]["id"], lower_case["id"], other_answer["id"]}) == 3
    assert variants[0]["input_id"] == other_answer["input_id"] != lower_case["input_id"]


def test_ids_do_not_change_between_releases(tmp_path: Path) -> None:
    record = read_row(tmp_path, {"prompt": "Where is it?", "completion": "Here."})
    assert (record["id"], record["input_id"]) == ("c7a058419224a98720a2", "95d920a6d2c700ce71c4")


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    rows = [{"prompt": f'question {n}, "{n}"\nplease', "completion": f"answer {n}"} for n in range(5)]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    cells = [[row["prompt"].replace('"', '""'), row["completion"]] for row in rows]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        lines = [f"prompt{delimiter}completion", *(f'"{q}"{delimiter}{a}' for q, a in cells)]
        (tmp_path / name).write_text("\ufeff" + "\n".join(lines))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = tmp_path / "saved"
    dataset.mkdir()
    for part, name in enumerate(("z.arrow", "b.arrow")):
        with pyarrow.ipc.new_stream(dataset / name, table.schema) as writer:
            writer.write_table(table.slice(3 * part, 3))
    (dataset / "cache-1.arrow").write_bytes(b"")
    (dataset / "state.json").write_text(json.dumps({"_data_files": [{"filename": "z.arrow"}, {"filename": "b.arrow"}]}))
    plain = tmp_path / "plain"
    plain.mkdir()
    with pyarrow.ipc.new_file(plain / "all.arrow", table.schema) as writer:
        writer.write_table(table)
    names = ["a.jsonl", "a.json", "lines.json", "a.csv", "a.tsv", "a.parquet", "saved", "plain"]
    ids = {name: concat(list(read(tmp_path / name)))["id"].to_pylist() for name in names}
    assert len(set(ids["a.jsonl"])) == 5
    assert all(result == ids["a.jsonl"] for result in ids.values())


def test_line_numbers_match_those_of_an_editor(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\n"one\ntwo\nthree",a\n\nfour,b\r\nfive,c\n')
    assert concat(list(read(tmp_path / "a.csv")))["line"].to_pylist() == [2, 6, 7]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert concat(list(read(tmp_path / "a.jsonl")))["line"].to_pylist() == [1, 3]
    (tmp_path / "a.json").write_text('[\n {"text":\n "a"},\n\n {"text": "b"}, {"text": "c"}\n]')
    assert concat(list(read(tmp_path / "a.json")))["line"].to_pylist() == [2, 5, 5]


def test_a_dataset_of_several_splits_raises_and_names_them(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"text": "a"}])
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        with pyarrow.ipc.new_stream(tmp_path / split / "data.arrow", table.schema) as writer:
            writer.write_table(table)
        (tmp_path / split / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds the splits test, train; name one of them, such as hub/test"):
        list(read(tmp_path, name="hub"))
    assert concat(list(read(tmp_path / "train")))["text"].to_pylist() == ["a"]


def test_the_batch_size_bounds_the_tables_and_changes_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(10)))
    tables = list(read(tmp_path / "a.jsonl", batch=4))
    assert [table.num_rows for table in tables] == [4, 4, 2]
    assert all(table.schema == RECORD for table in tables)
    assert concat(tables).equals(concat(list(read(tmp_path / "a.jsonl"))))


def test_a_pool_may_lack_the_answer_column(tmp_path: Path) -> None:
    (tmp_path / "pool.csv").write_text("text\nhello\n")
    columns = {"prompt": "text", "completion": "category"}
    assert concat(list(read(tmp_path / "pool.csv", columns, answers=False)))["completion"].to_pylist() == [None]
    with pytest.raises(UserError, match="no column `category`"):
        list(read(tmp_path / "pool.csv", columns))


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ({"group": "user"}, {"prompt": "Hello", "completion": "Hi", "user": "anna"}, ("Hi", "anna", "{}")),
        ({"completion": "label"}, {"prompt": "Hello", "label": "greeting", "n": 1}, ("greeting", None, '{"n": 1}')),
        (
            {"completion": "label"},
            {"prompt": "Hello", "label": "greeting", "completion": "Hi", "group": "g"},
            ("greeting", "g", '{"completion": "Hi"}'),
        ),
        ({"prompt": "text"}, {"text": "Hello", "completion": "Hi"}, (None, None, '{"completion": "Hi"}')),
    ],
)
def test_columns_outside_the_mapping_are_recognised(
    tmp_path: Path, columns: dict[str, str], row: dict[str, Any], expected: tuple[str | None, ...]
) -> None:
    record = read_row(tmp_path, row, columns)
    assert (record["completion"], record["group"], record["meta"]) == expected
    assert record["prompt"][0]["content"] == "Hello"


@pytest.mark.parametrize(
    ("columns", "row"),
    [({"completion": "label"}, {"text": "Hello", "label": "a"}), ({"group": "user"}, {"said": "Hello", "user": "a"})],
)
def test_a_mapped_column_without_a_place_in_any_shape_raises(
    tmp_path: Path, columns: dict[str, str], row: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r":1: `columns` maps only \w+, and the columns .* are not a shape that we know; map"
    ):
        read_row(tmp_path, row, columns)


def test_map_columns_and_bytes_become_json(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", "b"],
            "scores": pa.array([[("x", 1), ("y", 2)], None], pa.map_(pa.string(), pa.int64())),
            "raw": pa.array([b"caf\xc3\xa9", b"\xff\x00"], pa.binary()),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    metas = [json.loads(meta) for meta in concat(list(read(tmp_path / "a.parquet")))["meta"].to_pylist()]
    assert metas == [{"scores": {"x": 1, "y": 2}, "raw": "caf\u00e9"}, {"scores": None, "raw": "/wA="}]


def test_a_map_that_repeats_a_key_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"], "scores": pa.array([[("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int64()))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet:1: a value of rows 1 to 1 cannot be read"):
        list(read(tmp_path / "a.parquet"))


def class_label_schema(names: Any) -> pa.Schema:
    """The schema as `datasets` writes it for a ClassLabel."""
    features = {"text": {"dtype": "string", "_type": "Value"}, "intent": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([("text", pa.string()), ("intent", pa.int64())], metadata=metadata)


def test_class_labels_are_read_by_their_names(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c", "d"], "intent": [1, 0, -1, None]}, class_label_schema(["no", "yes"]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    folder = tmp_path / "saved"
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    columns = {"prompt": "text", "completion": "intent"}
    for path in (tmp_path / "a.parquet", folder):
        assert concat(list(read(path, columns)))["completion"].to_pylist() == ["yes", "no", None, None]
    assert concat(list(read_memory(table, "data", columns)))["completion"].to_pylist() == ["yes", "no", None, None]


@pytest.mark.parametrize("form", [lambda label: [label], lambda label: {"feature": label, "_type": "List"}])
def test_lists_of_class_labels_are_read_by_their_names(tmp_path: Path, form: Any) -> None:
    features = {"text": {"dtype": "string", "_type": "Value"}, "topics": form({"names": ["no", "yes"]})}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema([("text", pa.string()), ("topics", pa.list_(pa.int64()))], metadata=metadata)
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "topics": [[1, 0], []]}, schema), tmp_path / "a.parquet")
    metas = concat(list(read(tmp_path / "a.parquet")))["meta"].to_pylist()
    assert [json.loads(meta) for meta in metas] == [{"topics": ["yes", "no"]}, {"topics": []}]


@pytest.mark.parametrize("names", [None, [], [1, 2]])
def test_other_metadata_leaves_numbers_as_they_are(tmp_path: Path, names: Any) -> None:
    table = pa.table({"text": ["a"], "intent": [1]}, class_label_schema(names))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert concat(list(read(tmp_path / "a.parquet")))["meta"].to_pylist() == ['{"intent": 1}']


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_detected(tmp_path: Path, delimiter: str, suffix: str) -> None:
    rows = [("prompt", "completion, or label"), ("a; b, c", "x\ty"), ('d"', "1,5"), ("e\nf; g\n\n;h", "z")] * 4
    path = tmp_path / f"a{suffix}"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([rows[0], *(row for row in rows if row != rows[0])])
    records = concat(list(read(path, {"prompt": "prompt", "completion": "completion, or label"})))
    assert [turns[0]["content"] for turns in records["prompt"].to_pylist()] == ["a; b, c", 'd"', "e\nf; g\n\n;h"] * 4
    assert records["completion"].to_pylist() == ["x\ty", "1,5", "z"] * 4


def test_semicolons_in_texts_do_not_change_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\na;b\nc;d\n")
    assert concat(list(read(path)))["text"].to_pylist() == ["a;b", "c;d"]
    path.write_text("prompt,completion\na;b,c;d\ne;f\n")
    with pytest.raises(UserError, match=r"a\.csv:3: 1 fields where the header names 2"):
        list(read(path))


def test_identical_preference_pairs_are_skipped_and_counted(tmp_path: Path) -> None:
    turns = [USER, ANSWER]
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": turns, "rejected": turns},
        {"prompt": None, "chosen": turns, "rejected": turns},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped: list[Problem] = []
    assert concat(list(read(path, skipped=skipped.append)))["line"].to_pylist() == [2]
    problems = check_file(path)
    assert [(problem.line, problem.kind, problem.blocking) for problem in problems] == [
        (1, "identical answers", False),
        (3, "identical answers", False),
        (4, "identical answers", False),
    ]
    assert skipped == problems


def test_check_tells_programs_apart_by_their_indentation(tmp_path: Path) -> None:
    programs = ["for x in y:\n    a\n    b", "for x in y:\n    a\nb", "for x in y:\r\n    a\r\nb\r\n"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "completion": "ok"}) + "\n" for text in programs))
    assert [(problem.line, problem.kind) for problem in check_file(path, labels=["ok"])] == [(3, "duplicate")]
