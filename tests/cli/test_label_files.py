"""``posttrain label export`` and ``import`` with files of other tools, without a round and beside one that waits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.label import _annotators
from posttrain.label.audit import list_changes
from posttrain.label.queue import Queue
from posttrain.store.workspace import Workspace

Call = Callable[..., Any]

TASKS = [
    {
        "id": number,
        "data": {"text": f"message {number}"},
        "annotations": [{"completed_by": {"email": "ana"}, "result": []}],
        "predictions": [{"result": []}],
    }
    for number in range(3)
]


def write_tasks(path: Path, labels: list[str]) -> Path:
    for task, label in zip(TASKS, labels, strict=True):
        region = {"from_name": "mood", "to_name": "text", "type": "choices", "value": {"choices": [label]}}
        task["annotations"][0]["result"] = [region]  # type: ignore[index]
    path.write_text(json.dumps(TASKS))
    return path


@pytest.mark.slow
def test_files_without_a_round(small: Any, posttrain: Call, tmp_path: Path) -> None:
    root = small(label={"annotator": "people"})
    tasks = write_tasks(tmp_path / "moods.json", ["happy", "sad", "sad"])
    first = posttrain("label", "import", tasks, "-w", root)
    assert first.code == 0
    assert first.out.splitlines() == [
        "read 3 items, 3 answers into the new batch moods (label-studio, choice)",
        "left out, as they have no meaning here: predictions (3)",
        "not trained on: its labels are not those of the task, such as `happy`; "
        "posttrain label export FOLDER --format datasets writes records to train on",
    ]
    refused = posttrain("data", "add", tasks, "--to", "labelled", "-w", root)
    fix = f"posttrain label import {tasks}: its labels then join the training set"
    assert (refused.code, refused.err) == (2, f"posttrain: {tasks}: these are tasks of Label Studio; {fix}\n")
    out = tmp_path / "out.jsonl"
    exported = posttrain("label", "export", out, "--format", "jsonl", "-w", root)
    assert exported.out == f"wrote 3 items of the batch moods to {out}\n"
    answers = [json.loads(line)["answers"][0]["answer"] for line in out.read_text().splitlines()]
    assert answers == ["happy", "sad", "sad"]
    again = posttrain("label", "import", tasks, "-w", root)
    assert again.out.startswith("read 3 items, 0 answers, 3 answers were there already into the batch moods ")
    missing = posttrain("label", "export", out, "--batch", "none", "-w", root)
    assert (missing.code, missing.err) == (2, "posttrain: --batch: there is no batch `none`\n")
    folder = tmp_path / "set"
    assert posttrain("label", "export", folder, "--format", "datasets", "-w", root).out == (
        f"wrote 3 records of the batch moods to {folder}\n"
    )
    assert posttrain("label", "import", tasks, "--batch", "gold", "--gold", "-w", root).out.startswith(
        "read 3 items, 0 answers, 3 gold items into the new batch gold"
    )
    topics = write_tasks(tmp_path / "topics.json", ["card", "cash", "card"])
    joined = posttrain("label", "import", topics, "--question", "mood", "-w", root)
    assert joined.out.splitlines()[-1] == (
        "labels that join the training set with the next run: 3; they are in data/labelled/batch-topics.jsonl, "
        "and nobody is asked for them again"
    )


@pytest.mark.slow
def test_a_batch_is_closed_once_it_is_decided_or_its_rest_is_dropped(
    small: Any, posttrain: Call, tmp_path: Path
) -> None:
    root = small(label={"annotator": "people"})
    tasks = write_tasks(tmp_path / "moods.json", ["happy", "sad", "sad"])
    assert posttrain("label", "import", tasks, "-w", root).code == 0
    assert posttrain("label", "close", "moods", "-w", root).out == "the batch moods is closed\n"
    assert "is closed, and its answers are in use" in posttrain("label", "close", "moods", "--drop", "-w", root).err
    first, *rest = json.loads(tasks.read_text())
    tasks.write_text(json.dumps([first, *({**task, "annotations": []} for task in rest)]))
    assert posttrain("label", "import", tasks, "--batch", "more", "-w", root).code == 0
    refused = posttrain("label", "close", "more", "-w", root)
    assert (refused.code, refused.err) == (
        2,
        "posttrain: 2 items of `more` are not answered yet; wait for the answers, or give --drop\n",
    )
    dropped = posttrain("label", "close", "more", "--drop", "-w", root)
    assert dropped.out == "the batch more is closed; 2 items were dropped\n"
    with Workspace.open(root) as store:
        queue = Queue(store.metadata)
        assert queue.next("ana") is None
        assert [item.status for item in queue.items("more")] == ["done", "dropped", "dropped"]
        assert [each.action for each in list_changes(store.metadata)] == ["close batch"] * 2
    wrong = posttrain("label", "close", "mor", "-w", root)
    assert wrong.err == "posttrain: there is no batch `mor`\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("import", "moods.json", "--format", "label-studo"),
            "`label-studo` is not a format; did you mean `label-studio`?",
        ),
        (("import", "moods.json", "--kind", "mood"), "--kind: `mood` is not a kind of answers"),
        (
            ("import", "moods.json", "--kind", "choice", "--format", "jsonl"),
            "moods.json, record 1: no text in `the record`",
        ),
        (("import", "moods.json", "--format", "doccano"), "`doccano` is not a format; one of csv, jsonl, label-studio"),
        (("import", "none.json"), "none.json: there is no such file"),
        (("export", "x.json", "--format", "label-studio"), "nothing has run here yet"),
        (("export", "x.csv"), "nothing has run here yet"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(
    arguments: tuple[str, ...],
    message: str,
    small: Any,
    posttrain: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = small(label={"annotator": "people"})
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "moods.json", ["happy", "sad", "sad"])
    outcome = posttrain("label", *arguments, "-w", root)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (tmp_path / "x.json").exists()


@pytest.mark.slow
def test_a_round_that_waits_is_answered_by_another_tool(small: Any, posttrain: Call, tmp_path: Path) -> None:
    root = small(rounds=1, label={"annotator": "people"})
    posttrain("run", "-w", root)
    truth = {row["text"]: row["label"] for row in small.rows()}
    path = tmp_path / "tasks.json"
    assert posttrain("label", "export", path, "--format", "label-studio", "-w", root).code == 0
    assert "<Choices" in path.with_suffix(".xml").read_text()
    tasks = json.loads(path.read_text())
    assert len(tasks) == 12
    for task in tasks:
        region = {"from_name": "label", "to_name": "text", "type": "choices"}
        region["value"] = {"choices": [truth[task["data"]["text"]]]}  # type: ignore[assignment]
        task["annotations"] = [{"completed_by": 7, "result": [region], "lead_time": 3.5}]
    path.write_text(json.dumps(tasks))
    outcome = posttrain("label", "import", path, "-w", root)
    assert outcome.out.splitlines() == [
        "read 12 items, 12 answers into the batch round-1 (label-studio, choice)",
        "all items are decided; now: posttrain run",
    ]
    assert posttrain("run", "-w", root).code == 0
    reports = posttrain("label", "report", "-w", root, "--json").json
    assert reports["rounds"][0]["annotators"] == {"7": 12}


def test_each_annotator_of_a_round_is_named_once() -> None:
    counts = {"anna, ben": 10, "ben, cleo": 8, "model:linear": 3}
    assert _annotators({"annotators": counts}) == "anna, ben, cleo, model:linear"
