"""Files are cut into pieces at line ends, by content only, and the pieces read like the whole file."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import build
from posttrain.data.reading import pieces as cutting
from posttrain.data.reading.pieces import Piece, pieces, read_piece
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.data.versions.build_version import _first_clash, check_user_ids
from posttrain.data.versions.shards import Shard, ShardTask
from posttrain.store.errors import UserError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_PIECE_BYTES", 300)
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 64)
    monkeypatch.setattr(cutting, "PIECE_ROWS", 5)


def lines_of(count: int) -> list[str]:
    return [json.dumps({"text": f"record {number} " + "word " * (number % 7)}) for number in range(count)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_pieces_together_equal_the_file(tmp_path: Path, name: str, end: str) -> None:
    path = tmp_path / name
    content = "\n".join(lines_of(40)) + end
    if name.endswith(".csv"):
        content = "text\n" + "\n".join(f"record {number}" for number in range(40)) + end
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    result = list(pieces(path, name))
    assert len(result) > 3
    tables = [read_piece(piece, None).records for piece in result]
    assert concat(tables).equals(concat(list(read(path, name=name))))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30), st.booleans())
def test_pieces_end_at_line_ends(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ends: bool) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    content = b"\n".join(b"x" * length for length in lengths) + (b"\n" if ends else b"")
    path.write_bytes(content)
    result = list(pieces(path, "a"))
    assert b"".join(content[piece.start : piece.stop] for piece in result) == content
    for piece in result:
        assert piece.first_line == content[: piece.start].count(b"\n") + 1
        assert piece.start == 0 or content[piece.start - 1 : piece.start] == b"\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_pieces_grow_with_their_position(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MAX_PIECE_BYTES": 800, "MIN_PIECE_BYTES": 100, "BLOCK_BYTES": 8, "PIECE_ROWS": 1000}
    for constant, value in values.items():
        monkeypatch.setattr(cutting, constant, value)
    path = tmp_path / name
    content = "".join(json.dumps({"text": f"{number:04d}"}) + "\n" for number in range(2000)).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    first_lines = [piece.first_line for piece in pieces(path, name)]
    records = np.diff(first_lines)
    assert (np.diff(records) >= 0).all()
    assert records[0] <= 7
    assert records[-1] == records[-2] >= 44


@pytest.mark.parametrize("blank", ["\n", "\n" * 200])
def test_blank_lines_at_the_start_and_the_end(tmp_path: Path, blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MIN_PIECE_BYTES", 64)  # as long as a block, like the default
    (tmp_path / "a.jsonl").write_text(blank + "\n".join(lines_of(40)) + "\n" + blank, encoding="utf-8")
    assert next(pieces(tmp_path / "a.jsonl", "a")).stop > 64
    version = build(
        {"name": "a", "files": ["a.jsonl"], "workspace": tmp_path, "engine": "inline", "steps": [], "splits": None}
    )
    assert version.count("train") == 40


def test_appended_lines_change_only_the_last_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines_of(40)) + "\n", encoding="utf-8")
    old_digests = [piece.digest for piece in pieces(path, "a")]
    path.write_text("\n".join(lines_of(60)) + "\n", encoding="utf-8")
    new_digests = [piece.digest for piece in pieces(path, "a")]
    assert new_digests[: len(old_digests) - 1] == old_digests[:-1]
    assert new_digests[len(old_digests) - 1] != old_digests[-1]


def build_shard(piece: Piece, folder: Path) -> Shard:
    return Shard.open(ShardTask(piece, None, (), (), (), folder)())


def test_an_id_with_two_contents_is_found_across_pieces(tmp_path: Path) -> None:
    rows = [{"text": f"some words of record {number}", "id": f"id {number}"} for number in range(30)]
    rows.append({"text": "other words", "id": "id 3"})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shards = [build_shard(piece, tmp_path / "shards") for piece in pieces(path, "a.jsonl")]
    assert len(shards) > 2
    check_user_ids(shards[:-1])
    with pytest.raises(UserError, match=r"^a\.jsonl:31: its id also occurs on line 4, with other content"):
        check_user_ids(shards)


def ids_file(path: Path, ids: list[str | int], prefix: str) -> str:
    rows = [{"prompt": f"{prefix} {id}", "completion": "yes", "id": id} for id in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


def test_an_id_with_two_contents_is_found_across_files(tmp_path: Path) -> None:
    first = ids_file(tmp_path / "one.jsonl", ["a", 7, "b"], "words of")
    equal = ids_file(tmp_path / "same.jsonl", ["b", "a", "c"], "words of")
    different = ids_file(tmp_path / "other.jsonl", ["d", "7", "a"], "more words of")
    config = {"name": "set", "workspace": tmp_path, "engine": "inline"}
    assert build({**config, "files": [first, equal]}).count("train") == 6
    message = r"^other\.jsonl:2: its id also occurs at one\.jsonl:2, with other content; give every record an id"
    with pytest.raises(UserError, match=message):
        build({**config, "files": [different]})
    with pytest.raises(UserError, match=message):
        build({**config, "name": "at-once", "files": [first, equal, different]})


def test_the_first_clash_of_ids_equals_that_of_a_dictionary(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for trial in range(100):
        # Few keys, some with equal first 8 bytes, which are compared first.
        keys = np.array([bytes([k % 3]) * 8 + bytes([k]) * 4 for k in generator.integers(0, 12, 12)], "V12")
        contents = np.array([bytes([c]) * 10 for c in generator.integers(0, 1 + trial % 2, 12)], "V10")
        contents = np.where(generator.random(12) < 0.8, keys.astype("V10"), contents)
        first_rows: dict[bytes, int] = {}
        rows = ((row, first_rows.setdefault(key.tobytes(), row)) for row, key in enumerate(keys))
        expected = next(((row, first) for row, first in rows if contents[row] != contents[first]), None)
        assert _first_clash(keys, contents) == expected


def test_a_bad_line_has_its_number_in_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines_of(40), '{"text": 1}']), encoding="utf-8")
    *good, bad = pieces(path, "a.jsonl")
    assert good
    assert all(read_piece(piece, None).records.num_rows for piece in good)
    with pytest.raises(UserError, match=r"^a\.jsonl:41: `text` is not text"):
        read_piece(bad, None)


def test_an_answer_outside_the_label_set_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "yes"}\n{"prompt": "b", "completion": "yse"}\n', encoding="utf-8")
    (piece,) = pieces(path, "a.jsonl")
    assert read_piece(piece, None).records.num_rows == 2
    with pytest.raises(UserError, match=r"^a\.jsonl:2: label `yse` is not in the label set; did you mean `yes`"):
        read_piece(piece, None, ["yes", "no"])


def test_the_same_task_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines_of(8)), encoding="utf-8")
    piece = next(pieces(path, "a"))
    first, second = build_shard(piece, tmp_path / "one"), build_shard(piece, tmp_path / "other")
    assert first.key == second.key
    for file in first.folder.iterdir():
        assert file.read_bytes() == (second.folder / file.name).read_bytes()
    assert first.records().schema == pa.schema(first.records().schema)
