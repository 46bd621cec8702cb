"""Positions of spans mean the same words in every tool, whatever it counts in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.label.formats.exporter import FORMATS, export_queue
from posttrain.label.formats.importer import ImportOptions, ImportResult, import_queue
from posttrain.label.formats.items import PortableAnswer, PortableItem
from posttrain.label.formats.positions import UNITS, UnitChoice, write_positions
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.errors import UserError

NewQueue = Callable[..., Queue]

MEETING = "🎉🎉 Meet Dana Kim in Lisbon"
# Emoji, a family joined by ZWJ, a flag, a combining mark, line ends of each kind.
TEXTS = [
    MEETING,
    "👩‍👩‍👧 Dana\r\nKim 🇵🇹\r\nDana",
    "Zoe\u0308 e\u0301\r\n\r\n𝔸na\rb\nc",
    "\r\n🎉\r\n",
    "plain",
]


def task(text: str, *regions: dict[str, Any], id: int = 1) -> dict[str, Any]:
    result = [{"from_name": "label", "to_name": "text", "type": "labels", "value": region} for region in regions]
    return {"id": id, "data": {"text": text}, "annotations": [{"completed_by": 1, "result": result}]}


def region(start: int, end: int, words: str | None = None) -> dict[str, Any]:
    return {"start": start, "end": end, "labels": ["PER"]} | ({} if words is None else {"text": words})


def import_tasks(queue: Queue, folder: Path, *tasks: dict[str, Any], **options: Any) -> ImportResult:
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks))
    return import_queue(queue, path, ImportOptions(kind="spans", **options))


def words_of(queue: Queue, batch: str = "tasks") -> list[list[str]]:
    texts = [
        (item.content["prompt"][-1]["content"] if "prompt" in item.content else item.content["text"], item)
        for item in queue.items(batch)
    ]
    return [[text[s["start"] : s["end"]] for a in item.answers for s in a.answer] for text, item in texts]


def lf(texts: list[list[str]]) -> list[list[str]]:
    return [[text.replace("\r\n", "\n") for text in each] for each in texts]


@pytest.mark.parametrize(
    ("text", "start", "end", "words"),
    [
        (MEETING, 8, 16, "Dana Kim"),
        (MEETING, 10, 18, "Dana Kim"),
        ("Hi,\r\nI am Dana\r\nKim", 9, 17, "Dana\nKim"),
        ("Hi,\r\nI am Dana\r\nKim", 10, 19, "Dana\r\nKim"),
        ("Hi 🎉,\r\nI am Dana\r\nKim", 12, 20, "Dana\nKim"),
        # Label Studio writes a line end as a backslash and an n.
        ("Hi 🎉,\r\nI am Dana\r\nKim", 13, 22, "Dana\\n\\nKim"),
        ("e\u0301🎉 Dana", 5, 9, "Dana"),
    ],
)
def test_the_words_of_a_file_say_what_it_counts(
    text: str, start: int, end: int, words: str, new_queue: NewQueue, tmp_path: Path
) -> None:
    queue = new_queue()
    result = import_tasks(queue, tmp_path, task(text, region(start, end, words)))
    assert (result.answers, list(result.uncertain)) == (1, [])
    assert lf(words_of(queue)) == lf([[words.replace("\\n\\n", "\r\n")]])


def test_one_record_decides_for_those_without_words(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    tasks = [
        task(MEETING, region(10, 18), id=1),
        task(MEETING, region(10, 18, "Dana Kim"), id=2),
        # "a" stands at 2 in code points too, and the file counts otherwise.
        task("🎉aa", region(2, 3, "a"), id=3),
    ]
    result = import_tasks(queue, tmp_path, *tasks)
    assert not result.uncertain
    assert words_of(queue)[:2] == [["Dana Kim"], ["Dana Kim"]]
    assert queue.items("tasks")[2].answers[0].answer == [{"start": 1, "end": 2, "label": "PER"}]


def test_words_that_stand_nowhere_are_refused_with_the_record(new_queue: NewQueue, tmp_path: Path) -> None:
    tasks = [task("Dana", region(0, 4, "Dana")), task(MEETING, region(9, 17, "Dana Kim"), id=2)]
    with pytest.raises(UserError, match=r"record 2: the span from 9 to 17 is `Dana Kim` in the file, and the text has"):
        import_tasks(new_queue(), tmp_path, *tasks)
    with pytest.raises(UserError, match=r"record 1: the span from 8 to 16 is `Dana Kim`"):
        import_tasks(new_queue(), tmp_path, task(MEETING, region(8, 16, "Dana Kim")), positions="utf-16")
    with pytest.raises(UserError, match=r"record 1: a span begins or ends within a character"):
        import_tasks(new_queue(), tmp_path, task(MEETING, region(1, 4)), positions="utf-16")


def test_without_words_an_option_and_a_warning(new_queue: NewQueue, tmp_path: Path) -> None:
    tasks = [task("Dana 🎉", region(0, 4), id=1), task(MEETING, region(10, 18), id=2), task("Dana", region(0, 4), id=3)]
    unsure, sure = new_queue(), new_queue()
    # Only where the units differ: a span before the emoji means the same in each.
    uncertain = import_tasks(unsure, tmp_path, *tasks).uncertain
    assert [place.rpartition(", ")[2] for place in uncertain] == ["record 2"]
    assert words_of(unsure)[1] == ["na Kim i"]
    assert not import_tasks(sure, tmp_path, *tasks, positions="utf-16").uncertain
    assert words_of(sure) == [["Dana"], ["Dana Kim"], ["Dana"]]
    with pytest.raises(UserError, match=r"`utf16` is not a unit of positions; did you mean `utf-16`"):
        import_tasks(new_queue(), tmp_path, *tasks, positions="utf16")


@pytest.mark.parametrize(
    "record", [{"label": [[10, 18, "PER"]]}, {"label": [{"start": 10, "end": 18, "label": "PER"}]}]
)
def test_json_lines_of_doccano_and_argilla(record: dict[str, Any], new_queue: NewQueue, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": 1, "text": MEETING, **record}))
    queue = new_queue()
    assert not import_queue(queue, path, ImportOptions(positions="utf-16")).uncertain
    assert words_of(queue) == [["Dana Kim"]]
    assert import_queue(new_queue(), path, ImportOptions()).uncertain == [f"{path}:1"]
    with_words = [{"start": 10, "end": 18, "label": "PER", "text": "Dana Kim", "token_start": 2}]
    path.write_text(json.dumps({"id": 1, "text": MEETING, "label": with_words}))
    with pytest.raises(UserError, match=r"a span has the keys"):
        import_queue(new_queue(), path, ImportOptions())
    del with_words[0]["token_start"]
    path.write_text(json.dumps({"id": 1, "text": MEETING, "label": with_words}))
    queue = new_queue()
    assert not import_queue(queue, path, ImportOptions()).uncertain
    assert words_of(queue) == [["Dana Kim"]]


def all_spans(text: str) -> list[dict[str, Any]]:
    """Returns spans around each part of a text that no CRLF is cut in."""
    ends = [at for at in range(len(text) + 1) if text[max(at - 1, 0) : at + 1] != "\r\n"]
    return [{"start": start, "end": end, "label": "PER"} for start in ends for end in ends if start < end]


@pytest.mark.parametrize("unit", [None, *UNITS])
@pytest.mark.parametrize("format", FORMATS)
def test_exports_come_back(format: str, unit: str | None, new_queue: NewQueue, tmp_path: Path) -> None:
    source, target = new_queue(), new_queue()
    source.add_batch(
        "batch", "spans", [NewItem(f"r{n}", {"text": text}) for n, text in enumerate(TEXTS)], labels=["PER"]
    )
    for item in source.items("batch"):
        source.answer(item.id, "ana", all_spans(item.content["text"]))
    path = tmp_path / ("tasks.csv" if format == "csv" else "tasks.json")
    export_queue(source, "batch", path, format, unit)
    # A spreadsheet file has no place for the unit.
    options = ImportOptions(format=format, positions=unit if format == "csv" else None)
    assert not import_queue(target, path, options).uncertain
    answers = [
        [item.answers[0].answer for item in queue.items(name)] for queue, name in ((source, "batch"), (target, "tasks"))
    ]
    assert answers[0] == answers[1]
    assert (
        import_queue(
            source, path, ImportOptions(batch="batch", **({"positions": unit} if format == "csv" else {}))
        ).repeated
        == 5
    )


def test_label_studio_gets_utf_16(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "spans", [NewItem("r", {"text": MEETING})], labels=["PER"])
    queue.answer(queue.items("batch")[0].id, "ana", [{"start": 8, "end": 16, "label": "PER"}])
    export_queue(queue, "batch", tmp_path / "tasks.json", "label-studio")
    (exported,) = json.loads((tmp_path / "tasks.json").read_text())
    value = exported["annotations"][0]["result"][0]["value"]
    assert value == {"start": 10, "end": 18, "text": "Dana Kim", "labels": ["PER"]}
    with pytest.raises(UserError, match=r"--positions"):
        export_queue(queue, "batch", tmp_path / "other.json", "label-studio", "bytes")


def test_answers_join_a_batch_whose_line_ends_a_tool_has_changed(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "spans", [NewItem("1", {"text": "Hi\r\nDana\r\nKim"})], labels=["PER"])
    import_tasks(queue, tmp_path, task("Hi\nDana\nKim", region(3, 11, "Dana\nKim")), batch="batch")
    assert words_of(queue, "batch") == [["Dana\r\nKim"]]
    with pytest.raises(UserError, match=r"record 1: the text is not that of the batch's record"):
        import_tasks(queue, tmp_path, task("Hello\nDana", region(6, 10, "Dana")), batch="batch")


PARTS = st.sampled_from(["🎉", "👩‍👩‍👧", "e\u0301", "\r\n", "\r", "\n", "a", "b", " ", "ß", "𝔸"])


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8).map("".join), st.data(), st.sampled_from(UNITS))
def test_every_unit_is_read_as_it_was_written(text: str, data: st.DataObject, unit: str) -> None:
    spans = data.draw(st.lists(st.sampled_from(all_spans(text) or [{"start": 0, "end": len(text), "label": "x"}])))
    item = PortableItem("r", {"text": text}, expected=spans, answers=(PortableAnswer("ana", spans),))
    written = write_positions(item, unit)
    assert UnitChoice(None).read(written, "here") == item
    choice = UnitChoice(unit)
    assert (choice.read(written, "here"), choice.uncertain) == (item, [])
