"""Exported records read back as the same records."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data.reading.reader import read
from posttrain.data.records.record import RECORD, concat
from posttrain.data.versions.export import export_file
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
nonblank_texts = st.one_of(
    st.text(characters, min_size=1, max_size=12),
    st.sampled_from(
        [
            '"',
            "a,b\tc;d",
            "a\r\nb",
            "\ra",
            "[1]",
            '[{"role": "user", "content": "x"}]',
            "\ufeffx",
            "NULL",
            "0",
        ]
    ),
).filter(lambda text: text.strip() != "")
# The reader refuses a missing number as an answer.
answer_texts = nonblank_texts.filter(lambda text: text.lower() != "nan")
answers = st.none() | answer_texts
groups = st.none() | nonblank_texts
json_values = st.none() | st.booleans() | st.integers(-5, 5) | nonblank_texts | st.lists(nonblank_texts, max_size=2)
metas = st.dictionaries(
    nonblank_texts.filter(lambda key: key not in RECORD.names and key != "chosen"), json_values, max_size=2
)
single = nonblank_texts.map(lambda text: [{"role": "user", "content": text}])
several = st.tuples(nonblank_texts, nonblank_texts, nonblank_texts).map(
    lambda texts: [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "tool"), texts, strict=True)
    ]
)
contents: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "prompt": st.fixed_dictionaries({"prompt": single | several, "completion": answers}),
    "preference": st.fixed_dictionaries(
        {"prompt": single | several, "completion": answer_texts, "rejected": answer_texts}
        # Reading skips pairs of equal answers.
    ).filter(lambda pair: pair["completion"] != pair["rejected"]),
    "text": st.fixed_dictionaries({"text": nonblank_texts}),
}


def table_from(rows: Sequence[tuple[dict[str, Any], str | None, Mapping[str, Any]]]) -> pa.Table:
    return table_of(
        *(
            {**content, "group": group, "meta": json.dumps(meta, ensure_ascii=False, sort_keys=True)}
            for content, group, meta in rows
        )
    )


@pytest.mark.parametrize("shape", sorted(contents))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_export_and_read_are_inverse(tmp_path: Path, shape: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(contents[shape], groups, metas), min_size=1, max_size=4))
    table = table_from(rows).drop_columns(["source", "line"])
    for suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
        path = tmp_path / f"out{suffix}"
        path.unlink(missing_ok=True)
        export_file(table_from(rows), path)
        result = concat(list(read(path))).drop_columns(["source", "line"])
        assert result.to_pylist() == table.to_pylist(), suffix


def test_exported_files_are_plain(tmp_path: Path, make: Callable[..., pa.Table]) -> None:
    table = make(("a \u00e9", "x"), ("b", None, "g"))
    export_file(table, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text().splitlines() == [
        '{"prompt": "a \u00e9", "completion": "x", "group": null}',
        '{"prompt": "b", "completion": null, "group": "g"}',
    ]
    export_file(table, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines()[:2] == [
        '"prompt","completion","group"',
        '"a \u00e9","x",""',
    ]


def test_nothing_is_overwritten(tmp_path: Path, make: Callable[..., pa.Table]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("my own")
    with pytest.raises(UserError, match=r"mine\.csv: the file exists already"):
        export_file(make(("a", "x")), path)
    assert path.read_text() == "my own"


def test_mixed_shapes_export_only_to_parquet(tmp_path: Path, make: Callable[..., pa.Table]) -> None:
    mixed_table = pa.concat_tables([make(("a", "x")), table_from([({"text": "t"}, None, {})])])
    for name in ("out.jsonl", "out.csv"):
        with pytest.raises(UserError, match=r"the records have the shapes prompt, text; export to \.parquet"):
            export_file(mixed_table, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    export_file(mixed_table, tmp_path / "out.parquet")
    assert concat(list(read(tmp_path / "out.parquet")))["id"].to_pylist() == mixed_table["id"].to_pylist()


def test_invalid_paths_raise(tmp_path: Path, make: Callable[..., pa.Table]) -> None:
    with pytest.raises(UserError, match=r"`\.xlsx` is not a supported format; use \.jsonl"):
        export_file(make(("a", "x")), tmp_path / "out.xlsx")
    with pytest.raises(UserError, match="there is no such folder"):
        export_file(make(("a", "x")), tmp_path / "no" / "out.csv")
