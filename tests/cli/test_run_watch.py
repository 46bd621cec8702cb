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
from posttrain.loop.stages.fetch import Fetch
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


@pytest.mark.parametrize("options", [(), ("--watch",)])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_workspace_that_is_moved_during_a_round_ends_it_in_one_line_and_leaves_nothing_behind(
    small: Any,
    posttrain: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    replaced: bool,
) -> None:
    root: Path = small(rounds=1)
    moved = root.with_name("moved")
    fetch = Fetch.run

    def moving(stage: Fetch, context: Any, out: Path, scratch: Path) -> Any:
        root.rename(moved)
        if replaced:
            (root / ".posttrain").mkdir(parents=True)
            (root / ".posttrain" / "note").touch()
        return fetch(stage, context, out, scratch)

    monkeypatch.setattr(Fetch, "run", moving)
    mistake = posttrain("run", *options, "-w", root)
    lines = [line for line in mistake.err.splitlines() if "moved" in line]
    assert (mistake.code, len(lines)) == (2, 1), mistake
    assert "Traceback" not in mistake.err
    assert "run the command again where it is now" in lines[0]
    assert [path.name for path in root.rglob("*")] == ([".posttrain", "note"] if replaced else [])
    assert root.exists() == replaced
    monkeypatch.undo()
    assert posttrain("run", "--until", "score", "-w", moved).code == 0


def test_a_link_that_changes_its_target_does_not_move_a_round(
    small: Any, posttrain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root: Path = small(rounds=1)
    link, other = tmp_path / "current", tmp_path / "other"
    other.mkdir()
    link.symlink_to(root)
    fetch = Fetch.run

    def linking(stage: Fetch, context: Any, out: Path, scratch: Path) -> Any:
        link.unlink()
        link.symlink_to(other)
        return fetch(stage, context, out, scratch)

    monkeypatch.setattr(Fetch, "run", linking)
    posttrain("run", "--rounds", "0", "-w", link)
    assert list(other.iterdir()) == []
    with Workspace.open(root) as store:
        assert [run.status for run in store.metadata.runs()] == ["done"] * len(store.metadata.runs()) != []
