"""Files as the tools write them: what is read from each, and that nothing of it is lost in an export to the same tool.

Argilla's files were written by `argilla` 2.8 (``records.to_json``), doccano's by the formatters and writers of doccano
1.8.4. Label Studio's follow its documented format, and `label-studio-sdk` 2.1 accepts each annotation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_batches import answers_of, read_records

from posttrain.label.formats.exporter import export_queue
from posttrain.label.formats.importer import ImportOptions, ImportResult, import_queue
from posttrain.label.queue import Queue

NewQueue = Callable[..., Queue]

FILES = Path(__file__).parent / "tool_files"
FIRST, SECOND = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"


def read(queue: Queue, name: str, **options: Any) -> ImportResult:
    return import_queue(queue, FILES / name, ImportOptions(batch="batch", **options))


def missing(part: Any, whole: Any, where: str = "") -> list[str]:
    """Returns the places where ``whole`` lacks something of ``part``; lists may be in another order."""
    if isinstance(part, dict):
        if not isinstance(whole, dict):
            return [where]
        # An empty list says what no list says. Argilla's server counts a record's status from its responses.
        names = [name for name, value in part.items() if value not in ([], {}, None) and name != "status"]
        return [place for name in names for place in missing(part[name], whole.get(name), f"{where}.{name}")]
    if isinstance(part, list):
        if not isinstance(whole, list):
            return [where]
        return [f"{where}[{n}]" for n, each in enumerate(part) if all(missing(each, other) for other in whole)]
    return [] if part == whole else [where]


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_nothing_of_a_tools_file_is_lost(path: Path, new_queue: NewQueue, tmp_path: Path) -> None:
    first, second = new_queue(), new_queue()
    format = import_queue(first, path, ImportOptions(batch="batch")).format
    exported, again = tmp_path / f"one{path.suffix}", tmp_path / f"two{path.suffix}"
    export_queue(first, "batch", exported, format)
    before, after = read_records(path), read_records(exported)
    if path.suffix == ".csv":
        before, after = ([{k: v for k, v in row.items() if v} for row in rows] for rows in (before, after))
    assert len(before) == len(after)
    assert [place for pair in zip(before, after, strict=True) for place in missing(*pair)] == []
    import_queue(second, exported, ImportOptions(batch="batch"))
    export_queue(second, "batch", again, format)
    assert exported.read_bytes() == again.read_bytes()
    assert answers_of(first, "batch") == answers_of(second, "batch")


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
    assert result.foreign["predictions"] == 1
    assert result.foreign["annotations.result"] == 1


def test_another_question_of_the_same_file(new_queue: NewQueue) -> None:
    queue = new_queue()
    result = read(queue, "argilla_records.json", question="entities")
    assert (result.kind, result.answers) == ("spans", 1)
    spans = [{"start": 0, "end": 3, "label": "PER"}, {"start": 12, "end": 16, "label": "LOC"}]
    assert answers_of(queue, "batch")["rec-1"] == [(FIRST, spans)]


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
    assert result.foreign["annotations.result"] == 1


def test_argilla(new_queue: NewQueue) -> None:
    queue = new_queue()
    result = read(queue, "argilla_records.json")
    assert (result.format, result.kind, result.items, result.answers) == ("argilla", "choice", 4, 4)
    answers = answers_of(queue, "batch")
    assert answers["rec-1"] == [(FIRST, "travel"), (SECOND, "money")]
    assert answers["rec-3"] == []
    item = next(item for item in queue.items("batch") if item.record == "rec-1")
    assert item.suggestion == {"answer": "travel", "confidence": 0.9, "annotator": "bert"}
    assert item.content["meta"]["pages"] == 3
    assert {"vectors", "fields.title", "responses.why", "suggestions.entities"} <= set(result.foreign)
    ranking = new_queue()
    assert read(ranking, "argilla_ranking.json").kind == "ranking"
    assert answers_of(ranking, "batch") == {"p1": [(FIRST, [1, 0, 2])]}


@pytest.mark.parametrize(
    ("name", "kind", "answers"),
    [
        ("classification.jsonl", "choice", ["negative", "positive"]),
        ("classification.json", "choices", [["negative"], ["cheap", "positive"]]),
        ("classification.csv", "choices", [["negative"], ["cheap", "positive"]]),
        ("seq2seq.jsonl", "text", [None, "Guter Preis"]),
    ],
)
def test_doccano(name: str, kind: str, answers: list[Any], new_queue: NewQueue) -> None:
    queue = new_queue()
    result = read(queue, f"doccano_{name}", annotator="ana")
    assert result.kind == kind
    given = answers_of(queue, "batch")
    for record, answer in zip(("7", "8"), answers, strict=True):
        ((annotator, value),) = given[record]
        assert annotator == "ana"
        if answer is not None:
            assert sorted(value) == sorted(answer) if kind == "choices" else value == answer
    assert given["9"] == []
    assert queue.items("batch")[0].content["prompt"][0]["content"] == "Terrible/customer service."
    assert queue.items("batch")[0].content["meta"]["lang"] == "en"
    assert result.foreign["Comments"] == 1


def test_doccano_spans(new_queue: NewQueue) -> None:
    queue, relations = new_queue(), new_queue()
    assert read(queue, "doccano_spans.jsonl").kind == "spans"
    (given,) = answers_of(queue, "batch")["7"]
    assert given[1] == [{"start": 0, "end": 8, "label": "BAD"}, {"start": 9, "end": 17, "label": "WHO"}]
    result = read(relations, "doccano_relations.jsonl")
    assert answers_of(relations, "batch")["1"][0][1] == [{"start": 0, "end": 6, "label": "ORG"}]
    assert result.foreign["relations"] == 1


def test_the_same_file_again_adds_nothing(new_queue: NewQueue) -> None:
    queue = new_queue()
    read(queue, "argilla_records.json")
    before = answers_of(queue, "batch")
    result = read(queue, "argilla_records.json", question="topic")
    assert (result.created, result.answers, result.repeated) == (False, 0, 4)
    assert answers_of(queue, "batch") == before


def test_answers_of_a_second_annotator_join_the_batch(new_queue: NewQueue) -> None:
    queue = new_queue(overlap=2)
    read(queue, "doccano_classification.jsonl", annotator="ana")
    assert [item.status for item in queue.items("batch")] == ["open", "open", "open"]
    read(queue, "doccano_classification.jsonl", annotator="bob")
    assert [item.status for item in queue.items("batch")] == ["done", "done", "open"]
    assert answers_of(queue, "batch")["7"] == [("ana", "negative"), ("bob", "negative")]


def test_right_answers_measure_annotators(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    rows = (FILES / "doccano_classification.jsonl").read_text().splitlines()[:2]
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(rows))
    result = import_queue(queue, path, ImportOptions(gold=True))
    assert (result.gold, result.answers) == (2, 0)
    assert [item.expected for item in queue.items("gold", gold=True)] == ["negative", "positive"]
    batch = queue.batch("gold")
    assert batch is not None
    assert batch.settings["gold"] == 2
