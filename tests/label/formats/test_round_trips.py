"""A batch that is exported and imported into a fresh workspace is the same batch, in every format and of every kind."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_batches import KINDS, SUFFIXES, answers_of, fill, read_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.label.formats.exporter import CODECS, export_queue
from posttrain.label.formats.importer import ImportOptions, import_queue
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata

NewQueue = Callable[..., Queue]

PAIRS = [(format, kind) for format, codec in CODECS.items() for kind in codec.kinds]


@pytest.mark.parametrize(("format", "kind"), PAIRS)
def test_a_file_read_into_a_fresh_workspace_is_written_as_the_same_bytes(
    format: str, kind: str, new_queue: NewQueue, tmp_path: Path
) -> None:
    source, target = new_queue(), new_queue()
    fill(source, kind)
    first, second = tmp_path / f"batch{SUFFIXES[format]}", tmp_path / f"second{SUFFIXES[format]}"
    assert export_queue(source, "batch", first, format) == 7
    result = import_queue(target, first, ImportOptions())
    assert (result.format, result.kind, result.gold) == (format, kind, 1)
    export_queue(target, "batch", second, format)
    assert first.read_bytes() == second.read_bytes()
    # Not only the bytes, which could lack the same things twice.
    for gold in (False, True):
        before, after = (queue.items("batch", gold=gold) for queue in (source, target))
        for one, other in zip(before, after, strict=True):
            assert _facts(one) == _facts(other)
    assert _batch_facts(source) == _batch_facts(target)


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
        *("=cmd|' /C calc'!A0", "'=1", "+1", "@x", "\t1", "\r\n", "a\rb", '"', ",;\t", "\u202eabc\u202c", "{}", "null"),
        *("\u2028", "\x85", "\x1b[2J", "\ufeff", "👩‍👩‍👧", "a#b", "1", "tie", "[1]", "' ", "-", "\\", "posttrain"),
    ]
)
WORDS = TEXTS.filter(lambda text: text.strip() != "")


@pytest.mark.slow
@pytest.mark.parametrize("format", CODECS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(WORDS, WORDS, WORDS, TEXTS), min_size=1, max_size=4),
    kind=st.sampled_from(["choice", "choices", "text", "rewrite"]),
)
def test_hostile_texts_come_back_as_they_were(
    format: str, rows: list[tuple[str, str, str, str]], kind: str, new_queue: NewQueue, tmp_path: Path
) -> None:
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
    paths = [tmp_path / f"{name}{SUFFIXES[format]}" for name in ("first", "second")]
    for path in paths:
        path.unlink(missing_ok=True)
        for beside in tmp_path.glob(f"{path.stem}.*"):
            beside.unlink()
    export_queue(source, "batch", paths[0], format)
    import_queue(target, paths[0], ImportOptions(batch="batch"))
    export_queue(target, "batch", paths[1], format)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert answers_of(source, "batch") == answers_of(target, "batch")
    assert [_facts(item) for item in source.items("batch")] == [_facts(item) for item in target.items("batch")]


@pytest.mark.parametrize("format", CODECS)
def test_a_text_of_a_megabyte_is_no_problem(format: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    text = "äöü \"'\r\n" * 150_000
    source.add_batch("batch", "choice", [NewItem("r", {"text": text})], labels=["a"])
    path = tmp_path / f"big{SUFFIXES[format]}"
    export_queue(source, "batch", path, format)
    # Not twice: the text has its place in the tool's own part.
    assert path.stat().st_size < 1.6 * len(json.dumps(text, ensure_ascii=False).encode())
    import_queue(target, path, ImportOptions())
    assert target.items("big")[0].content == {"text": text}


@pytest.mark.parametrize("format", ["csv", "doccano-csv"])
def test_no_cell_is_a_formula(format: str, new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    formulas = ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1"]
    items = [NewItem(f"r{n}", {"text": text, "meta": {"m": text}}) for n, text in enumerate(formulas)]
    queue.add_batch("batch", "choice", items, labels=formulas)
    for item, label in zip(queue.items("batch"), formulas, strict=True):
        queue.answer(item.id, "ana", label)
    export_queue(queue, "batch", tmp_path / "f.csv", format)
    with (tmp_path / "f.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))]


def _edit(records: list[dict[str, Any]], format: str) -> None:
    """Changes ana's answer to the first record, and answers the fifth, as a person in the tool would."""
    if format == "label-studio":
        region = records[0]["annotations"][0]["result"][0]
        region["value"]["choices"] = ["cash"]
        new = {"completed_by": {"email": "bob"}, "result": [{**region, "id": "x"}], "was_cancelled": False}
        records[5]["annotations"].append(new)
    elif format == "argilla":
        records[0]["responses"]["label"][0]["value"] = "cash"
        records[5]["responses"] = {"label": [{"value": "cash", "user_id": "bob", "status": "submitted"}]}
    else:
        single = "cash" if format.endswith("csv") else ["cash"]
        records[0]["label"] = records[5]["label"] = single


@pytest.mark.parametrize("format", CODECS)
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
        path.write_text(json.dumps(records) if format != "doccano" else "\n".join(map(json.dumps, records)))
    import_queue(target, path, ImportOptions(annotator="bob"))
    answers = answers_of(target, "batch")
    named = format in ("label-studio", "argilla")
    # A tool without names cannot say that ana changed her mind: it is another person's answer. In our CSV it is hers.
    assert answers["r0"] in ([("ana", "cash")], [("ana", "card"), ("bob", "cash")])
    assert named <= (answers["r0"] == [("ana", "cash")])
    assert answers["r5"] == [("bob", "cash")]
    assert answers["r1"] == [("Zoë 李", "cash")]
    items = {item.record: item for item in target.items("batch")}
    assert items["r5"].status == "done"
    assert items["r5"].resolution is not None
    assert items["r1"].answers[0].seconds == 2.5


def test_tools_that_cannot_hold_a_kind_say_so(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    fill(queue, "ranking")
    with pytest.raises(UserError, match="doccano has no place for answers of the kind ranking"):
        export_queue(queue, "batch", tmp_path / "f.jsonl", "doccano")
    assert list(tmp_path.glob("*.jsonl")) == []


def test_an_export_never_replaces_a_file(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    fill(queue, "choice")
    (tmp_path / "tasks.xml").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_queue(queue, "batch", tmp_path / "tasks.json", "label-studio")
    assert sorted(path.name for path in tmp_path.glob("tasks.*")) == ["tasks.xml"]


def test_every_kind_is_tested() -> None:
    from posttrain.label.answer_kinds import KINDS as ALL

    assert set(KINDS) == set(ALL)


@pytest.mark.slow
def test_postgresql_gives_the_same_bytes(postgres_url: str, new_queue: NewQueue, tmp_path: Path) -> None:
    source = new_queue()
    fill(source, "spans")
    metadata = Metadata(postgres_url, create=True)
    try:
        target = Queue(metadata)
        export_queue(source, "batch", tmp_path / "batch.json", "label-studio")
        import_queue(target, tmp_path / "batch.json", ImportOptions())
        result = import_queue(target, tmp_path / "batch.json", ImportOptions(batch="batch"))
        assert (result.answers, result.repeated) == (0, 5)
        export_queue(target, "batch", tmp_path / "second.json", "label-studio")
    finally:
        metadata.close()
    assert (tmp_path / "batch.json").read_bytes() == (tmp_path / "second.json").read_bytes()
