"""Runs tasks in processes that connect to this one, wherever they were started."""

import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any

from posttrain.jobs.gpus import VISIBLE
from posttrain.jobs.launcher import Launcher, Process
from posttrain.jobs.memory import Memory
from posttrain.jobs.process import available_cores
from posttrain.jobs.runner import SILENCE, Runner
from posttrain.jobs.task import Handler, Outcome, Task, TaskFunction
from posttrain.store.errors import UserError

KEY_VARIABLE = "POSTTRAIN_WORKER_KEY"
"""Environment variable with the key that a worker proves to know, in hexadecimal digits."""

Address = str | tuple[str, int]
"""The path of a socket, or host and port."""

_POLL_SECONDS = 0.5  # between looks at runs that are silent

_DEATH_SECONDS = 5.0  # that a process may take to end


@dataclass
class _Worker:
    """A worker and its run; the connection is None until it has connected, the times until it has a task.

    ``gpu`` is the only one that it sees; None: its environment says which. ``peak`` is the most memory of its run, as
    it was last measured.
    """

    process: Process
    connection: Connection | None = None
    gpu: str | None = None
    task: Task | None = None
    began: float | None = None
    heard: float = 0.0
    peak: int = 0


class WorkerRunner(Runner):
    """Runs tasks in worker processes that a launcher starts, each of which runs one task after another.

    A task whose process is killed is reported as ``killed``, one that stays silent is killed and has failed. The
    workers die with this process, also if it is killed. Those on other machines connect to this one, and prove that
    they know a key; what they send is not encrypted.

    Args:
        function: runs a task; pickled by value where it comes from a script.
        launcher: starts the workers; the folders of tasks must lie where all of them see them.
        workers: processes.
        silence: seconds without a message after which a task counts as hanging.

    Raises:
        UserError: the function cannot be pickled.
    """

    def __init__(self, function: TaskFunction, launcher: Launcher, workers: int, silence: float = SILENCE) -> None:
        super().__init__()
        self.workers, self._silence = workers, silence
        self._launcher = self.enter_context(launcher)  # first, so that it is left after the workers have ended
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}
        self._launched: dict[int, _Worker] = {}  # by the number that a worker gives when it connects
        self._count = 0
        self._measured = 0.0  # when the memory of workers was
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-")))
        self._function = self._folder / "function"
        _write_function(function, self._function)
        self._listener = _WorkerListener(launcher.host)
        self.callback(self._listener.close)
        self.callback(self._end_all)

    def start(self, task: Task) -> None:
        gpu = self._least_used_gpu()
        worker = next((worker for worker in reversed(self._idle) if worker.gpu == gpu), None)
        if worker is None:
            worker = self._new_worker(task.folder.parent, gpu)
        else:
            self._idle.remove(worker)
        worker.task = task
        if worker.connection is not None and not self._send_task(worker):  # it was killed while it had nothing to do
            self._end(worker)
            return self.start(task)
        self._busy[task.number] = worker
        return None

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            connections = [worker.connection for worker in self._busy.values() if worker.connection is not None]
            ready = wait([*connections, self._listener.descriptor], _POLL_SECONDS)
            self._measure_memory()
            if self._listener.descriptor in ready:
                self._accept_workers()
            handled = [self._check_run(number, worker, ready, handler) for number, worker in [*self._busy.items()]]
            if any(handled) or (until is not None and time.monotonic() >= until):
                return

    def kill(self, number: int) -> None:
        if (worker := self._busy.pop(number, None)) is not None:  # else it could not be started
            self._end(worker)

    def clock(self) -> float:
        return time.monotonic()

    def available_bytes(self) -> int | None:
        # The idle worker that takes the next task uses its memory again; what others keep is used up.
        return self._launcher.available_bytes([worker.process for worker in (*self._busy.values(), *self._idle[-1:])])

    def gpu_bytes(self) -> Sequence[int]:
        return list(self._launcher.gpus.values())

    def _least_used_gpu(self) -> str | None:
        runs = Counter(worker.gpu for worker in self._busy.values())
        return min(self._launcher.gpus, key=lambda gpu: runs[gpu], default=None)

    def _measure_memory(self) -> None:
        """Notes what workers take: one that the kernel kills for it cannot say so any more."""
        if time.monotonic() - self._measured >= _POLL_SECONDS:
            self._measured = time.monotonic()
            for worker in self._busy.values():
                worker.peak = worker.process.peak_bytes() or worker.peak

    def _check_run(self, number: int, worker: _Worker, ready: list[Any], handler: Handler) -> bool:
        """Passes on what has happened to a run; returns whether anything has."""
        if worker.connection is None:
            if worker.process.exit_code(0) is None:
                return False
            self._receive_end(number, worker, self._death(worker), handler)
        elif worker.connection in ready:
            self._receive(number, worker, worker.connection, handler)
        elif time.monotonic() - worker.heard > self._silence:
            seconds = _seconds(worker)
            self.kill(number)
            error = f"it hangs: silent for {self._silence:g} s"
            handler.ended(number, Outcome("failed", error=error, seconds=seconds))
        else:
            return False
        return True

    def _receive(self, number: int, worker: _Worker, connection: Connection, handler: Handler) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = self._death(worker)
        worker.heard = time.monotonic()
        if message is None:  # the task makes progress
            return
        if isinstance(message, Outcome):
            self._receive_end(number, worker, message, handler)
            return
        answer = handler.message(number, *message)
        with suppress(OSError):  # it has died, which is noticed at the next look
            connection.send(answer)

    def _receive_end(self, number: int, worker: _Worker, outcome: Outcome, handler: Handler) -> None:
        del self._busy[number]
        if worker.process.exit_code(0) is None and outcome.kind != "killed":
            worker.task, worker.began = None, None
            self._idle.append(worker)
        else:
            self._end(worker)
        handler.ended(number, outcome)

    def _death(self, worker: _Worker) -> Outcome:
        """Returns why a worker has died in the middle of a run."""
        code = worker.process.exit_code(_DEATH_SECONDS)
        if code is None:  # only its connection is closed
            worker.process.kill()
            code = worker.process.exit_code(_DEATH_SECONDS) or -signal.SIGKILL
        seconds, memory = _seconds(worker), Memory(host=worker.peak)
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
            hint = ", perhaps as memory ran out" if code == -signal.SIGKILL else ""
            error = f"killed by {signal.Signals(-code).name}{hint}"
            return Outcome("killed", error=error, seconds=seconds, memory=memory)
        reason = f"crashed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        lines = [line for line in worker.process.output().splitlines() if line.strip()]
        error = f"{reason}{f': {lines[-1]}' if lines else ''}"[:300]
        return Outcome("failed", error=error, seconds=seconds, memory=memory)

    def _new_worker(self, folder: Path, gpu: str | None) -> _Worker:
        number, self._count = self._count, self._count + 1
        command = [sys.executable, "-m", "posttrain.jobs.worker", self._listener.address, str(number)]
        environment = {
            # Else each would use all cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // self.workers))),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            KEY_VARIABLE: self._listener.key.hex(),
            **({} if gpu is None else {VISIBLE: gpu}),
        }
        worker = self._launched[number] = _Worker(self._launcher.launch(command, environment, folder), gpu=gpu)
        return worker

    def _accept_workers(self) -> None:
        """Gives workers that have connected the function, and the task that waits for them."""
        for number, connection in self._listener.take():
            worker = self._launched.pop(number, None)
            if worker is None:  # it was ended before
                connection.close()
                continue
            worker.connection = connection
            setup = {"path": sys.path, "folder": os.getcwd(), "function": self._function.read_bytes()}
            with suppress(OSError):  # it has died, which is noticed at the next look
                connection.send(setup)
            if worker.task is not None:
                self._send_task(worker)

    def _send_task(self, worker: _Worker) -> bool:
        assert worker.connection is not None
        worker.began = worker.heard = time.monotonic()
        worker.peak = 0
        try:
            worker.connection.send(worker.task)
        except OSError:
            return False
        return True

    def _end(self, worker: _Worker) -> None:
        self._launched = {number: other for number, other in self._launched.items() if other is not worker}
        if worker.connection is not None:
            worker.connection.close()
        worker.process.kill()

    def _end_all(self) -> None:
        workers = [*self._idle, *self._busy.values()]
        for worker in workers:  # all at once, as each may take a moment to end
            if worker.connection is not None:
                worker.connection.close()
        for worker in workers:
            self._end(worker)


class _WorkerListener:
    """Accepts the connections of workers, in threads.

    Args:
        host: name of this machine for workers elsewhere; None for a socket that only this machine has.

    Attributes:
        key: Secret that workers must know.
        address: to connect to, as JSON.
        descriptor: readable when workers have connected.
    """

    def __init__(self, host: str | None) -> None:
        self.key = os.urandom(32)
        self._socket = Listener(family="AF_UNIX") if host is None else Listener(("", 0), "AF_INET")
        address: Address = self._socket.address if host is None else (host, self._socket.address[1])
        self.address = json.dumps(address)
        self._queue: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self.descriptor, self._signal = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[int, Connection]]:
        """Returns the numbers and connections of the workers that have connected since the last call."""
        count = len(os.read(self.descriptor, 4096))
        return [self._queue.get() for _ in range(count)]

    def close(self) -> None:
        """Accepts no more."""
        self._closed = True
        with suppress(OSError):  # wakes the thread
            Client(self._socket.address).close()
        self._thread.join()
        self._socket.close()
        while not self._queue.empty():
            self._queue.get()[1].close()
        os.close(self.descriptor)
        os.close(self._signal)

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError):
                connection = self._socket.accept()
                # In a thread of its own: a process that connects and stays silent must not hold up workers.
                threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()

    def _authenticate(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            number = connection.recv()
        except (OSError, AuthenticationError, EOFError):  # it knows no key, or has died
            connection.close()
            return
        if self._closed:
            connection.close()
        else:
            self._queue.put((number, connection))
            os.write(self._signal, b".")


def _seconds(worker: _Worker) -> float:
    return 0.0 if worker.began is None else time.monotonic() - worker.began


def _write_function(function: TaskFunction, path: Path) -> None:
    from joblib.externals.loky.backend.reduction import dump

    try:
        with path.open("wb") as file:
            dump(function, file)
    except Exception as error:  # pickle raises whatever an object's own methods do
        text = " ".join(str(error).split())[:200]
        raise UserError(f"cannot be sent to another process: {text}", where="function", fix="use inline") from error
