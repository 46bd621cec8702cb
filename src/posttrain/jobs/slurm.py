"""Starts commands as batch jobs of Slurm."""

import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.jobs.launcher import Launcher
from posttrain.jobs.process import run_command
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import TaskFunction
from posttrain.jobs.workers import WorkerRunner
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import make_folder

_LOOK_SECONDS = 1.0  # between questions about a job

_UNFINISHED = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)


class SlurmLauncher(Launcher):
    """Submits each command as a batch job.

    What a job gets is said by the variables that ``sbatch`` reads, such as ``SBATCH_PARTITION``, ``SBATCH_GPUS`` and
    ``SBATCH_TIMELIMIT``.

    Raises:
        UserError: Slurm is not here, or would refuse a job.
    """

    def __init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise UserError("Slurm's sbatch is not here", where="--engine", fix="run it where jobs are submitted")
        check = run_command(["sbatch", "--test-only", "--wrap", "true"])
        if check.code:
            reason = re.sub(r"^\w+: (error: )?", "", check.last_error or "it gives no reason")
            raise UserError(f"Slurm refuses jobs: {reason}", where="--engine", fix="set SBATCH_PARTITION and the like")
        super().__init__()
        self.host = socket.gethostname()

    def launch(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> "SlurmJob":
        logs = folder / "logs"
        make_folder(logs)
        options = [
            "--parsable",
            "--no-requeue",  # the starter of the command starts it again
            "--export=ALL",
            "--job-name=posttrain",
            f"--output={logs}/%j.log",
        ]
        submission = run_command(["sbatch", *options, "--wrap", f"exec {shlex.join(command)}"], environment=environment)
        if submission.code:
            raise WorkError(f"Slurm refuses a job: {submission.last_error}")
        number = submission.output.decode().strip().split(";")[0]
        return SlurmJob(number, logs / f"{number}.log")


class SlurmJob:
    """A batch job, and the file of what it prints."""

    def __init__(self, number: str, log: Path) -> None:
        self._number, self._log = number, log
        self._code: int | None = None
        self._next_look = 0.0

    def exit_code(self, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        while self._code is None:
            if time.monotonic() >= self._next_look:
                self._code = self._look()
                self._next_look = time.monotonic() + _LOOK_SECONDS
            if self._code is not None or time.monotonic() >= until:
                break
            time.sleep(max(0.0, min(until, self._next_look) - time.monotonic()))
        return self._code

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def peak_bytes(self) -> int:
        return 0

    def kill(self) -> None:
        if self._code is None:
            run_command(["scancel", "--quiet", self._number])

    def _look(self) -> int | None:
        job = run_command(["scontrol", "show", "job", self._number, "--oneliner"])
        if job.code and b"Invalid job id" not in job.errors:
            return None  # the controller does not answer, and may be back soon
        fields = dict(part.split("=", 1) for part in job.output.decode().split() if "=" in part)
        state = fields.get("JobState", "")
        if state in _UNFINISHED:
            return None
        code, number = map(int, fields.get("ExitCode", "0:0").split(":"))
        if state in ("COMPLETED", "FAILED"):
            return -number if number else code
        # Cancelled, at its time limit, out of memory, its node is gone: or forgotten, as jobs are after minutes.
        return -signal.SIGKILL


def slurm_runner(function: TaskFunction, workers: int, silence: float) -> Runner:
    """Returns a runner whose workers are batch jobs; its first task waits with each in the queue."""
    return WorkerRunner(function, SlurmLauncher(), workers, silence)
