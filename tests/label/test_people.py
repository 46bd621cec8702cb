"""A round's batch is one queue for the pages and the CSV file; its labels are what both decide."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from queues import LABELS, add_accounts

from posttrain.data.reading.reader import read
from posttrain.label.annotator import LEFT, AnnotationRequest, label_summary
from posttrain.label.config import LabelConfig, build_annotator
from posttrain.label.file_annotator import import_answers
from posttrain.label.people import PeopleAnnotator
from posttrain.label.tokens import Conflict
from posttrain.store.errors import UserError, Waiting
from posttrain.store.metadata import Metadata

Batch = Callable[..., pa.Table]
Build = Callable[..., PeopleAnnotator]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """``build(overlap=2)``: people with these settings of the queue, in the folder `tmp_path`."""
    metadata = Metadata(f"sqlite:///{tmp_path}/store.db", create=True)

    def build(**queue: object) -> PeopleAnnotator:
        config = LabelConfig.read({"queue": queue}, "posttrain.yaml")
        annotator = build_annotator(config, tmp_path, read, {"prompt": "text", "completion": "label"}, metadata)
        assert isinstance(annotator, PeopleAnnotator)
        return annotator

    yield build
    metadata.close()


@pytest.fixture
def request_of(tmp_path: Path) -> AnnotationRequest:
    return AnnotationRequest(1, 0, tmp_path, LABELS)


def file_of(folder: Path) -> Path:
    return folder / "labels" / "round-1.csv"


def fill(path: Path, labels: list[str]) -> None:
    """Fill the label column; `-reason` skips a row."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [{"label": "", "skip": text[1:]} if text[:1] == "-" else {"label": text, "skip": ""} for text in labels]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, **cell} for row, cell in zip(rows, cells, strict=True))


def waiting(people: PeopleAnnotator, records: pa.Table, request: AnnotationRequest) -> str:
    with pytest.raises(Waiting) as caught:
        people.annotate(records, request)
    return str(caught.value).removeprefix("labels for round 1: ")


def sources(labelled: pa.Table) -> list[tuple[str, str, float | None]]:
    marks = [json.loads(meta)["labelled_by"] for meta in labelled["meta"].to_pylist()]
    return [
        (answer, mark["annotator"], mark["seconds"])
        for answer, mark in zip(labelled["completion"].to_pylist(), marks, strict=True)
    ]


def test_pages_and_file_answer_one_batch(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one", "two", "three")
    request = replace(request_of, suggestions=["card", "cash", "loan"], reasons=["a", "b", "c"], selection="s-1")
    assert waiting(people, records, request).startswith("fill the label column of labels/round-1.csv (3 records)")
    task = people.queue.next("anna")
    assert task is not None
    assert (task.content["prompt"], task.content["meta"], task.reason) == (
        records["prompt"][0].as_py(),
        {"channel": "web"},
        "a",
    )
    assert task.suggestion == {"answer": "card", "confidence": None, "annotator": None}
    people.queue.answer(task.item, "anna", "cash", seconds=4)
    fill(file_of(tmp_path), ["", "card", ""])
    text = waiting(people, records, request)
    assert text == (
        "2 of 3 are decided, 1 answer is wanted; answer on the pages (posttrain serve) or in labels/round-1.csv, "
        "then run again; or continue without the rest: posttrain run --partial"
    )
    fill(file_of(tmp_path), ["loan", "card", "loan"])
    labelled = people.annotate(records, request)
    # What was answered on the page stands; the file comes too late.
    assert sources(labelled) == [("cash", "anna", 4.0), ("card", "file", None), ("loan", "file", None)]
    assert labelled["id"].equals(records["id"])
    (batch_row,) = people.queue.batches("done")
    assert (batch_row.name, batch_row.round, batch_row.selection) == ("round-1", 1, "s-1")
    # Killed before the stage was committed: the same labels again, whatever the file says now.
    fill(file_of(tmp_path), ["card", "cash", "card"])
    assert people.annotate(records, request).equals(labelled)


def test_the_file_may_be_edited_until_it_is_taken_up(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one", "two")
    waiting(people, records, request_of)
    for labels in (["card", ""], ["cash", ""], ["", ""], ["", "loan"]):
        fill(file_of(tmp_path), labels)
        filled = sum(map(bool, labels))
        assert waiting(people, records, request_of).startswith(f"{filled} of 2 are filled in labels/round-1.csv; fill")
        stored = people.queue.answers()
        assert stored["answer"].to_pylist() == [label for label in labels if label]
    fill(file_of(tmp_path), ["card", "cash"])
    assert sources(people.annotate(records, request_of)) == [("card", "file", None), ("cash", "file", None)]


def test_overlap_asks_others_beside_the_file(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(overlap=2), batch("one", "two")
    lonely = "; on the pages 1 can answer: posttrain accounts add"
    add_accounts(people.queue.metadata, "anna")
    assert waiting(people, records, request_of).endswith(lonely)
    add_accounts(people.queue.metadata, "ben")
    assert not waiting(people, records, request_of).endswith(lonely)
    fill(file_of(tmp_path), ["card", "cash"])
    assert waiting(people, records, request_of).startswith("0 of 2 are decided, 2 answers are wanted; answer on")
    for name, answer in (("anna", "card"), ("anna", "loan"), ("ben", "card")):
        task = people.queue.next(name)
        assert task is not None
        people.queue.answer(task.item, name, answer, seconds=1)
    assert waiting(people, records, request_of).startswith("1 of 2 are decided, 1 item is in review; answer on")
    (item,) = people.queue.review_list()
    people.queue.resolve(item.id, "root", "loan")
    assert sources(people.annotate(records, request_of)) == [("card", "anna, file", 1.0), ("loan", "root", 2.0)]


def test_what_is_missing_follows_accounts_and_answers_before_the_loop_looks_again(
    build: Build, batch: Batch, request_of: AnnotationRequest
) -> None:
    people, records = build(overlap=2), batch("one", "two")
    start, lonely = "labels for round 1: ", "posttrain accounts add"
    add_accounts(people.queue.metadata, "anna")
    before = start + waiting(people, records, request_of)
    (name,) = [each.name for each in people.queue.batches()]

    def now(text: str = before) -> str:
        row = people.queue.batch(name)
        assert row is not None
        return people.describe_waiting(row, text)

    assert now() == before
    assert before.endswith(lonely)
    add_accounts(people.queue.metadata, "ben")
    assert now() == before.partition("; on the pages")[0]
    # The other way round: an account was closed since.
    assert now(now()) == now()
    for who in ("anna", "ben"):
        for _ in range(2):
            task = people.queue.next(who)
            assert task is not None
            people.queue.answer(task.item, who, "card")
        if who == "anna":
            assert now().startswith(f"{start}0 of 2 are decided, 2 answers are wanted; answer on the pages")
    assert now() == f"{start}2 of 2 are decided, run again"
    assert now("a trigger for round 1: urgent") == "a trigger for round 1: urgent"


def test_dropped_records_are_left_out_and_counted(build: Build, batch: Batch, request_of: AnnotationRequest) -> None:
    people, records = build(), batch("one", "two", "three")
    waiting(people, records, request_of)
    people.queue.drop(2, "root", "no sense")
    for _ in range(2):
        people.queue.answer(people.queue.next("anna").item, "anna", "card")  # type: ignore[union-attr]
    labelled = people.annotate(records, request_of)
    assert labelled["id"].to_pylist() == [records["id"][row].as_py() for row in (0, 2)]
    # Not selected again.
    dropped = [records["id"][1].as_py()]
    assert [people.queue.dropped_records(number) for number in (1, 2, 3)] == [dropped] * 3
    reasons = people.unlabelled(records, request_of)
    assert reasons == {dropped[0]: "no sense"}
    summary = label_summary(labelled, unlabelled=[*reasons.values(), LEFT, LEFT])
    assert (summary["dropped"], summary["skips"], summary["left"]) == (1, {"no sense": 1}, 2)
    assert not {"dropped", "skips", "left"} & label_summary(labelled).keys()


def test_a_round_of_which_all_was_dropped_has_no_labels(
    build: Build, batch: Batch, request_of: AnnotationRequest
) -> None:
    people, records = build(), batch("one")
    waiting(people, records, request_of)
    people.queue.drop(1, "root")
    labelled = people.annotate(records, request_of)
    assert labelled.num_rows == 0
    assert labelled.schema == records.schema


def test_the_file_skips_rows_until_the_batch_is_closed(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one", "two", "three", "four")
    waiting(people, records, request_of)
    people.queue.answer(4, "anna", "loan", seconds=1)
    # A mark may come and go, before and after a label; what was answered on the pages stands.
    for labels, dropped in ((["-x", "", "", ""], 1), (["card", "-x", "", ""], 1), (["", "-why", "", "-x"], 1)):
        fill(file_of(tmp_path), labels)
        waiting(people, records, request_of)
        assert people.queue.progress("round-1").dropped == dropped
    assert [item.status for item in people.queue.items("round-1")] == ["open", "dropped", "open", "done"]
    fill(file_of(tmp_path), ["card", "-why", "-yes", ""])
    labelled = people.annotate(records, request_of)
    assert sources(labelled) == [("card", "file", None), ("loan", "anna", 1.0)]
    ids = records["id"].to_pylist()
    assert people.unlabelled(records, request_of) == {ids[1]: "why", ids[2]: "no reason given"}


def test_a_reviewer_decides_against_a_skip_of_the_file(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one")
    waiting(people, records, request_of)
    people.queue.resolve(1, "root", "card")
    fill(file_of(tmp_path), ["-x"])
    assert sources(people.annotate(records, request_of)) == [("card", "root", None)]


def test_a_partial_batch_goes_on_with_what_is_there(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one", "two", "three")
    partial = replace(request_of, partial=True)
    # A batch that nobody could see yet waits all the same; one without an answer is a mistake.
    waiting(people, records, partial)
    with pytest.raises(UserError, match="no record of round 1's batch is decided yet, and --partial needs one"):
        people.annotate(records, partial)
    fill(file_of(tmp_path), ["", "-x", ""])
    with pytest.raises(UserError, match="no record of round 1's batch is decided yet"):
        people.annotate(records, partial)
    people.queue.answer(3, "anna", "loan", seconds=1)
    labelled = people.annotate(records, partial)
    assert sources(labelled) == [("loan", "anna", 1.0)]
    ids = records["id"].to_pylist()
    assert people.unlabelled(records, request_of) == {ids[0]: LEFT, ids[1]: "no reason given"}
    progress = people.queue.progress("round-1")
    assert (progress.status, progress.undecided, progress.left, progress.done_at) == ("done", 1, 0, None)
    # Killed before the labels were stored: the same again, without --partial and whatever the file says by now.
    fill(file_of(tmp_path), ["card", "card", "card"])
    assert people.annotate(records, request_of).equals(labelled)
    # Given back to the pool, and too late for the pages.
    assert people.queue.dropped_records(1) == [ids[1]]
    assert people.queue.next("anna") is None
    with pytest.raises(Conflict, match="closed without an answer to this item"):
        people.queue.answer(1, "anna", "card")


def test_labels_that_came_late_are_filled_in_when_their_record_is_selected_again(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people, records = build(), batch("one", "two", "three", "four")
    waiting(people, records, request_of)
    fill(file_of(tmp_path), ["card", "", "", ""])
    people.annotate(records, replace(request_of, partial=True))
    fill(file_of(tmp_path), ["cash", "loan", "cash", "crad"])
    again = batch("two", "four", "five")
    with (
        caplog.at_level("INFO", "posttrain"),
        pytest.raises(Waiting, match=r"1 of 3 are filled in labels/round-2\.csv"),
    ):
        people.annotate(again, replace(request_of, round=2))
    assert "1 label that came late in labels/round-1.csv: filled in labels/round-2.csv" in caplog.text
    assert "1 label came late in labels/round-1.csv: to count once selected again" in caplog.text
    second = people.annotate(again, replace(request_of, round=2, partial=True))
    assert sources(second) == [("loan", "file", None)]
    # A file that is damaged by now stops no round.
    file_of(tmp_path).write_text("notes")
    with pytest.raises(Waiting, match=r"fill the label column of labels/round-3\.csv"):
        people.annotate(batch("three"), replace(request_of, round=3))


def test_a_second_batch_of_a_round_has_a_file_of_its_own(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people = build()
    waiting(people, batch("one"), request_of)
    fill(file_of(tmp_path), ["-x"])
    assert people.annotate(batch("one"), request_of).num_rows == 0
    assert "labels/round-1-2.csv (1 record)" in waiting(people, batch("two"), request_of)
    assert people.file_name("round-1") == "labels/round-1.csv"


def test_gold_items_come_from_their_file(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    (tmp_path / "gold.csv").write_text("text,label\none,card\nknown,cash\n")
    people, records = build(gold_file="gold.csv"), batch("one", "two")
    waiting(people, records, request_of)
    # `one` is in the batch itself.
    (gold,) = people.queue.items("round-1", gold=True)
    assert (gold.content["prompt"][0]["content"], gold.expected) == ("known", "cash")
    with pytest.raises(UserError, match=r"label\.queue\.gold_file: no such file"):
        build(gold_file="none.csv").annotate(batch("other"), replace(request_of, round=2))


def test_columns_of_the_gold_file_do_not_tell_which_items_are_gold(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    (tmp_path / "gold.csv").write_text("text,label,difficulty,channel\nknown,cash,hard,phone\nother,card,easy,\n")
    people, records = build(gold_file="gold.csv"), batch("one", "two")
    metas = [json.dumps({"channel": "mail", "city": name}) for name in ("Bonn", "Oslo")]
    records = records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(metas, pa.string()))
    people.enqueue(records, request_of)
    items = people.queue.items("round-1") + people.queue.items("round-1", gold=True)
    assert len(items) == 4
    assert {tuple(item.content["meta"]) for item in items} == {("channel", "city")}
    assert {item.content["meta"]["city"] for item in items} == {"Bonn", "Oslo"}
    assert "phone" in {item.content["meta"]["channel"] for item in items}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def copy_for(folder: Path, name: str, labels: list[str]) -> None:
    """Fill a person's copy of the file."""
    copy = folder / "labels" / f"round-1.{name}.csv"
    copy.write_bytes(file_of(folder).read_bytes())
    fill(copy, labels)


def test_copies_say_by_their_name_who_answers(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(overlap=2), batch("one", "two", "three")
    first = waiting(people, records, request_of)
    assert (
        "items want the answers of 2 people: each fills a copy, labels/round-1.NAME.csv, or rows with their name"
        in first
    )
    fill(file_of(tmp_path), ["card", "cash", "loan"])
    text = waiting(people, records, request_of)
    assert text.startswith("0 of 3 are decided, 3 answers are wanted; answer on the pages")
    assert "of 2 people, so far those of file: each fills a copy, labels/round-1.NAME.csv" in text
    copy_for(tmp_path, "ana", ["card", "card", ""])
    text = waiting(people, records, request_of)
    assert text.startswith("1 of 3 are decided, 2 answers are wanted")
    # One has two answers that differ, so that a third person is asked.
    assert "of 3 people, so far those of ana, file" in text
    copy_for(tmp_path, "ana", ["card", "cash", "loan"])
    labelled = people.annotate(records, request_of)
    assert [(label, who) for label, who, _ in sources(labelled)] == [
        ("card", "ana, file"),
        ("cash", "ana, file"),
        ("loan", "ana, file"),
    ]


def test_a_column_says_who_answers_each_row(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(overlap=2), batch("one", "two")
    waiting(people, records, request_of)
    rows = rows_of(file_of(tmp_path))
    assert list(rows[0]) == ["id", "prompt", "skip", "label", "annotator"]

    def answer(*given: tuple[int, str, str]) -> None:
        write_rows(file_of(tmp_path), [{**rows[at], "label": label, "annotator": who} for at, label, who in given])

    answer((0, "card", "anna"), (1, "card", "ana"), (0, "card", "bo"), (1, "", "bo"))
    waiting(people, records, request_of)
    # Names and labels follow the file until the batch is closed: `anna` was a mistake, and is not a second person.
    answer((0, "card", "ana"), (1, "cash", "ana"))
    assert waiting(people, records, request_of).startswith("0 of 2 are decided, 2 answers are wanted")
    assert people.queue.answers()["annotator"].to_pylist() == ["ana", "ana"]
    answer((0, "card", "ana"), (1, "cash", "ana"), (1, "cash", "bo"), (0, "card", "ana"))
    with pytest.raises(UserError, match=r"round-1\.csv:5: `\w+` is already on line 2; `ana` answers it once"):
        people.annotate(records, request_of)
    answer((0, "card", "ana"), (1, "cash", "ana"), (1, "cash", "bo"))
    write_rows(tmp_path / "labels" / "round-1.bo.csv", [{**rows[0], "label": "card"}, {**rows[1], "label": "cash"}])
    with pytest.raises(
        UserError, match=r"round-1\.bo\.csv: `bo` has answered the record `\w+` in another file already"
    ):
        people.annotate(records, request_of)
    answer((0, "card", "ana"), (1, "cash", "ana"))
    labelled = people.annotate(records, request_of)
    assert [(label, who) for label, who, _ in sources(labelled)] == [("card", "ana, bo"), ("cash", "ana, bo")]


def test_a_copy_may_hold_a_part_of_the_batch(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(), batch("one", "two")
    waiting(people, records, request_of)
    first, second = rows_of(file_of(tmp_path))
    write_rows(tmp_path / "labels" / "round-1.ana.csv", [first | {"label": "card"}])
    write_rows(tmp_path / "labels" / "round-1.bo.csv", [second | {"label": "cash"}])
    assert sources(people.annotate(records, request_of)) == [("card", "ana", None), ("cash", "bo", None)]
    write_rows(file_of(tmp_path), [first])
    with pytest.raises(UserError, match=r"1 of 2 records have no row"):
        import_answers(file_of(tmp_path), records, LABELS)


def test_an_answer_on_the_pages_is_not_a_second_one_beside_the_same_persons_row(
    build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(overlap=2), batch("one", "two")
    waiting(people, records, request_of)
    add_accounts(people.queue.metadata, "ana", "bo")
    task = people.queue.next("ana")
    assert task is not None
    people.queue.answer(task.item, "ana", "card", seconds=1)
    copy_for(tmp_path, "ana", ["cash", "cash"])
    assert waiting(people, records, request_of).startswith("0 of 2 are decided, 2 answers are wanted")
    assert sorted(people.queue.answers()["answer"].to_pylist()) == ["card", "cash"]
    copy_for(tmp_path, "ana", ["", ""])
    waiting(people, records, request_of)
    assert people.queue.answers()["answer"].to_pylist() == ["card"]


@pytest.mark.parametrize("settings", [{"overlap": 2}, {"overlap": 1, "check": 1.0}])
def test_lowering_the_overlap_counts_for_the_open_batch(
    settings: dict[str, object], build: Build, batch: Batch, request_of: AnnotationRequest, tmp_path: Path
) -> None:
    people, records = build(**settings), batch("one", "two")
    waiting(people, records, request_of)
    fill(file_of(tmp_path), ["card", "cash"])
    assert waiting(people, records, request_of).startswith("0 of 2 are decided, 2 answers are wanted")
    # A higher one counts for later batches.
    assert waiting(build(overlap=3), records, request_of).startswith("0 of 2 are decided, 2 answers are wanted")
    labelled = build(overlap=1, check=0).annotate(records, request_of)
    assert sources(labelled) == [("card", "file", None), ("cash", "file", None)]
