"""The demo's workspace from the user's own file, in every format."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from posttrain.demo.workspace import prepare_workspace

Rows = list[dict[str, str]]


def csv_file(rows: Rows) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def excel_csv_file(rows: Rows) -> bytes:
    return b"\xef\xbb\xbf" + csv_file(rows)


def json_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def columns_file(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def alpaca(rows: Rows) -> bytes:
    return json_lines([{"instruction": row["text"], "input": "", "output": row["label"]} for row in rows])


def completions(rows: Rows) -> bytes:
    """The shape of the reader takes precedence over a column with a name for labels."""
    return json_lines([{"prompt": row["text"], "completion": row["label"], "category": "x"} for row in rows])


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("own.csv", csv_file),
        ("own.CSV", csv_file),
        ("own.csv", excel_csv_file),
        ("own.jsonl", json_lines),
        ("own.parquet", columns_file),
        ("own.jsonl", alpaca),
        ("own.jsonl", completions),
    ],
)
def test_text_and_label_are_found_in_every_format(tmp_path: Path, name: str, encode: Callable[[Rows], bytes]) -> None:
    words = ["alder", "birch", "cedar", "elm", "fir", "hazel", "juniper", "larch", "maple", "oak", "pine", "rowan"]
    rows = [{"text": f"the {a} beside the {b}", "label": "near" if a < b else "far"} for a in words for b in words[:4]]
    (tmp_path / name).write_bytes(encode(rows))
    prepare_workspace(tmp_path / "demo", quick=True, data=tmp_path / name)
    assert (tmp_path / "demo" / "labels.txt").read_text() == "far\nnear\n"
    with (tmp_path / "demo" / "answers.csv").open(newline="") as file:
        answers = {row["text"]: row["intent"] for row in csv.DictReader(file)}
    assert len(answers) > 20
    assert answers.items() <= {row["text"]: row["label"] for row in rows}.items()
