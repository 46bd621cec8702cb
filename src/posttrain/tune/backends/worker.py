"""The process that runs trials for a `ConnectedBackend`: ``python -m posttrain.tune.backends.worker ADDRESS NUMBER``.

It connects to the study's process, takes jobs until the connection is closed, and dies with that process.
"""

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from posttrain.jobs.gpus import reset_gpu_peak
from posttrain.store.errors import LockedError
from posttrain.store.files import hold_lock, make_folder
from posttrain.tune.backends.base import Job, Outcome, TrialFunction
from posttrain.tune.backends.connected import KEY_VARIABLE
from posttrain.tune.backends.inline import run_job
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory, Report

_LOOK_SECONDS = 0.2  # between looks at a connection on which something waits

_LIFE_SECONDS = 1.0  # between messages that a trial gets on

_LOCK_SECONDS = 30  # that a run of the same trial which is being killed may take to be gone


def serve(connection: Connection, function: TrialFunction) -> None:
    """Runs jobs until the connection is closed; sends a report or an outcome, and takes a decision for each report.

    It sends None where a trial says that it gets on.
    """
    shown = -_LIFE_SECONDS

    def show_life() -> Decision:
        nonlocal shown
        if time.monotonic() - shown >= _LIFE_SECONDS:
            shown = time.monotonic()
            connection.send(None)
        return Decision.CONTINUE  # the study's process ends this one, if need be

    def report(report: Report, memory: Memory) -> Decision:
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
                outcome = run_job(function, job, report, show_life)
                reset_gpu_peak()  # while it has nothing to do, its GPU is for others
        except LockedError as error:
            outcome = Outcome("killed", error=str(error))  # nothing is wrong with the trial: it is run again
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
    address = json.loads(arguments[0])
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    try:
        connection = Client(address if isinstance(address, str) else tuple(address), authkey=key)
        threading.Thread(target=_die_with_study, args=(connection.fileno(),), daemon=True).start()
        connection.send(int(arguments[1]))
        setup: dict[str, Any] = connection.recv()
        sys.path[:] = setup["path"]
        os.chdir(setup["folder"])
        serve(connection, pickle.loads(setup["function"]))  # noqa: S301  # what the study's process has written
    except (EOFError, ConnectionError):
        return 0
    return 0


def _die_with_study(descriptor: int) -> None:
    """Kills this process and its children once the connection is closed, as the study's process is gone then."""
    # A second descriptor, as a training may read nothing for hours; data stay for the thread that takes them.
    other = socket.socket(fileno=os.dup(descriptor))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        while other.recv(1, socket.MSG_PEEK):
            time.sleep(_LOOK_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
