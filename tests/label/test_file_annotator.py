"""Labels by file: a CSV file is written once, never overwritten, and checked when it is read."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.reading.reader import read
from posttrain.label.annotator import AnnotationRequest, Annotator
from posttrain.label.config import LabelConfig, build_annotator
from posttrain.label.file_annotator import Skip, export_labels, fill_labels, import_labels, read_labels
from posttrain.store.errors import UserError, Waiting
from posttrain.store.metadata import Metadata

Batch = Callable[..., pa.Table]
LABELS = ["card", "cash"]


@pytest.fixture
def file_annotator(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Annotator]:
    metadata = Metadata(f"sqlite:///{tmp_path_factory.mktemp('database')}/store.db", create=True)
    yield build_annotator(LabelConfig(), tmp_path, read, metadata=metadata)
    metadata.close()


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fill(path: Path, labels: list[str]) -> None:
    rows = rows_of(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "label": label} for row, label in zip(rows, labels, strict=True))


def test_a_batch_is_written_waits_and_is_read_back(tmp_path: Path, batch: Batch, file_annotator: Annotator) -> None:
    records = batch("one, please", 'two\n"lines"')
    request = AnnotationRequest(2, 0, tmp_path, LABELS, ["card", "cash"])
    path = tmp_path / "labels" / "round-2.csv"
    with pytest.raises(Waiting) as waiting:
        file_annotator.annotate(records, request)
    assert str(waiting.value) == (
        "labels for round 2: fill the label column of labels/round-2.csv (2 records) or answer on the "
        "pages (posttrain label serve), then run again"
    )
    assert rows_of(path) == [
        {"id": records["id"][0].as_py(), "prompt": "one, please", "suggestion": "card", "label": "", "skip": ""},
        {"id": records["id"][1].as_py(), "prompt": 'two\n"lines"', "suggestion": "cash", "label": "", "skip": ""},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["round-2.csv"]
    fill(path, ["", " cash "])
    content = path.read_bytes()
    with pytest.raises(Waiting, match=r"^labels for round 2: 1 of 2 are filled in labels/round-2\.csv; fill"):
        file_annotator.annotate(records, request)
    assert path.read_bytes() == content
    fill(path, ["card", "cash"])
    labelled = file_annotator.annotate(records, request)
    assert labelled["completion"].to_pylist() == ["card", "cash"]
    assert labelled["id"].equals(records["id"])
    assert json.loads(labelled["meta"][0].as_py())["labelled_by"] == {
        "annotator": "file",
        "round": 2,
        "seconds": None,
    }


def test_an_existing_file_is_read_and_never_overwritten(
    tmp_path: Path, batch: Batch, file_annotator: Annotator
) -> None:
    path = tmp_path / "labels" / "round-1.csv"
    path.parent.mkdir()
    path.write_text("my notes")
    with pytest.raises(UserError, match=r"^labels/round-1\.csv:1: there is no column `id`"):
        file_annotator.annotate(batch("one"), AnnotationRequest(1, 0, tmp_path))
    assert path.read_text() == "my notes"


def test_a_kill_before_the_rename_leaves_no_batch_file(
    tmp_path: Path, batch: Batch, file_annotator: Annotator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", kill)
        with pytest.raises(Killed):
            file_annotator.annotate(batch("one"), AnnotationRequest(1, 0, tmp_path))
    assert not (tmp_path / "labels" / "round-1.csv").exists()
    with pytest.raises(Waiting, match="labels for round 1: fill"):
        file_annotator.annotate(batch("one"), AnnotationRequest(1, 0, tmp_path))


def test_an_empty_batch_does_not_wait(tmp_path: Path, batch: Batch, file_annotator: Annotator) -> None:
    assert file_annotator.annotate(batch(), AnnotationRequest(1, 0, tmp_path)).num_rows == 0
    assert list(tmp_path.iterdir()) == []


def test_formulas_are_escaped_and_conversations_are_readable(batch: Batch) -> None:
    records = batch("=1+1", "fine", "-cmd")
    turns = [
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        *records["prompt"].to_pylist()[1:],
    ]
    conversations = records.set_column(2, "prompt", pa.array(turns, records.schema.field("prompt").type))
    for table, first_prompt in ((records, "'=1+1"), (conversations, "system: Be kind.\n\nuser: Hi")):
        rows = list(csv.DictReader(io.StringIO(export_labels(table, ["@a", "b", "c"]), newline="")))
        assert [row["prompt"] for row in rows] == [first_prompt, "fine", "'-cmd"]
        assert [row["suggestion"] for row in rows] == ["'@a", "b", "c"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_files_saved_by_spreadsheets_are_read(tmp_path: Path, batch: Batch, delimiter: str) -> None:
    records = batch("one", "two", "three")
    ids = records["id"].to_pylist()
    lines = [delimiter.join(("note", "label", "id"))]
    lines += [delimiter.join(("", label, ids[row])) for row, label in ((2, "card"), (0, "cash"), (1, ""))]
    lines = [delimiter, *lines, delimiter * 2, "  ", delimiter * 7, ""]  # blank rows of any length
    (tmp_path / "a.csv").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert import_labels(tmp_path / "a.csv", records, LABELS) == ["cash", None, "card"]


def test_rows_are_skipped_by_a_reason_or_a_mark(tmp_path: Path, batch: Batch) -> None:
    cells = ["cannot tell", "x", "TRUE", "1", "", "FALSE", "0", "no"]
    records = batch(*map(str, range(len(cells))))
    rows = [f"{id},{cell}," for id, cell in zip(records["id"].to_pylist(), cells, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["id,skip,label", *rows]))
    skipped = [Skip("cannot tell"), Skip(), Skip(), Skip()]
    assert import_labels(tmp_path / "a.csv", records, LABELS) == [*skipped, None, None, None, None]
    (tmp_path / "a.csv").write_text("\n".join(["id,skip,label", *rows]).replace("cannot tell,", "x,card"))
    with pytest.raises(UserError, match=r"a\.csv:2: the row has the label `card` and is skipped; clear one"):
        import_labels(tmp_path / "a.csv", records, LABELS)
    (tmp_path / "a.csv").write_text("\n".join(["id,skip,label", *rows]).replace("cannot tell,", "card,"))
    with pytest.raises(UserError, match=r"a\.csv:2: the column `skip` holds the label `card`; write it into"):
        import_labels(tmp_path / "a.csv", records, LABELS)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{0},x,card", "{1},x,crad"], "a.csv:3: label `crad` is not in the label set; did you mean `card`?"),
        (
            ["{0},x,card", "nobody,x,card", "{1},x,"],
            "a.csv:3: no record of the batch has the id `nobody`; if",
        ),
        (["{0},x,card", "{1},x,", "{0},x,cash"], "a.csv:4: `{0}` is already on line 2"),
        (["{0},x,card"], "a.csv: 1 of 2 records have no row, the first is `{1}`; put the rows back"),
        (
            ["{0},x,a", "{1},x,b"],
            "a.csv:2: label `a` is not in the label set (and 1 more); one of card, cash",
        ),
        (["{0},x"], "a.csv:2: 2 fields where the header names 3"),
        (["{0},x,card", '{1},"x,card'], "a.csv:3: broken CSV: a quoted field never closes"),
        (['{0},"x\ny",card', "{1},x,no"], "a.csv:4: label `no` is not in the label set"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, batch: Batch, lines: list[str], message: str) -> None:
    records = batch("one", "two")
    ids = records["id"].to_pylist()
    (tmp_path / "a.csv").write_text("\n".join(["id,prompt,label", *lines]).format(*ids) + "\n")
    with pytest.raises(UserError) as caught:
        import_labels(tmp_path / "a.csv", records, LABELS, name="a.csv")
    assert str(caught.value).startswith(message.format(*ids))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"^a\.csv: the file is empty"),
        (b"id,prompt\n", r"^a\.csv:1: there is no column `label`; the columns are id, prompt$"),
        (b"id,label,label\n", r"^a\.csv:1: there is more than one column `label`"),
        (b"id,label,skip,skip\n", r"^a\.csv:1: there is more than one column `skip`"),
        (b"id,label\nx,caf\xe9\n", r"^a\.csv:2: holds bytes that are not UTF-8; save as UTF-8$"),
    ],
)
def test_bad_headers_and_bytes_are_refused(tmp_path: Path, batch: Batch, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_labels(tmp_path / "a.csv", batch("one"), LABELS, name="a.csv")


def test_a_missing_file_is_refused(tmp_path: Path, batch: Batch) -> None:
    with pytest.raises(UserError, match=r"^a\.csv: there is no such file"):
        import_labels(tmp_path / "a.csv", batch("one"), name="a.csv")


def test_open_ended_answers_stay_unchanged(tmp_path: Path, batch: Batch) -> None:
    records = batch("one")
    (tmp_path / "a.csv").write_text(f'id,label\n{records["id"][0]},"Any, text\nat all"\n')
    assert import_labels(tmp_path / "a.csv", records) == ["Any, text\nat all"]


def test_a_label_that_begins_like_a_formula_is_none_in_the_file(tmp_path: Path, batch: Batch) -> None:
    records, formula = batch("one", "two"), "=HYPERLINK(1)"
    ids = records["id"].to_pylist()
    path = tmp_path / "labels.csv"
    path.write_text(export_labels(records, answers={ids[0]: formula}), newline="")
    path.write_text(fill_labels(path.read_text(), "labels.csv", {ids[1]: "\u3000＝1"}), newline="")
    assert [row["label"] for row in rows_of(path)] == [f"'{formula}", "'\u3000＝1"]
    assert import_labels(path, records) == [formula, "\u3000＝1"]
    assert read_labels(path, {ids[0]}) == {ids[0]: formula}
    # A label of the set stands as it is.
    assert import_labels(path, records, [f"'{formula}", "\u3000＝1"]) == [f"'{formula}", "\u3000＝1"]
