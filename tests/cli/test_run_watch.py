"""``posttrain run --watch`` while it waits."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import posttrain.cli.run as run_verb
from posttrain.label import webhook
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.loop import loop
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

    def wait(root: Path, config: Any, before: Any) -> None:
        with Workspace.open(root) as store:
            Queue(store.metadata).add_batch("round-1", "choice", [NewItem("r", {"text": "?"})], labels=["a", "b"])
        assert called.wait(30), "nothing was called while the loop waited"

    monkeypatch.setattr(run_verb, "_run_once", lambda *arguments: (next(states), {}))
    monkeypatch.setattr(loop, "wait_for_change", wait)
    monkeypatch.setattr(webhook, "post_json", post)
    assert posttrain("run", "--watch", "-w", root).code == 0
    assert [body["event"] for body in bodies] == ["batch ready"]


def test_what_it_waits_for_is_printed_once(
    small: Any, posttrain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["labels: none", "labels: none", "labels: none", "labels: two", None])

    class Waits:
        def __init__(self, store: Workspace, config: Any) -> None:
            pass

        def run(self, *arguments: Any) -> str | None:
            return next(states)

    monkeypatch.setattr(loop, "Loop", Waits)
    monkeypatch.setattr(loop, "wait_for_change", lambda *arguments: None)
    monkeypatch.setattr(run_verb, "print_rounds", lambda store, config: run_verb.print_line("the rounds"))
    lines = posttrain("run", "--watch", "-w", small()).out.splitlines()
    assert lines == ["the rounds", "waiting for labels: none", "the rounds", "waiting for labels: two", "the rounds"]
