"""Search and paging in the records of a version agree with a search by hand, however the records are cut."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.records.record import RECORD, REJECTED
from posttrain.data.versions.version import Version, write_dataset
from posttrain.inspect.show import REJECTED as REJECTED_SPLIT
from posttrain.inspect.show import search_records
from posttrain.store.errors import UserError

TEXTS = st.text(alphabet="abAB %_.*é中", max_size=6)


def record(number: int, turns: list[str] | None, answer: str | None, text: str | None) -> dict[str, Any]:
    prompt = None if turns is None else [{"role": "user", "content": turn} for turn in turns]
    return {
        **dict.fromkeys(RECORD.names),
        **{"id": f"{number:020x}", "input_id": f"{number:020x}", "prompt": prompt, "completion": answer, "text": text},
        **{"source": "z.csv", "line": number, "meta": "{}"},
    }


def contains(row: dict[str, Any], query: str) -> bool:
    turns = [turn["content"] for turn in row["prompt"] or []]
    texts = [*turns, row["completion"], row["text"], row["id"], row["source"]]
    return any(query.lower() in text.lower() for text in texts if text is not None)


rows_of = st.lists(
    st.tuples(st.none() | st.lists(TEXTS, max_size=3), st.none() | TEXTS, st.none() | TEXTS), min_size=1, max_size=12
)


@settings(max_examples=40)
@given(rows_of, st.sampled_from(["", "a", "."]) | TEXTS, st.integers(0, 5), st.integers(1, 5))
def test_a_page_is_the_matches_from_its_start_on(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], query: str, start: int, count: int
) -> None:
    rows = [record(number, *values) for number, values in enumerate(drawn)]
    folder = tmp_path_factory.mktemp("version")
    write_dataset(folder, pa.Table.from_pylist(rows, schema=RECORD))
    page = search_records(Version.open_folder(folder), query, start=start, count=count)
    matches = [row["id"] for row in rows if not query or contains(row, query)]
    assert page.total == len(matches)
    assert [row["id"] for row in page.rows] == matches[start : start + count]


def test_rejected_records_are_searched_by_their_reasons(tmp_path: Path) -> None:
    rejected = [
        {**dict.fromkeys(REJECTED.names), **record(1, ["one"], None, None), "step": "exact", "reason": "duplicate"},
        {**dict.fromkeys(REJECTED.names), **record(2, ["two"], None, None), "step": "length", "reason": "short"},
    ]
    kept = pa.Table.from_pylist([record(3, ["three"], "x", None)], schema=RECORD)
    write_dataset(tmp_path, kept, pa.Table.from_pylist(rejected, schema=REJECTED))
    version = Version.open_folder(tmp_path)
    page = search_records(version, "DUPLICATE", REJECTED_SPLIT)
    assert [json.dumps(row["prompt"]) for row in page.rows] == ['[{"role": "user", "content": "one"}]']
    assert search_records(version, "two").total == 0
    assert search_records(version, "", REJECTED_SPLIT).total == 2
    with pytest.raises(UserError, match="no split"):
        search_records(version, "", "nowhere")
