"""The process that runs tasks for a `WorkerRunner`: ``python -m posttrain.jobs.worker ADDRESS NUMBER``.

It connects to the runner's process, takes tasks until the connection is closed, and dies with that process.
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
from posttrain.jobs.memory import Memory
from posttrain.jobs.task import Outcome, Task, TaskFunction, run_task
from posttrain.jobs.workers import KEY_VARIABLE
from posttrain.store.errors import LockedError
from posttrain.store.files import hold_lock, make_folder

_LOOK_SECONDS = 0.2  # between looks at a connection on which something waits

_LIFE_SECONDS = 1.0  # between messages that a task makes progress

_LOCK_SECONDS = 30  # that a run of the same task which is being killed may take to be gone


def serve(connection: Connection, function: TaskFunction) -> None:
    """Runs tasks until the connection is closed; sends messages and outcomes, and takes an answer to each message.

    It sends None where a task says that it makes progress.
    """
    shown = -_LIFE_SECONDS

    def show_life() -> bool:
        nonlocal shown
        if time.monotonic() - shown >= _LIFE_SECONDS:
            shown = time.monotonic()
            connection.send(None)
        return True  # the runner's process ends this one, if need be

    def send(message: Any, memory: Memory) -> Any:
        connection.send((message, memory))
        return connection.recv()

    while True:
        task: Task = connection.recv()
        with suppress(OSError):  # Linux: the most memory in use is measured from now on
            Path("/proc/self/clear_refs").write_text("5")
        # Held by the kernel: a worker of a runner that was killed may still write into the folder for an instant.
        try:
            with hold_lock(_lock(task.folder), wait=_LOCK_SECONDS, busy_message="the task runs already"):
                outcome = run_task(function, task, send, show_life)
                reset_gpu_peak()  # while it has nothing to do, its GPU is for others
        except LockedError as error:
            outcome = Outcome("killed", error=str(error))  # nothing is wrong with the task: it is run again
        connection.send(outcome)


def _lock(folder: Path) -> Path:
    # Not in the folder, which is the function's own.
    path = folder.parent / "locks" / folder.name
    make_folder(path.parent)
    return path


def main(arguments: list[str]) -> int:
    """Runs the process and returns its exit code."""
    with suppress(OSError):  # where memory runs out, the kernel kills the task, and not its runner
        Path("/proc/self/oom_score_adj").write_text("800")
    address = json.loads(arguments[0])
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    try:
        connection = Client(address if isinstance(address, str) else tuple(address), authkey=key)
        threading.Thread(target=_die_with_runner, args=(connection.fileno(),), daemon=True).start()
        connection.send(int(arguments[1]))
        setup: dict[str, Any] = connection.recv()
        sys.path[:] = setup["path"]
        os.chdir(setup["folder"])
        serve(connection, pickle.loads(setup["function"]))  # noqa: S301  # what the runner's process has written
    except (EOFError, ConnectionError):
        return 0
    return 0


def _die_with_runner(descriptor: int) -> None:
    """Kills this process and its children once the connection is closed, as the runner's process is gone then."""
    # A second descriptor, as a task may read nothing for hours; data stay for the thread that takes them.
    other = socket.socket(fileno=os.dup(descriptor))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        while other.recv(1, socket.MSG_PEEK):
            time.sleep(_LOOK_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
