"""Runs trials in worker processes that Slurm starts, each as a job of its own."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import make_folder
from posttrain.tune.backends.base import TrialFunction
from posttrain.tune.backends.connected import ConnectedBackend

_LOOK_SECONDS = 1.0  # between questions about a job

_UNFINISHED = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)


class SlurmBackend(ConnectedBackend):
    """Runs trials in processes that Slurm starts; see `ConnectedBackend`.

    A worker is a batch job, and its first trial waits with it in the queue. What a job gets is said by the variables
    that ``sbatch`` reads, such as ``SBATCH_PARTITION``, ``SBATCH_GPUS`` and ``SBATCH_TIMELIMIT``. The study's folder
    must lie where every node sees it under the same path; ``trials/logs`` in it has what workers print. Workers connect
    to this machine, and prove that they know a key; what they send is not encrypted.

    Args:
        function: runs a trial; pickled by value where it comes from a script.
        workers: jobs.
        silence: seconds without a report after which a trial counts as hanging.

    Raises:
        UserError: Slurm is not here, would refuse a job, or the function cannot be pickled.
    """

    def __init__(self, function: TrialFunction, workers: int, silence: float = 3600.0) -> None:
        if shutil.which("sbatch") is None:
            raise UserError("Slurm's sbatch is not here", where="--engine", fix="run it where jobs are submitted")
        check = _slurm("sbatch", "--test-only", "--wrap", "true")
        if check.returncode:
            lines = check.stderr.strip().splitlines() or ["it gives no reason"]
            reason = re.sub(r"^\w+: (error: )?", "", lines[-1])
            raise UserError(f"Slurm refuses jobs: {reason}", where="--engine", fix="set SBATCH_PARTITION and the like")
        super().__init__(function, workers, silence, host=socket.gethostname())

    def launch(self, command: list[str], environment: dict[str, str], folder: Path) -> "SlurmJob":
        logs = folder / "logs"
        make_folder(logs)
        submission = _slurm(
            "sbatch",
            "--parsable",
            "--no-requeue",  # the study runs a trial again
            "--export=ALL",
            "--job-name=posttrain-tune",
            f"--output={logs}/%j.log",
            "--wrap",
            f"exec {shlex.join(command)}",
            environment=environment,
        )
        if submission.returncode:
            raise WorkError(f"Slurm refuses a job: {submission.stderr.strip()}")
        number = submission.stdout.strip().split(";")[0]
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
            _slurm("scancel", "--quiet", self._number)

    def _look(self) -> int | None:
        job = _slurm("scontrol", "show", "job", self._number, "--oneliner")
        if job.returncode and "Invalid job id" not in job.stderr:
            return None  # the controller does not answer, and may be back soon
        fields = dict(part.split("=", 1) for part in job.stdout.split() if "=" in part)
        state = fields.get("JobState", "")
        if state in _UNFINISHED:
            return None
        code, number = map(int, fields.get("ExitCode", "0:0").split(":"))
        if state in ("COMPLETED", "FAILED"):
            return -number if number else code
        # Cancelled, at its time limit, out of memory, its node is gone: or forgotten, as jobs are after minutes.
        return -signal.SIGKILL


def _slurm(*command: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | (environment or {})
    return subprocess.run(command, check=False, capture_output=True, text=True, env=variables, stdin=subprocess.DEVNULL)
