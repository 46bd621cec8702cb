"""Files that cannot be read end in one line with their place, and leave the workspace as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_batches import fill, read_records
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.label.formats.exporter import export_queue
from posttrain.label.formats.files import read_json_records
from posttrain.label.formats.importer import ImportOptions, import_queue
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.errors import UserError

NewQueue = Callable[..., Queue]


def task(**values: Any) -> dict[str, Any]:
    region = {"from_name": "label", "to_name": "text", "type": "choices", "value": {"choices": ["a"]}}
    annotation = {"completed_by": 1, "result": [region]}
    return {"data": {"text": "x"}, "annotations": [annotation], "predictions": []} | values


def tasks(*changed: dict[str, Any]) -> str:
    return json.dumps([task(id=1), *changed])


DAMAGED: list[dict[str, Any]] = [
    *({"answers": 3}, {"answers": [{"who": 1}]}, {"answers": [1]}, {"answers": [{"answer": "a", "status": "liked"}]}),
    {"answers": [{"annotator": "a", "answer": "a", "created_at": "never"}]},
    {"answers": [{"annotator": "a", "answer": "a"}, {"annotator": "a", "answer": "a"}]},
    *({"queue": {"reason": 1}}, {"queue": {"priority": "high"}}, {"queue": {"checked": 1}}),
    {"label": None, "answers": [{"annotator": "a", "answer": "a"}], "queue": {"status": "x"}},
    {"answers": [{"annotator": "a", "answer": "a", "confidence": 95}]},
    *({"suggestion": {"model": 1}}, {"meta": 1}, {"candidates": "x"}, {"answer": 1}),
]

MISTAKES = [
    ("f.json", "", "f.json: the file is empty"),
    ("f.json", "[]", "f.json: the file has no records"),
    ("f.json", "[1]", "f.json, record 1: a record must be a JSON object"),
    ("f.json", tasks({"data": 1}), "f.json, record 2: a task has an object `data`"),
    ("f.json", tasks(task(data={"a": "x", "b": "y"})), "f.json, record 2: no text in `data`; --field: a, b"),
    ("f.json", tasks()[:-1], "f.json, record 2: broken JSON: the array never closes"),
    ("f.json", tasks() + "]", "f.json: something follows the end of the array"),
    ("f.json", tasks(task(id=1)), "f.json, record 2: the record `1` is in f.json, record 1 already"),
    ("f.json", tasks(task(id="x" * 101)), "f.json, record 2: the record `"),
    ("f.json", json.dumps([task(data={"text": "a\0"})]), "f.json, record 1: holds a NUL character"),
    ("f.json", json.dumps([task(data={"text": "\ud800"})]), "f.json, record 1: holds half a surrogate pair"),
    ("f.json", '[{"data": {"text": NaN}}]', "f.json, record 1: broken JSON: `NaN` is not JSON"),
    ("f.json", '[{"data": {"text": "a", "text": "b"}}]', "the key `text` occurs twice in one object"),
    ("f.json", "[" * 5000, "f.json, record 1: nested too deeply"),
    (
        "f.json",
        tasks(task(predictions=[{"score": 93, "result": task()["annotations"][0]["result"]}])),
        "f.json, record 2: 93.0 is not a possible value of `confidence`; give 0 to 1",
    ),
    ("f.json", json.dumps([task(annotations=[], predictions=[])]), "no answers to see their kind from; --kind: choice"),
    *(("f.jsonl", json.dumps({"text": "x", "label": "a", "annotator": "b"} | each), "f.jsonl:1: ") for each in DAMAGED),
    ("f.jsonl", '{"text": "a", "label": ["x"]}\n{"label": []}', "f.jsonl:2: no text in `the record`"),
    ("f.jsonl", '{"text": "a", "label": ["x"]}\n{', "f.jsonl:2: broken JSON: "),
    ("f.jsonl", '{"text": "abc", "label": [[0, 9, "X"]]}', "f.jsonl:1: the span from 0 to 9 is not within the 3"),
    ("f.jsonl", '{"n": 1}', "no answers to see their kind from"),
    ("f.csv", "", "f.csv: the file is empty"),
    ("f.csv", "text,label\na\n", "f.csv:2: 1 fields where the header names 2"),
    ("f.csv", 'text,label\n"a,b\n', "f.csv:2: broken CSV: a quoted field never closes"),
    ("f.csv", "text,text\na,b\n", "f.csv:1: there is more than one column `text`"),
    ("f.csv", "text,label\n\0,b\n", "f.csv:2: holds a NUL character"),
    ("f.csv", "text,label,meta\na,b,{\n", "f.csv:2: `content` is not of the right form"),
]


@pytest.mark.parametrize(("name", "text", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_one_line_and_change_nothing(
    name: str, text: str, message: str, new_queue: NewQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = new_queue()
    before = queue.metadata.count_rows()
    Path(name).write_text(text)
    with pytest.raises(UserError) as error:
        import_queue(queue, Path(name), ImportOptions())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert queue.metadata.count_rows() == before


def test_bytes_that_are_no_text(new_queue: NewQueue, tmp_path: Path) -> None:
    for name in ("f.json", "f.jsonl", "f.csv"):
        (tmp_path / name).write_bytes(b'{"text": "\xff"}\n')
        with pytest.raises(UserError, match="not UTF-8"):
            import_queue(new_queue(), tmp_path / name, ImportOptions())
    with pytest.raises(UserError, match="no such file"):
        import_queue(new_queue(), tmp_path / "none.json", ImportOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mood"}, "`mood` is not a kind of answers"),
        ({"question": "mood"}, "no answers to `mood`; there are: label"),
        ({"field": "title"}, "no text in `data`; --field: text"),
        ({"kind": "preference"}, "0 candidates"),
        ({"kind": "rating"}, "no `answer` for a rating"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, str], message: str, new_queue: NewQueue, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(tasks())
    with pytest.raises(UserError) as error:
        import_queue(new_queue(), tmp_path / "f.json", ImportOptions(**options))
    assert message in str(error.value)


def test_a_label_outside_the_batchs_set(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "choice", [NewItem("1", {"text": "x"})], labels=["b", "c"])
    (tmp_path / "f.json").write_text(tasks())
    with pytest.raises(UserError, match=r"f\.json, record 1: label `a` is not in the label set"):
        import_queue(queue, tmp_path / "f.json", ImportOptions(batch="batch"))
    assert queue.items("batch")[0].answers == ()


def test_a_record_that_the_batch_lacks_undoes_the_answers_before_it(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "choice", [NewItem("1", {"text": "x"})], labels=["a"])
    (tmp_path / "f.json").write_text(tasks(task(id=2, data={"text": "y"})))
    with pytest.raises(UserError, match="record 2: no record of the batch `batch` has the id `2`"):
        import_queue(queue, tmp_path / "f.json", ImportOptions(batch="batch"))
    assert queue.items("batch")[0].answers == ()


def test_another_tools_ids_are_told_by_their_texts(new_queue: NewQueue, tmp_path: Path) -> None:
    """A text that two records show tells neither."""
    queue = new_queue()
    prompt = [{"role": "user", "content": "a  card"}]
    contents = [{"text": "x"}, {"prompt": prompt}, {"text": "twice"}, {"text": " twice"}]
    items = [NewItem(f"{number:020x}", content) for number, content in enumerate(contents)]
    queue.add_batch("batch", "choice", items, labels=["a"])
    path = tmp_path / "f.json"
    path.write_text(tasks(task(id=7, data={"text": "a card"})))
    for expected in ((2, 0), (0, 2)):
        result = import_queue(queue, path, ImportOptions(batch="batch"))
        assert (result.items, result.answers, result.repeated) == (2, *expected)
    assert [[answer.answer for answer in item.answers] for item in queue.items("batch")] == [["a"], ["a"], [], []]
    path.write_text(json.dumps([task(id=8, data={"text": "twice"})]))
    with pytest.raises(UserError, match="has the id `8`, or this text alone"):
        import_queue(queue, path, ImportOptions(batch="batch"))


def test_another_tools_candidates_tell_the_records_of_one_prompt(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    prompt = [{"role": "user", "content": "which"}]
    pairs = [["a", "b"], ["c", "d"]]
    items = [NewItem(f"{at:020x}", {"prompt": prompt, "candidates": pair}) for at, pair in enumerate(pairs)]
    queue.add_batch("batch", "preference", items)
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"id": "7", "prompt": "which", "candidates": ["c", "d"], "label": 1}) + "\n")
    assert import_queue(queue, path, ImportOptions(batch="batch")).answers == 1
    assert [[answer.answer for answer in item.answers] for item in queue.items("batch")] == [[], [1]]


def test_another_answer_of_the_same_annotator(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "choice", [NewItem("1", {"text": "x"})], labels=["a", "b"])
    queue.answer(queue.items("batch")[0].id, "1", "b")
    (tmp_path / "f.json").write_text(tasks())
    with pytest.raises(UserError, match="`1` has answered this item otherwise already"):
        import_queue(queue, tmp_path / "f.json", ImportOptions(batch="batch"))


@pytest.mark.slow
def test_edited_exports_never_end_in_a_defect(new_queue: NewQueue, tmp_path: Path) -> None:
    source = new_queue()
    fill(source, "choice")
    path = tmp_path / "batch.jsonl"
    export_queue(source, "batch", path, "jsonl")
    records = read_records(path)
    names = {name for record in records for name in record}
    inner = {name for record in records for name in record["queue"]}
    given = {name for record in records for each in record.get("answers", ()) for name in each}
    first = records[0]
    for value in (None, 1, "x", [None], [{}], {"status": "x", "wanted": 1}):
        changed = [first | {name: value} for name in sorted(names)]
        changed += [first | {"queue": first["queue"] | {name: value}} for name in sorted(inner)]
        changed += [first | {"answers": [first["answers"][0] | {name: value}]} for name in sorted(given)]
        for record in changed:
            bad = tmp_path / "bad.jsonl"
            bad.write_text(json.dumps(record))
            queue = new_queue()
            try:
                import_queue(queue, bad, ImportOptions(kind="choice"))
            except UserError:
                assert queue.batches() == []


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(max_examples=30)
@given(
    rows=st.lists(st.dictionaries(_TEXT, st.none() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT)),
    indent=st.sampled_from([None, 1, "\t"]),
    ascii=st.booleans(),
)
def test_arrays_are_read_however_they_are_written(
    rows: list[dict[str, Any]], indent: Any, ascii: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii), encoding="utf-8")
    assert [record.value for record in read_json_records(path, "f")] == rows
