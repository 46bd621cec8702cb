"""Versions record their contents, the sources and the changes."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.records.record import RECORD, REJECTED, concat, without_answers
from posttrain.data.sets.training_set import next_training_set
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.versions.history import Diff, count_kinds, diff_versions, increment_kinds
from posttrain.data.versions.version import Dataset, Version, read_dataset, write_dataset

Make = Callable[..., pa.Table]


def with_answers(table: pa.Table, answers: list[str], annotator: str, round: int) -> pa.Table:
    """The records with the answers and marks of an annotator."""
    at = RECORD.get_field_index("meta")
    meta = [f'{{"labelled_by": {{"annotator": "{annotator}", "round": {round}}}}}'] * len(answers)
    result = table.set_column(RECORD.get_field_index("completion"), "completion", pa.array(answers))
    return result.set_column(at, "meta", pa.array(meta))


def rows(table: pa.Table, *columns: str) -> list[tuple[object, ...]]:
    return list(zip(*(table[column].to_pylist() for column in columns), strict=True))


def test_a_written_version_reads_back(tmp_path: Path, make: Make) -> None:
    version = next_training_set(None, make(("a", "x"), ("a", "x"), ("b", "y", "g")))
    meta = write_dataset(tmp_path, version.records, version.rejected, version.meta)
    result = read_dataset(tmp_path)
    assert result.records.equals(version.records)
    assert result.records.schema == RECORD
    assert result.rejected.equals(version.rejected)
    assert result.rejected.schema == REJECTED
    assert result.meta == meta == version.meta
    assert meta["counts"] == {"records": 2, "rejected": 1}


def test_the_bytes_do_not_depend_on_chunks(tmp_path: Path, make: Make) -> None:
    table = make(*((f"m{n}", "x") for n in range(10)))
    pieces = pa.concat_tables([table.slice(0, 3), table.slice(3)])
    digests = []
    for name, records in (("whole", table), ("pieces", pieces)):
        write_dataset(tmp_path / name, records)
        files = sorted((tmp_path / name).iterdir())
        digests.append([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
    assert digests[0] == digests[1]


def test_labelled_pool_records_get_ids_with_their_answer(make: Make) -> None:
    labelled_table = make(("a", "x"))
    pool = without_answers(labelled_table)
    filled_pool = pool.set_column(RECORD.get_field_index("completion"), "completion", labelled_table["completion"])
    assert filled_pool["id"].to_pylist() != labelled_table["id"].to_pylist()
    assert next_training_set(None, filled_pool).records.equals(labelled_table)


def test_versions_grow_and_record_the_increment_by_source(make: Make) -> None:
    first = next_training_set(None, make(("a", "x"), ("b", "y"), source="old"), parent_id=None)
    increment = concat([make(("c", "x"), ("a", "x"), source="new"), make(("d", None), ("e", "y"), source="other")])
    second = next_training_set(first, increment, parent_id="dataset-1", labels=["x", "y"])
    assert [turns[0]["content"] for turns in second.records["prompt"].to_pylist()] == ["a", "b", "c", "e"]
    ids = second.records["id"].to_pylist()
    assert second.meta["parent"] == "dataset-1"
    assert second.meta["increment"] == {"new": [ids[2]], "other": [ids[3]]}
    assert second.meta["filters"] == ["answers", "exact", "conflicts"]
    assert [(row["source"], row["line"], row["reason"]) for row in second.rejected.to_pylist()] == [
        ("other", 1, "no answer"),
        ("new", 2, "exact duplicate"),
    ]


def test_labelled_files_override_earlier_answers(make: Make) -> None:
    labels = ["x", "y"]
    first = next_training_set(None, make(("kept", "x"), ("corrected", "x"), ("removed", "x"), source="old"))
    increment = with_answers(make(("asked", None), ("asked and in a file", None), source="pool"), ["x", "y"], "file", 1)
    second = next_training_set(first, increment, labels=labels, labelled=first.records)
    assert second.records.num_rows == 5
    labelled_table = make(("kept", "x"), ("corrected", "y"), ("asked and in a file", "x"), source="new")
    new_records = labelled_table.filter(pa.array([False, True, True]))
    third = next_training_set(second, new_records, parent_id="dataset-2", labels=labels, labelled=labelled_table)
    result = [(turns[0]["content"], answer) for turns, answer in rows(third.records, "prompt", "completion")]
    assert result == [("kept", "x"), ("asked", "x"), ("corrected", "y"), ("asked and in a file", "x")]
    assert sorted(rows(third.rejected, "line", "source", "reason", "detail")) == [
        (2, "old", "answered again", "another answer stands at new:2"),
        (2, "pool", "answered again", "another answer stands at new:3"),
        (3, "old", "left the files", "no labelled file holds it any more"),
    ]
    assert third.meta["filters"] == ["labelled files", "answers", "exact", "conflicts"]
    (change, second_change) = diff(second, third).changed.to_pylist()
    assert (change["before"], change["after"]) == ("x", "y")
    assert (second_change["before"], second_change["after"]) == ("y", "x")


def test_a_changed_test_set_removes_records_of_the_parent(make: Make) -> None:
    first = next_training_set(None, make(("where is my parcel this morning", "x"), ("b", "y")))
    test = make(("where is my parcel this morning?", "x"), source="test")
    second = next_training_set(first, RECORD.empty_table(), steps=[Decontaminate(threshold=0.8)], evaluation=test)
    assert second.records["line"].to_pylist() == [2]
    assert second.rejected["reason"].to_pylist() == ["like a test input"]
    assert second.meta["filters"][-1] == "decontaminate"


def test_a_contradicting_label_removes_the_record_of_the_parent(make: Make) -> None:
    first = next_training_set(None, make(("a", "x"), ("b", "y")), labels=["x", "y"])
    second = next_training_set(first, make(("a", "y"), source="new"), labels=["x", "y"])
    assert second.records["line"].to_pylist() == [2]
    changes = diff(first, second)
    assert changes.added.num_rows == changes.changed.num_rows == 0
    assert [(row["line"], row["step"], row["reason"], row["detail"]) for row in changes.removed.to_pylist()] == [
        (1, "conflicts", "conflicting labels", "`x` at f:1; `y` at new:1")
    ]


def diff(older: Dataset, newer: Dataset) -> Diff:
    with tempfile.TemporaryDirectory() as folder:
        versions = []
        for name, item in (("older", older), ("newer", newer)):
            write_dataset(Path(folder, name), item.records, item.rejected, item.meta)
            versions.append(Version.open_folder(Path(folder, name)))
        return diff_versions(*versions)


def test_diff_lists_new_removed_and_changed_records(make: Make) -> None:
    older = Dataset(make(("same", "x"), ("gone", "x"), ("changed", "x"), ("two", "x"), ("two", "y")))
    newer = Dataset(make(("same", "x"), ("changed", "y"), ("two", "z"), ("new", "x"), source="n"))
    changes = diff(older, newer)
    assert [turns[0]["content"] for turns in changes.added["prompt"].to_pylist()] == ["two", "new"]
    assert [(row["line"], row["reason"]) for row in changes.removed.to_pylist()] == [
        (line, "not in the newer version") for line in (2, 4, 5)
    ]
    assert changes.changed.drop_columns("input_id").to_pylist() == [
        {"before": "x", "after": "y", "source": "n", "line": 2}
    ]
    no_changes = diff(newer, newer)
    assert no_changes.added.num_rows == no_changes.removed.num_rows == no_changes.changed.num_rows == 0


@pytest.mark.parametrize("parent", [None, Dataset(RECORD.empty_table())])
def test_an_empty_increment_gives_an_empty_version(parent: Dataset | None) -> None:
    version = next_training_set(parent, RECORD.empty_table(), labels=["x"])
    assert version.records.schema == RECORD
    assert version.records.num_rows == 0
    assert version.meta["increment"] == {}


def test_an_increment_is_counted_by_kind(tmp_path: Path, make: Make) -> None:
    """Of every set and its parent; a version whose files say nothing of kinds, as older releases wrote it, is read."""
    files = make(("a", "x"), ("b", "y"))
    answered = with_answers(make(("c", "x"), ("d", "y"), ("e", "y")), ["x", "x", "y"], "people", 1)
    first = next_training_set(None, files)
    second = next_training_set(first, answered)
    versions = []
    for name, dataset in (("first", first), ("second", second)):
        write_dataset(tmp_path / name, dataset.records, dataset.rejected, dataset.meta)
        versions.append(Version.open_folder(tmp_path / name))
    assert increment_kinds(versions[0], None) == {"files": 2}
    assert increment_kinds(versions[1], versions[0]) == {"labelled": 3}
    assert increment_kinds(versions[1], None) == {"files": 2, "labelled": 3} == count_kinds(versions[1].tables())
    assert increment_kinds(versions[0], versions[1]) == {}
