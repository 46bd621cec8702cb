"""Watches a workspace: runs the loop, and runs it again whenever something that it waits for has changed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.feedback.ingest import add_feedback, has_feedback, ingest
from posttrain.label.queue import Queue
from posttrain.label.webhook import webhook_calls
from posttrain.loop.config import Config, open_workspace
from posttrain.loop.loop import Loop
from posttrain.loop.stages.collect import with_added_files
from posttrain.store.config import CONFIG_FILE
from posttrain.store.database import utc_now
from posttrain.store.errors import (
    DamagedDatabaseError,
    EmptyDatabaseError,
    LockedError,
    LostDatabaseError,
    MovedWorkspaceError,
    UserError,
    WorkError,
    is_user_mistake,
)
from posttrain.store.logs import EVENT, log_to_file
from posttrain.store.paths import locate_path
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

_POLL_SECONDS = 2.0

_LONGEST_WAIT = 600.0
"""Seconds after which the loop looks again without a change: triggers may depend on the time."""

_FEEDBACK_SECONDS = 60.0
"""Least seconds from one look to the next for feedback alone: each look reads the pool, and entries come singly."""

_FIRST_RETRY, _LAST_RETRY = 60.0, 3600.0

_NO_WORKSPACE = (DamagedDatabaseError, EmptyDatabaseError, LostDatabaseError, MovedWorkspaceError)
"""Errors that waiting does not mend, and with which nothing may be done to the workspace."""

Session = Callable[[], AbstractContextManager[tuple[Workspace, Config]]]
"""Opens the workspace with its config, for one look: nothing is held while nothing happens."""


@contextmanager
def loop_session(root: Path) -> Iterator[tuple[Workspace, Config]]:
    """Opens a workspace for its loop; meanwhile writes log lines to ``run.log``, and makes the webhook's calls.

    Raises:
        UserError: there is no workspace, or its config is wrong.
    """
    with (
        open_workspace(root, write=True) as (workspace, config),
        log_to_file(workspace.home / "run.log"),
        webhook_calls(workspace.metadata, config.label.webhook, partial(_alarms, workspace, config)),
    ):
        yield workspace, config


def _alarms(workspace: Workspace, config: Config) -> list[dict[str, Any]]:
    # Only here: it imports scipy's statistics.
    from posttrain.label.quality.queue_report import queue_alarms

    return queue_alarms(Queue(workspace.metadata, config.label.queue))


@dataclass
class Watcher:
    """Runs the loop until it is done, and waits between for labels, records, feedback, triggers and the schedule.

    A failed round is tried again, first after a minute and at most an hour apart. A mistake in the config or the files,
    and another process that works here, are waited out. Each is logged once, in one line.

    Args:
        root: The workspace's folder.
        rounds: Number of the last round; the config's by default.
        urgent: True to set the metric ``urgent`` of the triggers to 1, for one round.
        partial: True to continue with the labels given so far, for this round only.
        session: Opens the workspace; `loop_session` by default.
        sleep: Waits for a number of seconds.
    """

    root: Path
    rounds: int | None = None
    urgent: bool = False
    partial: bool = False
    session: Session | None = None
    sleep: Callable[[float], None] = time.sleep
    _config: Config | None = field(default=None, init=False)
    _state: "WatchedState | None" = field(default=None, init=False)
    _logged: str | None = field(default=None, init=False)
    _started: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)

    def run(self) -> None:
        """Watches until the loop is done.

        Raises:
            UserError: the config is wrong at the start, or the workspace is gone.
            WorkError: the database is damaged.
        """
        while (line := self._look()) is not None:
            # It looks every ten minutes, for days perhaps: what has not changed is logged once.
            if line != self._logged:
                log.info(line, extra=EVENT)
            self._logged = line
            self._wait()

    def _look(self) -> str | None:
        """Runs the loop once; returns a line that says what it waits for, or None if it is done."""
        # Before the session makes one: with an empty store the loop would begin again at round 0.
        self._check_store()
        try:
            with self._open() as (workspace, config):
                self._config = config
                if config.triggers.feedback:
                    self._take_feedback(workspace, config)
                # Of before the loop runs: what changes while it runs is then a change.
                self._state = watched_state(workspace, config)
                loop = Loop(workspace, config)
                waiting = loop.run(self.rounds, urgent=self.urgent, partial=self.partial, watched=True)
        except _NO_WORKSPACE:
            raise
        except OSError:
            self._check_store()  # moved while the loop worked in it
            raise
        except (UserError, WorkError) as error:
            self._check_store()
            # A mistake that is there from the start is the user's to mend, who is still looking.
            if not self._started and is_user_mistake(error) and not isinstance(error, LockedError):
                raise
            self._failures += 1
            # A config with a mistake has changed already: only the next change may end the wait.
            self._state = self._read_state()
            if is_user_mistake(error) and not isinstance(error, LockedError):
                return f"{error}; waiting until a file of the workspace changes"
            return f"{error}; next try in {self._seconds_to_wait() / 60:.0f} min"
        self._started, self._failures = True, 0
        self.urgent = self.partial = False  # one round is requested, not all that follow
        return waiting and f"waiting for {waiting}"

    def _take_feedback(self, workspace: Workspace, config: Config) -> None:
        """Moves the feedback in the inbox to the files that rounds read."""
        batches = ingest(workspace.home / "inbox")
        add_feedback(self.root, batches, config.data.columns, config.task.label_set, config.task.read_answer)
        counts: Counter[str] = Counter()
        for batch in batches:
            counts.update(batch.counts)
        if text := ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()) if number):
            log.info("took feedback in: %s", text, extra=EVENT)

    def _wait(self) -> None:
        """Returns once something has changed that the loop may continue from, a time has come, or after a while."""
        time_of_day = self._config.triggers.next_time(utc_now()) if self._config else None
        longest, waited = self._seconds_to_wait(), 0.0
        with ExitStack() as stack:
            if self._config and self._config.label.webhook and not self._failures:
                # Its calls continue meanwhile: days may pass, and calls fail.
                stack.enter_context(self._open())
            while waited < longest:
                self.sleep(_POLL_SECONDS)
                # The sum of the waits, as clocks are set; the schedule by the clock, which counts a machine's sleep.
                waited += _POLL_SECONDS
                if (time_of_day and utc_now() >= time_of_day) or self._has_changed(waited):
                    return

    def _has_changed(self, waited: float) -> bool:
        before, now = self._state, self._read_state()
        if before is None or now is None:
            return before is not now
        # Entries of feedback come singly, and each look reads the pool.
        feedback = now.feedback and waited >= _FEEDBACK_SECONDS and not self._failures
        return feedback or (now.files, now.decided) != (before.files, before.decided)

    def _read_state(self) -> "WatchedState | None":
        """Returns the watched state; None if the workspace cannot be opened, which the next look reports."""
        if self._config is None:
            return None
        try:
            with Workspace.open(self.root, self._config.store, write=False) as workspace:
                return watched_state(workspace, self._config)
        except (UserError, WorkError):
            return None

    def _seconds_to_wait(self) -> float:
        if not self._failures:
            return _LONGEST_WAIT
        return min(_LAST_RETRY, _FIRST_RETRY * 2.0 ** min(self._failures - 1, 10))

    def _open(self) -> AbstractContextManager[tuple[Workspace, Config]]:
        return self.session() if self.session else loop_session(self.root)

    def _check_store(self) -> None:
        """Raises an EmptyDatabaseError if the workspace was watched before, and has no store any more."""
        if self._started and not (self.root / ".posttrain" / "format.json").exists():
            what = "the workspace is gone while it was watched"
            raise EmptyDatabaseError(what, where=str(self.root), fix="watch it where it is now, or restore it")


@dataclass(frozen=True)
class WatchedState:
    """The state that a waiting loop may continue from.

    Attributes:
        files: Size and time of each file of the config, the labels and the loop's sets; None for one that is missing.
        decided: Names of open batches all of whose items are decided.
        feedback: True if the inbox holds entries that the loop has not taken in.
    """

    files: Mapping[str, tuple[int, int] | None]
    decided: tuple[str, ...]
    feedback: bool


def watched_state(workspace: Workspace, config: Config) -> WatchedState:
    """Reads the state that a waiting loop may continue from."""
    root = workspace.root
    data = with_added_files(config.data, root)
    names = [CONFIG_FILE, *data.files, *([config.label.file] if config.label.file else [])]
    files = [*(locate_path(root, name) for name in names), *sorted((root / "labels").glob("*.csv"))]
    queue = Queue(workspace.metadata, config.label.queue)
    # Not every answer: each time that the loop looks it reads the pool again.
    decided = tuple(
        batch.name
        for batch in queue.batches("open")
        if (progress := queue.progress(batch.name)).resolved == progress.items
    )
    feedback = config.triggers.feedback and has_feedback(workspace.home / "inbox")
    return WatchedState({str(path): _stamp(path) for path in files}, decided, feedback)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns size and time of a file or folder; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
