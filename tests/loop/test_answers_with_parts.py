"""Whole rounds of ratings, several labels and spans, answered on the pages and in a CSV file."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.inspect.config_check import check_data
from posttrain.label.annotator import AnnotationRequest
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.loop.config import load_config
from posttrain.loop.open_batch import answer_batch, import_batch, read_batch
from posttrain.loop.own_batches import OwnLabels, write_own_labels
from posttrain.loop.stages.suggest import with_usable_suggestions
from posttrain.models.answer_form import ChoicesForm
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
Write = Callable[..., Path]

LABELS = ["card", "cash", "loan", "rate"]
TASKS: dict[str, dict[str, Any]] = {
    "rating": {"labels": [1, 2, 3]},
    "choices": {"labels": LABELS},
    "spans": {"labels": ["thing"]},
}


def answer_of(kind: str, text: str) -> tuple[Any, str, str]:
    """The answer to a message as the queue has it, as people may write it into a file, and as its one text."""
    labels = [label for label in LABELS if label in text.split()]
    if kind == "rating":
        number = str(1 + len(labels))
        return number, f" {number}", number
    if kind == "choices":
        return labels, ",".join(reversed(labels)) or "None", "; ".join(labels) or "none"
    spans = [{"start": text.index(label), "end": text.index(label) + len(label), "label": "thing"} for label in labels]
    spans.sort(key=lambda span: span["start"])
    cell = json.dumps([[span["start"], span["end"], "thing"] for span in reversed(spans)])
    words = [{"label": "thing", "text": text[span["start"] : span["end"]]} for span in spans]
    return spans, cell, json.dumps(words)


@pytest.fixture
def write(small: Any) -> Write:
    """Writes a workspace whose files hold answers of a kind as numbers and lists; takes changes of its config."""

    def workspace(kind: str, name: str = "workspace", **changes: Any) -> Path:
        values = {"rounds": 1, "label": {"annotator": "people", "per_round": 4, "file": "answers.jsonl"}}
        data = {"pool": ["pool.jsonl"], "test": ["test.jsonl"]}
        for section, of_kind in {"task": {"kind": kind, "max_new_tokens": 4, **TASKS[kind]}, "data": data}.items():
            values[section] = {**of_kind, **changes.pop(section, {})}
        root: Path = small(name, **{**values, **changes})
        # About one thing, two, or none.
        things = [[row["label"], f"{row['label']} not cash", "ticket"] for row in small.rows()]
        messages = [f"my {thing[number % 3]} is {number}" for number, thing in enumerate(things)]
        for file, chosen in (("pool", messages[:24]), ("test", messages[60:68]), ("answers", messages)):
            rows = [{"text": text, "label": answer_of(kind, text)[0]} for text in chosen]
            rows = [row | {"label": int(row["label"])} for row in rows] if kind == "rating" else rows
            # What a pool has in the column of answers is not read.
            rows = [row | {"label": ["?"]} for row in rows] if file == "pool" else rows
            (root / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return root

    return workspace


@pytest.mark.parametrize("kind", TASKS)
def test_a_round_from_the_batch_to_the_champion(kind: str, write: Write, open_loop: Open) -> None:
    loop = open_loop(write(kind))
    config = load_config(loop.root)
    assert check_data(config, loop.root, loop.store).errors == []
    assert str(loop.run()).startswith("labels for round 1")
    queue = Queue(loop.metadata)
    items = queue.items("round-1")
    assert {item.kind for item in items} == {"choice" if kind == "rating" else kind}
    message = {item.record: item.content["prompt"][0]["content"] for item in items}
    on_pages, first, *others = message
    queue.answer(items[0].id, "bo", answer_of(kind, message[on_pages])[0])
    cells = {id: answer_of(kind, message[id])[1] for id in others}
    filled = fill(loop.root, {**cells, first: "nonsense"})
    with pytest.raises(UserError, match=r"filled.csv:\d: .*`nonsense` is not"):
        import_batch(loop.store, config, filled)
    import_batch(loop.store, config, fill(loop.root, cells))
    # The last one in Python, as JSON has it.
    with pytest.raises(UserError, match=r"crad.* is not"):
        answer_batch(loop.store, config, {first: ["crad"]})
    answer = answer_of(kind, message[first])[0]
    answer_batch(loop.store, config, {first: int(answer) if kind == "rating" else answer})
    assert {row["id"] for row in read_batch(loop.store, config) if row["label"]} == {first, *others}
    assert loop.run() is None
    done = {item.record: item.resolution["answer"] for item in queue.items("round-1") if item.resolution}
    assert done == {record: answer_of(kind, text)[0] for record, text in message.items()}
    assert sorted(loop.trained_on(1).values()) == sorted(answer_of(kind, text)[2] for text in message.values())
    baseline, entry = loop.status["rounds"]
    assert entry["decision"] == "deploy"
    own = {"rating": "mean_absolute_error", "choices": "micro_f1", "spans": "record_f1"}[kind]
    assert own in entry["metrics"].keys() & baseline["metrics"].keys()
    assert own.replace("_", " ").replace("f1", "F1") in loop.page


def fill(root: Path, cells: dict[str, str]) -> Path:
    """Writes a filled copy of the batch's file."""
    with (root / "labels" / "round-1.csv").open(encoding="utf-8", newline="") as file:
        rows = [row | {"label": cells.get(row["id"], "")} for row in csv.DictReader(file)]
    with (root / "filled.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return root / "filled.csv"


def test_a_stopped_round_of_spans_ends_in_the_same_model(write: Write, open_loop: Open) -> None:
    changes: dict[str, Any] = {"label": {"annotator": "oracle", "file": "answers.jsonl", "per_round": 4}}
    whole, stopped = (open_loop(write("spans", name, **changes)) for name in ("whole", "stopped"))
    whole.run()
    stopped.run(until="label")
    open_loop(stopped.root).run(until="train")
    open_loop(stopped.root).run()
    assert stopped.champion == whole.champion
    assert stopped.trained_on(1) == whole.trained_on(1)


@pytest.mark.parametrize(
    ("kind", "batch", "labels", "answers", "expected"),
    [
        ("choices", "choices", LABELS, [["cash", "card"], []], ["card; cash", "none"]),
        ("choices", "choice", LABELS, ["cash", "loan"], ["cash", "loan"]),
        ("rating", "rating", None, [3, 1], ["3", "1"]),
        ("spans", "spans", ["thing"], [[], [{"start": 0, "end": 4, "label": "thing"}]], None),
    ],
)
def test_batches_of_other_tools_join(
    kind: str, batch: str, labels: Any, answers: list[Any], expected: list[str] | None, write: Write, open_loop: Open
) -> None:
    loop = open_loop(write(kind))
    queue = Queue(loop.metadata)
    contents = [{"text": "cash is due"}, {"text": "loan is due"}]
    queue.add_batch("old", batch, [NewItem(str(row), content) for row, content in enumerate(contents)], labels=labels)
    # A mark for a model's answer is not one for the text.
    queue.add_batch("rated", "rating", [NewItem("2", {"text": "rate is due", "answer": "Pay."})])
    for item, answer in zip(sorted(queue.items("old"), key=lambda item: item.record), answers, strict=True):
        queue.answer(item.id, "bo", answer)
    queue.answer(queue.items("rated")[0].id, "bo", 5)
    own = write_own_labels(loop.store, load_config(loop.root))
    file = "data/labelled/batch-old.jsonl"
    assert own["old"] == OwnLabels(file, 2)
    assert own["rated"].labels == 0
    rows = [json.loads(line) for line in (loop.root / file).read_text().splitlines()]
    expected = expected or ["[]", '[{"label": "thing", "text": "loan"}]']
    assert {row["text"]: row["label"] for row in rows} == dict(
        zip(("cash is due", "loan is due"), expected, strict=True)
    )
    assert check_data(load_config(loop.root), loop.root, loop.store).errors == []


def test_suggestions_that_are_no_answer_are_left_to_people(small: Any) -> None:
    import pyarrow as pa

    batch = pa.table({"prompt": [None] * 3, "text": ["one", "two", "three"]})
    request = AnnotationRequest(
        *(1, 0, small.folder, LABELS, ["cash;card", "none of these", None]),
        accepted=[True, True, False],
        form=ChoicesForm(LABELS),
    )
    usable = with_usable_suggestions(batch, request)
    assert usable.suggestions == ["card; cash", None, None]
    assert usable.accepted == [True, False, False]


@pytest.mark.parametrize(
    ("kind", "answer", "wrong"),
    [
        ("choices", ["card"], [[label] for label in LABELS[1:]]),
        ("spans", [{"start": 0, "end": 2, "label": "thing"}], [[]]),
    ],
)
def test_planted_suggestions_are_answers_of_their_kind(
    kind: str, answer: Any, wrong: list[Any], write: Write, open_loop: Open
) -> None:
    loop = open_loop(write(kind, label={"annotator": "people", "queue": {"planted_rate": 0.5}}))
    queue = Queue(loop.metadata, load_config(loop.root).label.queue)
    suggestion = {"answer": answer, "confidence": 0.9, "annotator": "m"}
    items = [NewItem(str(row), {"text": "cash"}, suggestion=suggestion) for row in range(12)]
    gold = [NewItem("gold", {"text": "card"}, expected=answer)]
    queue.add_batch("b", kind, items, labels=TASKS[kind]["labels"], gold=gold, seed=3)
    shown = []
    while task := queue.next("ana"):
        assert task.suggestion is not None, "a gold item without one would be known by that"
        shown.append(task.suggestion["answer"])
        queue.answer(task.item, "ana", task.suggestion["answer"])
    assert len(shown) >= 12
    assert {str(each) for each in shown} - {str(answer)} <= {str(each) for each in wrong}
    assert len({str(each) for each in shown}) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": {"pseudo": {"teacher": "champion"}}}, "label.pseudo: it needs one label per record, and answers of"),
        ({"label": {"accept_error": 0.1}}, "label.accept_error: it needs one label per record"),
        ({"label": {"suggest": "linear"}}, "label.suggest: it needs one label per record"),
        ({"label": {"error_rate": {1: 0.5}}}, "label.error_rate: it needs one label per record"),
        ({"select": {"strategy": "margin"}}, "select.strategy: it needs one label per record"),
        ({"select": {"hard_cases": ["boundary"]}}, "select.hard_cases: it needs one label per record"),
        ({"select": {"hard_negatives": True}}, "select.hard_negatives: it needs one label per record"),
        ({"evaluate": {"error_weight": 1.0}}, "evaluate.error_weight: it needs one label per record"),
        (
            {"data": {"steps": ["exact", {"augment": {"methods": [{"method": "typos"}]}}]}},
            "data.steps: the step `augment` changes",
        ),
        ({"evaluate": {"suites": {"test": {"scorer": "label_likelihood"}}}}, "label_likelihood needs a label set"),
    ],
)
def test_what_needs_one_label_is_refused_in_a_line(changes: dict[str, Any], message: str, write: Write) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write("spans", **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_rule_compares_what_the_scorer_pairs(write: Write) -> None:
    for kind, gain in (("rating", "accuracy"), ("choices", "accuracy"), ("spans", "record_f1")):
        root = write(kind, kind)
        config = yaml.safe_load((root / "posttrain.yaml").read_text())
        del config["gate"]
        (root / "posttrain.yaml").write_text(yaml.safe_dump(config))
        loaded = load_config(root)
        assert [suite.scorer for suite in loaded.evaluate.suites.values()] == [kind]
        assert f"gain.{gain}" in loaded.gate.deploy[0]


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("rating", 9, "bad.jsonl:3: `9` is not one of the ratings 1, 2, 3"),
        ("choices", ["card", "crad"], "bad.jsonl:3: label `crad` is not in the label set; did you mean `card`"),
        ("spans", [{"label": "thing", "text": "xx"}], "bad.jsonl:3: `xx` is not in the text"),
    ],
)
def test_an_answer_that_is_none_is_named_before_any_work(
    kind: str, answer: Any, message: str, write: Write, open_loop: Open
) -> None:
    loop = open_loop(write(kind, data={"test": ["bad.jsonl"]}))
    lines = (loop.root / "test.jsonl").read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "label": answer})
    (loop.root / "bad.jsonl").write_text("\n".join(lines))
    (problem,) = check_data(load_config(loop.root), loop.root, loop.store).errors
    assert message in str(problem.error())
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        loop.run()
