"""Labels of another tool, in batches of no round, join the training set once, and nobody is asked for them again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.label.formats.importer import ImportOptions, ImportResult, import_queue
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.loop.config import load_config
from posttrain.loop.own_batches import OwnLabels, write_own_labels
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
ROWS = slice(40, 46)


@pytest.fixture
def loop(begun_workspace: Path, small: Any, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a workspace before its first round, whose labels people give."""
    root = Path(shutil.copytree(begun_workspace, tmp_path / "workspace", symlinks=True))
    small.configure(root, rounds=1, label={"annotator": "people"})
    return open_loop(root)


def write_tasks(path: Path, rows: list[dict[str, str]]) -> Path:
    tasks = []
    for number, row in enumerate(rows):
        region = {"from_name": "topic", "to_name": "text", "type": "choices", "value": {"choices": [row["label"]]}}
        annotations = [{"completed_by": {"email": "ana"}, "result": [region]}]
        tasks.append({"id": number, "data": {"text": row["text"]}, "annotations": annotations})
    path.write_text(json.dumps(tasks))
    return path


def import_labels(loop: Any, path: Path, batch: str | None = None) -> ImportResult:
    options = ImportOptions(batch=batch, labels=tuple(load_config(loop.root).task.label_set))
    return import_queue(Queue(loop.metadata), path, options)


def own_labels(loop: Any) -> dict[str, OwnLabels]:
    return write_own_labels(loop.store, load_config(loop.root))


def test_labels_of_another_tool_are_trained_on_once_and_not_asked_for(small: Any, loop: Any, tmp_path: Path) -> None:
    rows = small.rows()[ROWS]
    tasks = write_tasks(tmp_path / "old.json", rows)
    import_labels(loop, tasks)
    again = import_labels(loop, tasks)
    assert (again.created, again.answers, again.repeated) == (False, 0, 6)
    # Under another name the answers would count twice.
    with pytest.raises(
        UserError, match=r"the batch `old` holds all of its items and answers already; --batch old adds"
    ):
        import_labels(loop, tasks, "other")
    import_labels(loop, write_tasks(tmp_path / "more.json", small.rows()[45:48]))
    file, more = ("data/labelled/batch-old.jsonl", "data/labelled/batch-more.jsonl")
    expected = {"old": OwnLabels(file, 6), "more": OwnLabels(more, 2, 1)}
    assert own_labels(loop) == own_labels(loop) == expected
    assert str(loop.run()).startswith("labels for round 1: fill the label column of labels/round-1.csv (12 records)")
    labelled = {row["text"]: row["label"] for row in small.rows()[40:48]}
    asked = (loop.root / "labels" / "round-1.csv").read_text()
    assert not [text for text in labelled if text in asked]
    pool, files = (loop.metadata.artifact(loop.metadata.named(name)).meta["counts"] for name in ("pool", "labelled"))
    assert (files["records"], pool["records"]) == (8, 52)
    # While the round waits, its batch stays as it is.
    import_labels(
        loop, write_tasks(tmp_path / "late.json", [row for row in small.rows()[:60] if row["text"] in asked][:3])
    )
    assert "0 of 12 are filled in labels/round-1.csv" in str(loop.run())
    queue = Queue(loop.metadata)
    truth = {row["text"]: row["label"] for row in small.rows()}
    for item in queue.items("round-1"):
        queue.answer(item.id, "bo", truth[item.content["prompt"][0]["content"]])
    assert loop.run() is None
    assert len(loop.trained_on(1)) == 12 + 8


def test_answers_to_another_question_do_not_join(loop: Any) -> None:
    queue = Queue(loop.metadata)
    queue.add_batch("moods", "choice", [NewItem("1", {"text": "odd"})], labels=["happy"])
    queue.add_batch("marks", "spans", [NewItem("1", {"text": "odd"})], labels=["card"])
    queue.add_batch("open", "choice", [NewItem("1", {"text": "[1] odd"}), NewItem("2", {"text": "b"})], labels=["card"])
    reasons = {name: own.reason for name, own in own_labels(loop).items()}
    assert reasons == {
        "moods": "its labels are not those of the task, such as `happy`",
        "marks": "answers of the kind spans are not what the task learns from",
        "open": None,
    }
    # An answer joins once it is decided, and leaves if it is taken back.
    path = loop.root / "data" / "labelled" / "batch-open.jsonl"
    assert not path.exists()
    item = queue.items("open")[0].id
    queue.answer(item, "ana", "card")
    assert own_labels(loop)["open"].labels == 1
    assert json.loads(path.read_text()) == {"text": [{"role": "user", "content": "[1] odd"}], "label": "card"}
    queue.undo("ana", item)
    assert own_labels(loop)["open"] == OwnLabels()
    assert not path.exists()
