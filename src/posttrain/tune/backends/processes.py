"""Runs trials in worker processes of this machine, so that no trial takes others or the study with it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from posttrain.jobs.engines import available_cores
from posttrain.store.errors import UserError
from posttrain.tune.backends.base import Backend, Handler, Job, Outcome, TrialFunction
from posttrain.tune.budget import format_seconds

_POLL_SECONDS = 0.5  # between looks at runs that are silent

_DEATH_SECONDS = 5.0  # that a process may take to end


@dataclass
class _Worker:
    """A process; when its run began, and when it was last heard of."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    log: IO[bytes]
    began: float = 0.0
    heard: float = 0.0


class ProcessBackend(Backend):
    """Runs trials in processes, each of which runs one trial after another.

    A trial whose process is killed is reported as ``killed``, one that stays silent is killed and has failed. The
    workers die with this process, also if it is killed.

    Args:
        function: runs a trial; pickled by value where it comes from a script.
        workers: processes.
        silence: seconds without a report after which a trial counts as hanging.

    Raises:
        UserError: the function cannot be pickled.
    """

    def __init__(self, function: TrialFunction, workers: int, silence: float = 3600.0) -> None:
        super().__init__()
        if os.name != "posix":
            raise UserError("processes need a POSIX system", where="engine", fix="use inline")
        self.workers, self._silence = workers, silence
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}
        folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-tune-")))
        self._function = folder / "function"
        self._write_function(function)
        # Its end of the pipe is closed by the kernel when this process dies: workers see that.
        self._lifeline, self._hold = os.pipe()
        self.callback(os.close, self._lifeline)
        self.callback(os.close, self._hold)
        self.callback(self._end_all)

    def start(self, job: Job) -> None:
        worker = self._idle.pop() if self._idle else self._new_worker()
        try:
            worker.connection.send(job)
        except (BrokenPipeError, ConnectionError):  # it was killed while it had nothing to do
            self._end(worker)
            return self.start(job)
        worker.began = worker.heard = time.monotonic()
        self._busy[job.number] = worker
        return None

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            ready = wait([worker.connection for worker in self._busy.values()], _POLL_SECONDS)
            handled = False
            for number, worker in list(self._busy.items()):
                if worker.connection in ready:
                    self._receive(number, worker, handler)
                    handled = True
                elif time.monotonic() - worker.heard > self._silence:
                    seconds_run = time.monotonic() - worker.began
                    self.kill(number)
                    error = f"it hangs: no report for {format_seconds(self._silence)}"
                    handler.ended(number, Outcome("failed", error=error, seconds=seconds_run))
                    handled = True
            if handled or (until is not None and time.monotonic() >= until):
                return

    def kill(self, number: int) -> None:
        self._end(self._busy.pop(number))

    def clock(self) -> float:
        return time.monotonic()

    def _receive(self, number: int, worker: _Worker, handler: Handler) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            message = self._death(worker)
        worker.heard = time.monotonic()
        if not isinstance(message, Outcome):
            decision = handler.report(number, *message)
            with suppress(BrokenPipeError, ConnectionError):  # it has died, which is noticed at the next look
                worker.connection.send(decision)
            return
        del self._busy[number]
        if worker.process.poll() is None and message.kind != "killed":
            self._idle.append(worker)
        else:
            self._end(worker)
        handler.ended(number, message)

    def _death(self, worker: _Worker) -> Outcome:
        """Returns why a worker has died in the middle of a run."""
        try:
            code = worker.process.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:  # only its connection is closed
            os.killpg(worker.process.pid, signal.SIGKILL)
            code = worker.process.wait()
        seconds = time.monotonic() - worker.began
        lines = self._output(worker)
        if code == -signal.SIGKILL:
            return Outcome("killed", error="killed by SIGKILL, perhaps as memory ran out", seconds=seconds)
        if code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
            return Outcome("killed", error=f"killed by {signal.Signals(-code).name}", seconds=seconds)
        reason = f"crashed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        return Outcome("failed", error=f"{reason}{f': {lines[-1]}' if lines else ''}"[:300], seconds=seconds)

    def _output(self, worker: _Worker) -> list[str]:
        worker.log.seek(0)
        return [line for line in worker.log.read().decode(errors="replace").splitlines() if line.strip()]

    def _new_worker(self) -> _Worker:
        connection, end_of_worker = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with its worker
        command = [
            sys.executable,
            "-m",
            "posttrain.tune.backends.worker",
            str(end_of_worker.fileno()),
            str(self._lifeline),
        ]
        # Else each would use all cores.
        threads = str(max(1, available_cores() // self.workers))
        process = subprocess.Popen(
            command,
            pass_fds=(end_of_worker.fileno(), self._lifeline),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        end_of_worker.close()
        worker = _Worker(process, connection, log)
        connection.send({"path": sys.path, "folder": os.getcwd(), "function": str(self._function)})
        return worker

    def _write_function(self, function: TrialFunction) -> None:
        from joblib.externals.loky.backend.reduction import dump

        try:
            with self._function.open("wb") as file:
                dump(function, file)
        except Exception as error:  # pickle raises whatever an object's own methods do
            text = " ".join(str(error).split())[:200]
            raise UserError(f"cannot be sent to another process: {text}", where="function", fix="use inline") from error

    def _end(self, worker: _Worker) -> None:
        worker.connection.close()
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)  # the whole group: data workers would outlive it
        worker.process.wait()
        worker.log.close()

    def _end_all(self) -> None:
        for worker in (*self._idle, *self._busy.values()):
            self._end(worker)
