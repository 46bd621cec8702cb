"""``run --watch``: what it waits for, what it does by itself, and what it survives."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import time_machine

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.loop import watch
from posttrain.loop.config import Config, load_config
from posttrain.loop.triggers import TriggerConfig, evaluate_triggers
from posttrain.loop.watch import Watcher
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import hold_lock
from posttrain.store.workspace import Workspace
from posttrain.train import stage

START = datetime(2026, 11, 26, tzinfo=UTC)


class Ended(Exception):
    """Ends a watcher that has nothing left to do in a test."""


class SimulatedTime:
    """A clock that moves when the watcher sleeps, and what happens at its times.

    Args:
        clock: Sets the time of the process.
        events: What to do, by the hours since the start; None ends the watcher.
    """

    def __init__(self, clock: Any, events: dict[float, Callable[[], object] | None]) -> None:
        self.clock = clock
        self.events = sorted(events.items())

    def sleep(self, seconds: float) -> None:
        self.clock.shift(timedelta(seconds=seconds))
        while self.events and utc_now() >= START + timedelta(hours=self.events[0][0]):
            _, act = self.events.pop(0)
            if act is None:
                raise Ended
            act()


@contextmanager
def open_session(root: Path) -> Iterator[tuple[Workspace, Config]]:
    config = load_config(root)
    with Workspace.create(root, config.store) as workspace:
        yield workspace, config


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Watches a workspace through simulated hours; returns the events with their times."""

    def run(
        root: Path, events: dict[float, Callable[[], object] | None], poll: float = 600.0, longest: float = 4 * 3600.0
    ) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: (  # type: ignore[method-assign]
            lines.append(f"{utc_now():%H:%M} {record.getMessage()}") if getattr(record, "event", False) else None
        )
        logger = logging.getLogger("posttrain")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Fewer looks than in service: a test has minutes for a day.
        monkeypatch.setattr(watch, "_POLL_SECONDS", poll)
        monkeypatch.setattr(watch, "_LONGEST_WAIT", longest)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        try:
            with time_machine.travel(START, tick=False) as clock:
                watcher = Watcher(root, session=lambda: open_session(root), sleep=SimulatedTime(clock, events).sleep)
                watcher.run()
        except Ended:
            pass
        finally:
            logger.removeHandler(handler)
        return lines

    return run


def post_feedback(root: Path, rows: list[dict[str, str]]) -> None:
    with Inbox(root / ".posttrain" / "inbox") as inbox:
        for row in rows:
            feedback = {"prompt": row["text"], "completion": "?", "rating": "down", "corrected_answer": row["label"]}
            inbox.append(Feedback.read({"id": row["text"], **feedback}, "feedback")).result(10)


@pytest.mark.slow
def test_a_day_with_a_schedule_feedback_drift_a_failed_training_and_a_broken_config(
    small: Any, watched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root: Path = small(
        rounds=None,
        label={"per_round": 6},
        drift={"embedder": None, "least": 10},
        triggers={
            "any": ["new_labels >= 5", "drift.psi > 0.5"],
            **{"schedule": "0 3 * * *", "time_zone": "UTC"},
        },
    )
    train, failures = stage.train, iter([True, True])

    def failing(*arguments: Any, **options: Any) -> Any:
        if utc_now().hour >= 14 and next(failures, False):
            raise WorkError("the loss is NaN")
        return train(*arguments, **options)

    monkeypatch.setattr(stage, "train", failing)
    texts = [f"parcel {row} never came to our shop, refund order {row * 7}" for row in range(30)]
    drifted = [{"text": text, "label": small.labels[row % 4]} for row, text in enumerate(texts)]
    small.write(root / "answers.csv", [*small.rows(), *drifted])
    correct = (root / "posttrain.yaml").read_text()
    lines = watched(
        root,
        {
            9: lambda: post_feedback(root, small.rows()[100:106]),
            14: lambda: small.write(root / "data" / "pool" / "new.csv", drifted, ["text"]),
            20: lambda: (root / "posttrain.yaml").write_text(correct.replace("rounds:", "round:")),
            21: lambda: (root / "posttrain.yaml").write_text(correct),
            24: None,
        },
    )
    triggers = "new_labels >= 5 (new_labels = 0); drift.psi > 0.5 (drift.psi = nan); schedule 0 3 * * *"
    tomorrow = f"{triggers} (next 2026-11-27 03:00)"
    assert [re.sub(r"accuracy.*|psi = [\d.]+|\d classes", "…", line) for line in lines] == [
        "00:00 round 0: baseline",
        f"00:00 waiting for a trigger for round 1: {triggers} (next 2026-11-26 03:00)",
        "03:00 round 1 starts: schedule 0 3 * * * (due 2026-11-26 03:00)",
        "03:00   labelled 6 records, …",
        "03:00 round 1: deploy, …",
        f"03:00 waiting for a trigger for round 2: {tomorrow}",
        "09:00 took feedback in: 6 preferences",
        "09:00 round 2 starts: new_labels >= 5 (new_labels = 6)",
        "09:00   labelled 6 records, …",
        "09:00 round 2: deploy, …",
        f"09:00 waiting for a trigger for round 3: {tomorrow}",
        "14:00 round 3 starts: drift.psi > 0.5 (drift.…)",
        "14:00   labelled 6 records, …",
        "14:00 the loss is NaN; next try in 1 min",
        "14:10   labelled 6 records, …",
        "14:10 the loss is NaN; next try in 2 min",
        "14:20   labelled 6 records, …",
        "14:20 round 3: deploy, …",
        f"14:20 waiting for a trigger for round 4: {tomorrow}",
        "20:00 posttrain.yaml:2: unknown key `round`; did you mean `rounds`? `posttrain config keys` lists the keys; "
        "waiting until a file of the workspace changes",
        f"21:00 waiting for a trigger for round 4: {tomorrow}",
    ]


@pytest.fixture
def waiting(small: Any) -> Path:
    """A workspace whose rounds wait for a trigger that never comes."""
    root: Path = small(rounds=None, triggers={"any": ["new_labels >= 1000"]})
    return root


WAITS = "waiting for a trigger for round 1: new_labels >= 1000 (new_labels = 0)"


def test_a_workspace_that_is_gone_ends_the_watcher_and_is_not_begun_anew(
    waiting: Path, watched: Callable[..., list[str]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the workspace is gone while it was watched"):
        watched(waiting, {1: lambda: waiting.rename(tmp_path / "elsewhere")})
    assert not waiting.exists()


def test_a_lost_database_ends_the_watcher(waiting: Path, watched: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError, match="posttrain verify"):
        watched(waiting, {1: lambda: [path.unlink() for path in (waiting / ".posttrain").glob("store.db*")]})


def test_another_process_that_works_here_is_waited_out(waiting: Path, watched: Callable[..., list[str]]) -> None:
    Workspace.create(waiting).close()
    with ExitStack() as other:
        other.enter_context(
            hold_lock(waiting / ".posttrain" / "loop.lock", busy_message="another process runs this loop")
        )
        lines = watched(waiting, {0.05: other.close, 1: None})
    assert [line.split(" ", 1)[1] for line in lines[-1:]] == [WAITS]
    assert "another process runs this loop" in lines[0]


def test_a_mistake_at_the_start_is_raised(small: Any, watched: Callable[..., list[str]]) -> None:
    root = small(rounds=None)
    (root / "test.csv").unlink()
    with pytest.raises(UserError, match=r"test\.csv"):
        watched(root, {1: None})


@pytest.mark.slow
def test_the_loop_looks_again_only_when_something_has_changed(
    waiting: Path, watched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[datetime] = []

    def run(loop: Any, *arguments: Any, **options: Any) -> str:
        looks.append(utc_now())
        return "labels"

    monkeypatch.setattr(watch.Loop, "run", run)
    labels = waiting / "labels" / "round-1.csv"
    row = {"text": "my card was late", "label": "card"}
    watched(
        waiting,
        {
            0.05: lambda: (labels.parent.mkdir(), labels.touch()),
            0.1: lambda: post_feedback(waiting, [row]),
            0.25: None,
        },
        poll=5,
        longest=600,
    )
    minutes = [(look - START).total_seconds() / 60 for look in looks]
    # At the start; as soon as the file is there; and for feedback no sooner than a minute after the last look.
    assert minutes == pytest.approx([0, 3, 6, 16][: len(minutes)], abs=0.1)
    assert len(minutes) == 3


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0 3 * *", "names no time that comes"),
        ("0 0 31 4 *", "names no time that comes"),
        ("61 * * * *", "names no time that comes"),
        ("", "names no time that comes"),
    ],
)
def test_a_schedule_that_cannot_come_is_refused(schedule: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TriggerConfig.read({"schedule": schedule}, "posttrain.yaml")


def test_an_unknown_time_zone_is_refused() -> None:
    for name in ("Europe/Berlyn", "../etc/passwd", ""):
        with pytest.raises(UserError, match="there is no time zone"):
            TriggerConfig.read({"time_zone": name}, "posttrain.yaml")


def test_a_time_starts_one_round_in_the_zone_of_the_schedule() -> None:
    triggers = TriggerConfig(schedule="30 2 * * *", time_zone="Europe/Berlin", all=["new_records >= 1"])
    since = datetime(2026, 11, 26, 0, 0, tzinfo=UTC)
    before, after = datetime(2026, 11, 26, 1, 29, tzinfo=UTC), datetime(2026, 11, 26, 1, 30, tzinfo=UTC)
    values = {"new_records": 3.0}
    assert not evaluate_triggers(triggers, values, since, before).starts
    assert evaluate_triggers(triggers, values, since, after).starts
    # The round that started ended later: the same time starts no second one.
    assert not evaluate_triggers(triggers, values, after + timedelta(minutes=5), after + timedelta(hours=5)).starts
    assert not evaluate_triggers(triggers, {"new_records": 0.0}, since, after).starts
    result = evaluate_triggers(triggers, {"new_records": 0.0}, since, before)
    assert result.reason == "new_records >= 1 (new_records = 0); schedule 30 2 * * * (next 2026-11-26 02:30)"
