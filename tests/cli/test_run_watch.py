"""``posttrain run --watch`` on the command line."""

import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from posttrain.label import webhook
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.loop import watch
from posttrain.store.workspace import Workspace


def test_the_webhook_is_called_while_the_loop_waits(
    small: Any, posttrain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root: Path = small(label={"webhook": "http://127.0.0.1:9/hook"})
    bodies: list[dict[str, Any]] = []
    called, states = Event(), iter(["labels for round 1", None])

    def post(url: str, body: dict[str, Any], timeout: float) -> None:
        bodies.append(body)
        called.set()

    def has_changed(watcher: Any, waited: float) -> bool:
        with Workspace.open(root) as store:
            Queue(store.metadata).add_batch("round-1", "choice", [NewItem("r", {"text": "?"})], labels=["a", "b"])
        assert called.wait(30), "nothing was called while the loop waited"
        return True

    monkeypatch.setattr(watch.Loop, "run", lambda *arguments, **options: next(states))
    monkeypatch.setattr(watch.Watcher, "_has_changed", has_changed)
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(webhook, "post_json", post)
    assert posttrain("run", "--watch", "-w", root).code == 0
    assert [body["event"] for body in bodies] == ["batch ready"]


@pytest.mark.slow
def test_each_event_is_a_line_with_its_time_and_all_lines_are_in_the_log(
    small: Any, posttrain: Callable[..., Any]
) -> None:
    root = small(rounds=1)
    result = posttrain("run", "--watch", "-w", root)
    assert result.code == 0
    events = [line[17:] for line in result.err.splitlines() if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d round", line)]
    assert [event.split(", accuracy")[0] for event in events] == [
        "round 0: baseline",
        "round 1: deploy",
    ]
    assert "labelled 12 records, 4 classes" in result.err
    assert "training set: 12 records" not in result.err
    assert "training set: 12 records" in (root / ".posttrain" / "run.log").read_text()
    assert result.out.splitlines()[0].split() == ["round", "labels", "accuracy", "macro_f1", "decision", "seconds"]


@pytest.mark.parametrize("option", [("--until", "score"), ("--baseline", "random")])
def test_a_watcher_neither_stops_nor_compares(
    small: Any, posttrain: Callable[..., Any], option: tuple[str, str]
) -> None:
    result = posttrain("run", "--watch", *option, "-w", small())
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "--watch" in result.err
