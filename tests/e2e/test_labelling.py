"""People label through the HTTP API while ``posttrain run --watch`` waits for their answers and takes them up."""

import csv
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as parquet

from posttrain.label.accounts import Accounts
from posttrain.label.client import LabelClient
from posttrain.label.queue_rows import Task
from posttrain.store.workspace import Workspace

Judge = Callable[[Task], Any]


@contextmanager
def server(root: Path) -> Iterator[str]:
    """Serves a workspace; yields the address."""
    log = root.with_suffix(".server.log")
    process, address = forked.start_server(root, log)
    try:
        yield address
    finally:
        process.terminate()
        process.join(30)
    assert process.exitcode == 0, log.read_text()


def label_loop(root: Path, judges: dict[str, Judge]) -> str:
    """Runs the loop to its end while each judge answers items as an account; returns the loop's output."""
    with Workspace.create(root) as store:
        accounts = Accounts(store.metadata)
        tokens = {}
        for name in judges:
            accounts.add(name, "annotator", "test")
            tokens[name] = accounts.tokens.issue_api_token(name, "test", "test")
    log = root.with_suffix(".run.log")
    with server(root) as address:
        run = forked.start(["run", "--watch", "-w", str(root)], root, log)

        def work(name: str) -> None:
            with LabelClient(address, tokens[name]) as client:
                while run.is_alive():
                    task = client.next_item()
                    if task is None:
                        time.sleep(0.1)
                    else:
                        client.answer(task.item, judges[name](task), seconds=1.5)

        with ThreadPoolExecutor(len(judges)) as pool:
            for result in [pool.submit(work, name) for name in judges]:
                result.result()
        run.join(60)
    assert run.exitcode == 0, log.read_text()
    return log.read_text()


def finished(root: Path) -> list[dict[str, Any]]:
    """Returns the label artifacts of all rounds, as tables' rows."""
    with Workspace.open(root, write=False) as store:
        runs = sorted(store.metadata.runs(stage="label", status="done"), key=lambda run: run.round or 0)
        tables = [parquet.read_table(store.artifacts.path(str(run.output)) / "labels.parquet") for run in runs]
    return [row | {"round": number} for number, table in enumerate(tables, 1) for row in table.to_pylist()]


def test_two_people_label_every_round_through_the_api(small: Any) -> None:
    root = small(label={"annotator": "people", "file": None, "queue": {"overlap": 2}})
    with (root / "answers.csv").open(newline="") as file:
        answer_of = {row["text"]: row["label"] for row in csv.DictReader(file)}

    def answer(task: Task) -> str:
        return answer_of[task.content["prompt"][-1]["content"]]

    output = label_loop(root, {"anna": answer, "ben": answer})
    rows = finished(root)
    assert [row["round"] for row in rows].count(1) == [row["round"] for row in rows].count(2) == 12
    assert len({row["input_id"] for row in rows}) == 24
    for row in rows:
        assert row["completion"] == answer_of[row["prompt"][-1]["content"]]
        assert json.loads(row["meta"])["labelled_by"]["annotator"] == "anna, ben"
    assert output.count("waiting for labels for round 1: ") >= 1


def test_a_loop_on_preferences(small: Any) -> None:
    root = small(
        rounds=1,
        task={"kind": "preference", "labels": None, "max_new_tokens": 40},
        label={"annotator": "people", "file": None, "per_round": 6},
        gate={"deploy": ["preference_accuracy >= 0"]},
        data={"columns": None, "pool": ["pool.csv"], "test": ["pairs.jsonl"], "steps": ["exact"]},
        train={"epochs": 1, "learning_rate": 1e-3},
    )
    (root / "pool.csv").write_text((root / "pool.csv").read_text().replace("text", "prompt", 1))
    pairs = [{"prompt": f"say {row} now", "chosen": f"{row}", "rejected": f"no {row}"} for row in range(6)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def shorter(task: Task) -> int:
        first, second = task.content["candidates"]
        return int(len(second) < len(first))

    label_loop(root, {"judge": shorter})
    rows = finished(root)
    assert {row["round"] for row in rows} == {1}
    for row in rows:
        assert len(row["completion"]) <= len(row["rejected"])
        assert row["completion"] != row["rejected"]
    with Workspace.open(root, write=False) as store:
        rounds = store.metadata.rounds()
        assert [entry.status for entry in rounds] == ["done"] * 2
        (run,) = store.metadata.runs(stage="train")
        assert run.config["train"]["objective"]["name"] == "dpo"
        assert 0 <= rounds[1].detail["metrics"]["preference_accuracy"] <= 1
        records = parquet.read_table(store.artifacts.path(rounds[1].detail["dataset"]) / "records.parquet")
    assert records.num_rows == len(rows)
    assert records["rejected"].null_count == 0
