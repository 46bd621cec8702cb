"""An export comes back by an import: everything in JSON lines, answers and suggestions in the other formats."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_batches import KINDS, SUFFIXES, answers_of, fill, read_records
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from posttrain.label.answer_kinds import KINDS as ALL_KINDS
from posttrain.label.formats.exporter import FORMATS, export_queue
from posttrain.label.formats.importer import ImportOptions, import_queue
from posttrain.label.formats.items import shown_text
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata

NewQueue = Callable[..., Queue]


@pytest.mark.parametrize("kind", KINDS)
def test_json_lines_in_a_fresh_workspace_are_the_same_batch(kind: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    fill(source, kind)
    first, second = tmp_path / "batch.jsonl", tmp_path / "second.jsonl"
    assert export_queue(source, "batch", first, "jsonl") == 7
    result = import_queue(target, first, ImportOptions())
    assert (result.format, result.kind, result.gold, +result.left_out) == ("jsonl", kind, 1, {})
    export_queue(target, "batch", second, "jsonl")
    assert first.read_bytes() == second.read_bytes()
    # Not only the bytes, which could lack the same things twice.
    for gold in (False, True):
        before, after = (queue.items("batch", gold=gold) for queue in (source, target))
        for one, other in zip(before, after, strict=True):
            assert _facts(one) == _facts(other)
    assert _batch_facts(source) == _batch_facts(target)


@pytest.mark.parametrize("format", ["csv", "label-studio"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_suggestions_and_gold_come_back(format: str, kind: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    fill(source, kind)
    path = tmp_path / f"batch{SUFFIXES[format]}"
    assert export_queue(source, "batch", path, format) == 7
    result = import_queue(target, path, ImportOptions(kind=kind))
    assert (result.format, result.kind, result.gold) == (format, kind, 1)
    before, after = ({item.record: item for item in queue.items("batch")} for queue in (source, target))
    assert set(before) == set(after)
    for record, item in before.items():
        other = after[record]
        assert [(each.annotator, each.answer) for each in other.answers if each.answer is not None] == [
            (each.annotator, each.answer) for each in item.answers if each.answer is not None
        ]
        assert (other.suggestion or {}).get("answer") == (item.suggestion or {}).get("answer")
        assert other.content.get("candidates") == item.content.get("candidates")
        last_turn = kind == "spans"
        assert shown_text(other.content, last_turn=last_turn) == shown_text(item.content, last_turn=last_turn)
    (gold,) = target.items("batch", gold=True)
    assert gold.expected == source.items("batch", gold=True)[0].expected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_imported_into_its_own_batch_changes_nothing(
    format: str, kind: str, new_queue: NewQueue, tmp_path: Path
) -> None:
    queue = new_queue()
    fill(queue, kind)
    path = tmp_path / f"batch{SUFFIXES[format]}"
    export_queue(queue, "batch", path, format)
    before = [_facts(item) for gold in (False, True) for item in queue.items("batch", gold=gold)]
    result = import_queue(queue, path, ImportOptions(batch="batch"))
    assert (result.items, result.answers) == (7, 0)
    assert [_facts(item) for gold in (False, True) for item in queue.items("batch", gold=gold)] == before


def _facts(item: Any) -> dict[str, Any]:
    names = ("record", "content", "suggestion", "expected", "reason", "priority", "wanted", "answered", "checked")
    facts = {name: getattr(item, name) for name in (*names, "status", "resolution", "labels", "kind")}
    answers = [{**vars(answer), "id": None} for answer in item.answers]
    return facts | {"answers": answers}


def _batch_facts(queue: Queue) -> tuple[Any, ...]:
    batch = queue.batch("batch")
    assert batch is not None
    return batch.kind, batch.labels, batch.settings["gold"]


# All that breaks files: line ends of each kind, formulas, quotes, other scripts, control characters, apostrophes.
_HOSTILE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
TEXTS = _HOSTILE | st.sampled_from(
    [
        *(
            "=cmd|' /C calc'!A0",
            "'=1",
            "\n=1",
            "＝1",
            " ＋1",
            "+1",
            "@x",
            "\t1",
            "\r\n",
            "a\rb",
            '"',
            ",;\t",
            "\u202eabc\u202c",
            "{}",
            "null",
        ),
        *("\u2028", "\x85", "\x1b[2J", "\ufeff", "👩‍👩‍👧", "a#b", "1", "tie", "[1]", "' ", "-", "\\", "posttrain"),
    ]
)
WORDS = TEXTS.filter(lambda text: text.strip() != "")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(WORDS, WORDS, WORDS, TEXTS), min_size=1, max_size=4),
    kind=st.sampled_from(["choice", "choices", "text", "rewrite"]),
)
def test_hostile_texts_come_back_as_they_were(
    format: str, rows: list[tuple[str, str, str, str]], kind: str, new_queue: NewQueue, tmp_path: Path
) -> None:
    # A cell with a list in JSON is an answer of several labels.
    assume(format != "csv" or kind != "choice" or not any(row[1].strip().startswith("[") for row in rows))
    source, target = new_queue(), new_queue()
    labels = list(dict.fromkeys(row[1] for row in rows))
    items = [
        NewItem(
            f"r{number}",
            {"prompt": [{"role": "user", "content": text}], "answer": answer, "meta": {meta: meta, "k": meta}},
            reason=meta,
        )
        for number, (text, answer, _, meta) in enumerate(rows)
    ]
    source.add_batch("batch", kind, items, labels=labels if kind in ("choice", "choices") else None)
    for item, (_, label, answer, note) in zip(source.items("batch"), rows, strict=True):
        given_answer = {"choice": label, "choices": [label]}.get(kind, answer)
        source.answer(item.id, "ana", given_answer, note=note)
    path = tmp_path / f"first{SUFFIXES[format]}"
    for beside in tmp_path.glob("first.*"):
        beside.unlink()
    export_queue(source, "batch", path, format)
    import_queue(target, path, ImportOptions(batch="batch", kind=kind))
    assert answers_of(source, "batch") == answers_of(target, "batch")
    for item, other in zip(source.items("batch"), target.items("batch"), strict=True):
        assert shown_text(item.content) == shown_text(other.content)
        if format == "jsonl":
            assert _facts(item) == _facts(other)


@pytest.mark.parametrize("format", FORMATS)
def test_a_text_of_a_megabyte_is_no_problem(format: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    text = "äöü \"'\r\n" * 150_000
    source.add_batch("batch", "choice", [NewItem("r", {"text": text})], labels=["a"])
    path = tmp_path / f"big{SUFFIXES[format]}"
    export_queue(source, "batch", path, format)
    # Not twice.
    assert path.stat().st_size < 1.6 * len(json.dumps(text, ensure_ascii=False).encode())
    import_queue(target, path, ImportOptions(kind="choice"))
    assert shown_text(target.items("big")[0].content) == text


def test_no_cell_is_a_formula(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    formulas = ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "＝1", " ＠x", "\u3000+1", "\ufe63", "'\n=1"]
    items = [NewItem(f"r{n}", {"text": text, "meta": {"m": text}}) for n, text in enumerate(formulas)]
    queue.add_batch("batch", "choice", items, labels=formulas)
    for item, label in zip(queue.items("batch"), formulas, strict=True):
        queue.answer(item.id, "ana", label)
    export_queue(queue, "batch", tmp_path / "f.csv", "csv")
    with (tmp_path / "f.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [
        cell for cell in cells if cell.lstrip().startswith(tuple("=+-@＝＠\ufe63")) or cell[:1] in set("\t\r\n")
    ]
    target = new_queue()
    import_queue(target, tmp_path / "f.csv", ImportOptions(annotator="ana"))
    assert [item.answers[0].answer for item in target.items("f")] == formulas


def _edit(records: list[dict[str, Any]], format: str) -> None:
    """Changes ana's answer to the first record, and answers the fifth, as a person in the tool would."""
    if format == "label-studio":
        region = records[0]["annotations"][0]["result"][0]
        region["value"]["choices"] = ["cash"]
        new = {"completed_by": {"email": "bob"}, "result": [{**region, "id": "x"}], "was_cancelled": False}
        records[5]["annotations"].append(new)
    elif format == "jsonl":
        records[0] |= {"label": "cash", "annotator": "ana"}
        records[5]["label"] = "cash"
    else:
        records[0]["label"] = records[5]["label"] = "cash"


@pytest.mark.parametrize("format", FORMATS)
def test_answers_that_were_given_in_the_tool_count(format: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    fill(source, "choice")
    path = tmp_path / f"batch{SUFFIXES[format]}"
    export_queue(source, "batch", path, format)
    records = read_records(path)
    _edit(records, format)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text(json.dumps(records))
    import_queue(target, path, ImportOptions(annotator="bob"))
    answers = answers_of(target, "batch")
    assert answers["r0"] == [("ana", "cash")]
    assert answers["r5"] == [("bob", "cash")]
    assert answers["r1"] == [("Zoë 李", "cash")]
    items = {item.record: item for item in target.items("batch")}
    assert items["r5"].status == "done"
    assert items["r5"].resolution is not None
    if format != "csv":
        assert items["r1"].answers[0].seconds == 2.5


def test_an_export_never_replaces_a_file(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    fill(queue, "choice")
    (tmp_path / "tasks.xml").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_queue(queue, "batch", tmp_path / "tasks.json", "label-studio")
    assert sorted(path.name for path in tmp_path.glob("tasks.*")) == ["tasks.xml"]


def test_every_kind_is_tested() -> None:
    assert set(KINDS) == set(ALL_KINDS)


@pytest.mark.slow
def test_postgresql_gives_the_same_bytes(postgres_url: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source = new_queue()
    fill(source, "spans")
    metadata = Metadata(postgres_url, create=True)
    try:
        target = Queue(metadata)
        export_queue(source, "batch", tmp_path / "batch.jsonl", "jsonl")
        import_queue(target, tmp_path / "batch.jsonl", ImportOptions())
        result = import_queue(target, tmp_path / "batch.jsonl", ImportOptions(batch="batch"))
        assert (result.answers, result.repeated) == (0, 5)
        export_queue(target, "batch", tmp_path / "second.jsonl", "jsonl")
    finally:
        metadata.close()
    assert (tmp_path / "batch.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
