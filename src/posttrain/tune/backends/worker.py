"""The process that runs trials for `ProcessBackend`: ``python -m posttrain.tune.backends.worker FD LIFELINE``.

It takes jobs from a connection to its parent until that is closed, and dies with its parent.
"""

import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain.store.errors import LockedError
from posttrain.store.files import hold_lock, make_folder
from posttrain.tune.backends.base import Job, Outcome, TrialFunction
from posttrain.tune.backends.inline import run_job
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Report

_LOCK_SECONDS = 30  # that a run of the same trial which is being killed may take to be gone


def serve(connection: Connection, function: TrialFunction) -> None:
    """Runs jobs until the connection is closed; sends a report or an outcome, and takes a decision for each report."""

    def report(report: Report, memory: int) -> Decision:
        connection.send((report, memory))
        decision: Decision = connection.recv()
        return decision

    while True:
        job: Job = connection.recv()
        with suppress(OSError):  # Linux: the most memory in use is measured anew
            Path("/proc/self/clear_refs").write_text("5")
        # Held by the kernel: a worker of a driver that was killed may still write into the folder for an instant.
        try:
            with hold_lock(_lock(job.folder), wait=_LOCK_SECONDS, busy_message="the trial runs already"):
                outcome = run_job(function, job, report)
        except LockedError as error:
            outcome = Outcome("failed", error=str(error))
        connection.send(outcome)


def _lock(folder: Path) -> Path:
    # Not in the folder, which is the function's own.
    path = folder.parent / "locks" / folder.name
    make_folder(path.parent)
    return path


def main(arguments: list[str]) -> int:
    """Runs the process and returns its exit code."""
    with suppress(OSError):  # where memory runs out, the kernel kills the trial, and not the study
        Path("/proc/self/oom_score_adj").write_text("800")
    connection, lifeline = Connection(int(arguments[0])), int(arguments[1])
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    try:
        setup: dict[str, Any] = connection.recv()
        sys.path[:] = setup["path"]
        os.chdir(setup["folder"])
        function = pickle.loads(Path(setup["function"]).read_bytes())  # noqa: S301  # what our own process has written
        serve(connection, function)
    except (EOFError, ConnectionError):
        return 0
    return 0


def _die_with_parent(lifeline: int) -> None:
    # The pipe is closed when the parent is gone, however it died. The whole group goes with it: data workers would
    # stay.
    os.read(lifeline, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
