"""Files of other tools: what is read from each, and what is counted as left out.

Label Studio's files follow its documented format, and `label-studio-sdk` 2.1 accepts each annotation.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_batches import answers_of

from posttrain.label.formats.importer import ImportOptions, ImportResult, import_queue
from posttrain.label.queue import Queue

NewQueue = Callable[..., Queue]

FILES = Path(__file__).parent / "tool_files"


def read(queue: Queue, name: str, **options: Any) -> ImportResult:
    return import_queue(queue, FILES / name, ImportOptions(batch="batch", **options))


def test_label_studio_choices(new_queue: NewQueue) -> None:
    queue = new_queue()
    result = read(queue, "label_studio_choices.json")
    assert (result.format, result.kind, result.items, result.gold) == ("label-studio", "choice", 5, 1)
    assert answers_of(queue, "batch") == {
        "1": [("10", "Positive"), ("11", "Negative")],
        "2": [],
        "3": [("10", None)],
        "4": [],
        "5": [("ana@example.org", "Positive")],
    }
    items = {item.record: item for item in queue.items("batch")}
    assert items["1"].suggestion == {"answer": "Positive", "confidence": 0.93, "annotator": "model 1"}
    assert items["1"].content["prompt"] == [{"role": "user", "content": "I love it"}]
    assert items["1"].content["meta"]["source"] == "mail"
    assert items["1"].answers[0].seconds == 4.288
    assert items["1"].answers[0].created_at.year == 2024
    # Two answers that differ where one was wanted: nobody is asked a third time without accounts, a reviewer decides.
    assert [items[name].status for name in "1345"] == ["review", "open", "open", "done"]
    assert queue.items("batch", gold=True)[0].expected == "Negative"
    # The second model, and the answer to another question.
    assert result.left_out["predictions"] == 1
    assert result.left_out["annotations.result"] == 1


def test_label_studio_spans(new_queue: NewQueue) -> None:
    queue = new_queue()
    assert read(queue, "label_studio_spans.json").kind == "spans"
    spans = [{"start": 0, "end": 3, "label": "PER"}, {"start": 14, "end": 18, "label": "LOC"}]
    assert answers_of(queue, "batch") == {"1": [("10", spans)], "2": [("10", [])]}


def test_label_studio_preferences(new_queue: NewQueue) -> None:
    pairs, ranks = new_queue(), new_queue()
    assert read(pairs, "label_studio_pairwise.json").kind == "preference"
    assert pairs.items("batch")[0].content["candidates"] == ["short", "long text"]
    assert answers_of(pairs, "batch") == {"1": [("10", 1)]}
    assert read(ranks, "label_studio_ranker.json").kind == "ranking"
    assert ranks.items("batch")[0].content["candidates"] == ["more jobs", "no jobs"]
    assert answers_of(ranks, "batch") == {"1": [("10", [1, 0])]}


def test_label_studio_texts_beside_what_is_foreign(new_queue: NewQueue) -> None:
    queue = new_queue()
    result = read(queue, "label_studio_textarea.json")
    assert result.kind == "text"
    assert answers_of(queue, "batch") == {"1": [("10", "a brown dog\nrunning")]}
    assert result.left_out["annotations.result"] == 1


def test_another_question_of_the_same_file(new_queue: NewQueue, tmp_path: Path) -> None:
    region = {"from_name": "mood", "to_name": "text", "type": "choices", "value": {"choices": ["calm"]}}
    other = {"from_name": "who", "to_name": "text", "type": "textarea", "value": {"text": ["Ana"]}}
    tasks = [
        {"id": 1, "data": {"text": "x"}, "annotations": [{"completed_by": 1, "result": [region, other]}]},
        {"id": 2, "data": {"text": "y"}, "annotations": [{"completed_by": 1, "result": [region]}]},
    ]
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(tasks))
    moods, names = new_queue(), new_queue()
    assert import_queue(moods, path, ImportOptions()).kind == "choice"
    assert answers_of(moods, "batch") == {"1": [("1", "calm")], "2": [("1", "calm")]}
    result = import_queue(names, path, ImportOptions(question="who"))
    assert (result.kind, result.answers, result.left_out["annotations"]) == ("text", 1, 1)
    assert answers_of(names, "batch") == {"1": [("1", "Ana")], "2": []}


LABELLED = [
    ([("bad", "negative"), ("good", "positive"), ("fine", "positive")], "choice", ["negative", "positive", "positive"]),
    ([("bad", ["negative"]), ("good", ["cheap", "positive"])], "choices", [["negative"], ["cheap", "positive"]]),
    ([("Preis?", "What does it cost, and for how long?\nWrite to us."), ("Hallo", "Hi")], "text", None),
    ([("Ana paid", [[0, 3, "PER"]])], "spans", [[{"start": 0, "end": 3, "label": "PER"}]]),
    ([("Ana paid", [{"start": 0, "end": 3, "label": "PER"}])], "spans", [[{"start": 0, "end": 3, "label": "PER"}]]),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize(("rows", "kind", "answers"), LABELLED)
def test_labels_that_you_have_already(
    rows: list[tuple[str, Any]], kind: str, answers: list[Any] | None, suffix: str, new_queue: NewQueue, tmp_path: Path
) -> None:
    path = tmp_path / f"old{suffix}"
    records = [
        {"id": str(number), "prompt": text, "label": label, "lang": "en"} for number, (text, label) in enumerate(rows)
    ]
    records.append({"id": "last", "prompt": "not labelled", "label": "" if suffix == ".csv" else [], "lang": "en"})
    if suffix == ".csv":
        for record in records:
            if not isinstance(record["label"], str):
                record["label"] = json.dumps(
                    [{"start": 0, "end": 3, "label": "PER"}] if kind == "spans" else record["label"]
                )
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        text = json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records))
        path.write_text(text)
    queue = new_queue()
    result = import_queue(queue, path, ImportOptions(annotator="ana"))
    assert (result.kind, result.items, result.answers) == (kind, len(rows) + 1, len(rows))
    expected = answers or [label for _, label in rows]
    given = answers_of(queue, "old")
    assert [given[str(number)] for number in range(len(rows))] == [[("ana", answer)] for answer in expected]
    assert given["last"] == []
    item = queue.items("old")[0]
    assert (item.content["prompt"][0]["content"], item.content["meta"]) == (rows[0][0], {"lang": "en"})


def write_labels(path: Path, **columns: str) -> Path:
    rows = [
        {"id": "7", "text": "bad", "label": "negative"},
        {"id": "8", "text": "good", "label": "positive"},
        {"id": "9", "text": "?"},
    ]
    path.write_text("\n".join(json.dumps(row | columns) for row in rows))
    return path


def test_the_same_file_again_adds_nothing(new_queue: NewQueue, tmp_path: Path) -> None:
    queue, path = new_queue(), write_labels(tmp_path / "batch.jsonl")
    import_queue(queue, path, ImportOptions())
    before = answers_of(queue, "batch")
    result = import_queue(queue, path, ImportOptions(batch="batch"))
    assert (result.created, result.answers, result.repeated) == (False, 0, 2)
    assert answers_of(queue, "batch") == before


def test_answers_of_a_second_annotator_join_the_batch(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue(overlap=2)
    import_queue(queue, write_labels(tmp_path / "batch.jsonl"), ImportOptions(annotator="ana"))
    assert [item.status for item in queue.items("batch")] == ["open", "open", "open"]
    path = write_labels(tmp_path / "second.jsonl", annotator="bob")
    import_queue(queue, path, ImportOptions(batch="batch"))
    assert [item.status for item in queue.items("batch")] == ["done", "done", "open"]
    assert answers_of(queue, "batch")["7"] == [("ana", "negative"), ("bob", "negative")]


def test_right_answers_measure_annotators(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    path = write_labels(tmp_path / "gold.jsonl")
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    result = import_queue(queue, path, ImportOptions(gold=True))
    assert (result.gold, result.answers) == (2, 0)
    assert [item.expected for item in queue.items("gold", gold=True)] == ["negative", "positive"]
    batch = queue.batch("gold")
    assert batch is not None
    assert batch.settings["gold"] == 2


def labelled_task(id: int, *annotations: list[dict[str, Any]]) -> dict[str, Any]:
    given = [{"completed_by": number, "result": result} for number, result in enumerate(annotations, 1)]
    return {"id": id, "data": {"text": "Ana paid"}, "annotations": given}


def test_a_region_without_labels_costs_no_annotation(new_queue: NewQueue, tmp_path: Path) -> None:
    who = {"from_name": "label", "to_name": "text", "type": "labels"}
    named = who | {"value": {"start": 0, "end": 3, "text": "Ana", "labels": ["PER"]}}
    blank = who | {"value": {"start": 4, "end": 8, "text": "paid"}}
    empty = who | {"value": {"start": 4, "end": 8, "text": "paid", "labels": []}}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps([labelled_task(1, [named]), labelled_task(2, [blank, named, empty], [blank])]))
    queue = new_queue()
    result = import_queue(queue, path, ImportOptions())
    spans = [{"start": 0, "end": 3, "label": "PER"}]
    # The second annotation of record 2 marks words and does not say what they are: that is not "no spans".
    assert answers_of(queue, "batch") == {"1": [("1", spans)], "2": [("1", spans)]}
    assert result.left_out == {"annotations.result without a label": 3, "annotations": 1}
    place = f"{path}, record 2"
    assert result.first_left_out == {"annotations.result without a label": place, "annotations": place}


def test_a_task_submitted_without_a_label_is_an_answer(new_queue: NewQueue, tmp_path: Path) -> None:
    region = {"from_name": "topics", "to_name": "text", "type": "choices", "value": {"choices": ["a", "b"]}}
    tasks = [labelled_task(1, [region]), labelled_task(2, []), labelled_task(3)]
    other = {"from_name": "mood", "to_name": "text", "type": "rating", "value": {"rating": 3}}
    # A person has seen all questions; a model may know one of them alone.
    tasks[0]["predictions"] = [{"result": [other], "score": 0.5}]
    tasks.append(labelled_task(4, [other]))
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(tasks))
    queue = new_queue()
    result = import_queue(queue, path, ImportOptions(question="topics"))
    assert answers_of(queue, "batch") == {"1": [("1", ["a", "b"])], "2": [("1", [])], "3": [], "4": [("1", [])]}
    assert queue.items("batch")[0].suggestion is None
    assert result.left_out["predictions"] == 1
