"""Reports the state of the loop, and the use of the machine, for people and programs."""

import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.data.records.provenance import PSEUDO
from posttrain.evaluate.retention import retention_sentences
from posttrain.inspect.champion import champion_problems, last_rollback
from posttrain.jobs.process import run_command
from posttrain.loop.adjust import Adjustment
from posttrain.loop.batch_counts import batch_counts
from posttrain.loop.canary import canary_problems, describe_canary
from posttrain.loop.config import Config
from posttrain.loop.gain import current_estimate, gain_sentence
from posttrain.loop.history import finished_rounds, finished_states
from posttrain.loop.linear_head import head_result, head_sentence
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.round import ROUND, ROUND_ZERO, round_steps
from posttrain.loop.stage import CachedWork
from posttrain.loop.stages.drift import MeasureDrift
from posttrain.loop.stages.pseudo import PseudoLabel
from posttrain.loop.stages.suggest import Suggest, check_report, suggestions_of
from posttrain.loop.state import RoundState
from posttrain.loop.tuning import tuning_sentences
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.files import is_locked
from posttrain.store.rows import Round, Run
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def status(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Reports the loop's state.

    Returns:
        ``round``: number of the round in progress, or of the last one; ``champion``: id, round, metrics, path and
        damage (a line for each file that is missing or has another size), or None; ``waiting``: what the loop waits
        for, or None; ``rounds``: for each its round, status, labels (in its training set), batch (what became of the
        records that were asked for, see `posttrain.loop.batch_counts.BatchCounts`, and a sentence; None before they
        are answered), forecast (what the batch is expected to bring, in a sentence, or None), metrics, decision,
        seconds, stages (seconds by stage), model_seconds, pseudo_labels (number that joined its training), head (what a
        linear head reaches with its labels: accuracy, low, high, n, labels and a sentence, or None), models (what
        models labelled, see `posttrain.loop.stages.suggest.check_report`, or None), drift (of its new inputs, see
        `posttrain.loop.drift`, or None), retention (what a merged candidate kept of its models, and sentences),
        tuning (what a search of its settings decided, or None, and sentences) and adjustments (sentences on what its
        rules changed for later rounds);
        ``final``: the champion and its metrics on all test records, or None; ``canary``: id, model, share, since, line
        and problems of the canary that runs, or None; ``rollback``: the roll-back that restored
        the champion, see `posttrain.inspect.champion.RollbackReport`, or None; ``rounds_wanted``: number of the last
        round, None without an end; ``stages``: of the round in progress, or of the last round, each stage's name, state
        (``done``, ``running``, ``waiting``, ``failed``, ``open``, or ``unused`` for one that had nothing to do) and
        seconds; ``working``: whether a process works on the loop.
    """
    rounds = workspace.metadata.rounds()
    # All at once: two queries for each of many rounds would be too slow for a page that follows the loop.
    runs = workspace.metadata.runs()
    working = is_working(workspace)
    finished = finished_states(workspace)
    champion = _champion(workspace)
    return {
        "round": rounds[-1].number if rounds else None,
        "rounds_wanted": config.rounds,
        "champion": champion,
        "waiting": _waiting(workspace),
        "canary": _canary(workspace),
        "rounds": [
            _round(workspace, entry, [run for run in runs if run.round == entry.number], champion) for entry in rounds
        ],
        "final": finished[-1].final_of(champion["id"]) if finished and champion else None,
        "rollback": rollback.to_json() if (rollback := last_rollback(workspace)) else None,
        "stages": _stages(config, rounds, runs, working),
        "working": working,
    }


def is_working(workspace: Workspace) -> bool:
    """Returns whether a process holds the workspace's lock, as far as its note tells."""
    return is_locked(workspace.home / "lock")


def _stages(config: Config, rounds: Sequence[Round], runs: Sequence[Run], working: bool) -> list[dict[str, Any]]:
    """Reports the stages of the round in progress, or of the last one."""
    try:
        steps = ROUND_ZERO if rounds and rounds[-1].number == 0 else round_steps(config)
    except UserError:
        steps = ROUND  # a stage of one's own that is gone must not hide the others
    ever = {run.stage.split(" ")[0] for run in runs}
    runs_of: dict[str, list[Run]] = {step.name: [] for step in steps}
    for run in runs:
        if rounds and run.round == rounds[-1].number:
            runs_of.setdefault(run.stage.split(" ")[0], []).append(run)
    begun = [at for at, step in enumerate(steps) if runs_of[step.name]]
    stages = []
    for at, step in enumerate(steps):
        name = step.name
        last = runs_of[name][-1].status if runs_of[name] else None
        # A stage whose work an earlier round did has no run of its own.
        if (rounds and rounds[-1].status == "done") or last == "done" or (last is None and begun and at < begun[-1]):
            state = "done" if name in ever or not issubclass(step, CachedWork) else "unused"
        elif last == "running":
            state = "running" if working else "failed"
        else:
            state = last or "open"
        stages.append({"name": name, "state": state, "seconds": sum(run.seconds or 0.0 for run in runs_of[name])})
    return stages


def stage_seconds(workspace: Workspace, number: int) -> dict[str, float]:
    """Sums the seconds of finished work by stage in one round."""
    return _stage_seconds(workspace.metadata.runs(round=number, status="done"))


def _stage_seconds(runs: Iterable[Run]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for run in runs:
        # `collect pool`, `collect test` and `collect labelled` are one stage to a reader.
        stage = run.stage.split(" ")[0]
        seconds[stage] = seconds.get(stage, 0.0) + (run.seconds or 0.0)
    return seconds


def model_seconds(workspace: Workspace, number: int) -> float:
    """Sums the seconds of one round in which a model was computing: training, scoring, answering, timing."""
    return _model_seconds(workspace.metadata.runs(round=number, status="done"))


def _model_seconds(runs: Iterable[Run]) -> float:
    # By task and not by stage: a stage also reads, writes and hashes files.
    return sum(sum(run.detail.get("tasks", {}).values()) for run in runs)


def _champion(workspace: Workspace) -> dict[str, Any] | None:
    champion = ModelRegistry(workspace).champion
    if champion is None:
        return None
    trained = [entry for entry in finished_rounds(workspace) if entry.candidate == champion.model_id]
    return {
        "id": champion.model_id,
        "round": trained[-1].number if trained else champion.round,
        # A model promoted by hand out of an unfinished round has no metrics of its own round.
        "metrics": (RoundState.from_row(trained[-1]).metrics or {}) if trained else {},
        "path": str(workspace.champion_path),
        "damage": champion_problems(workspace, champion.model_id),
    }


def _canary(workspace: Workspace) -> dict[str, Any] | None:
    canary = ModelRegistry(workspace).running_canary
    if canary is None:
        return None
    return {
        "id": canary.id,
        "model": canary.model_id,
        "share": canary.share,
        "since": canary.created_at.isoformat(),
        "line": describe_canary(canary),
        "problems": canary_problems(canary),
    }


def _waiting(workspace: Workspace) -> str | None:
    rounds = workspace.metadata.rounds()
    # An open round that waited before still has the text in its row until its batch is scored anew.
    if not rounds or rounds[-1].status == "open":
        return None
    return RoundState.from_row(rounds[-1]).waits_for


def _round(
    workspace: Workspace, entry: Round, runs: Sequence[Run], champion: Mapping[str, Any] | None
) -> dict[str, Any]:
    state = RoundState.from_row(entry)
    estimate = current_estimate(state, champion["id"] if champion else None)
    counts = batch_counts(state)
    done = [run for run in runs if run.status == "done"]
    return {
        "round": entry.number,
        "status": entry.status,
        "labels": state.labels,
        "batch": {**counts.to_json(), "sentence": counts.sentence} if counts else None,
        "forecast": gain_sentence(estimate) if estimate else None,
        "metrics": state.metrics or {},
        "decision": state.action,
        "seconds": entry.seconds,
        "stages": _stage_seconds(done),
        "model_seconds": _model_seconds(done),
        "drift": round_drift(workspace, state),
        "adjustments": [Adjustment(**fields).sentence for fields in state.adjustments or ()],
        **models_beside(workspace, state),
    }


def round_drift(workspace: Workspace, state: RoundState) -> dict[str, Any] | None:
    """Reports the drift of a round's new inputs, see `posttrain.loop.drift`; None where it was not measured."""
    drift = workspace.metadata.artifact(state.outputs.get(MeasureDrift.name, ""))
    # With too few new inputs there is nothing to report.
    return dict(drift.meta) if drift and drift.meta["psi"] is not None else None


def models_beside(workspace: Workspace, state: RoundState) -> dict[str, Any]:
    """Reports what models beside the candidate did in a round: ``pseudo_labels``, ``head``, ``models`` of `status`.

    ``retention`` is what a merged candidate kept of the models that it is made of, see `merge_retention`; ``tuning``
    what a search of settings decided, see `posttrain.loop.tuning.Tuning`, or None.
    ``head_sentence`` says what a linear head reaches, or why none was measured; "" where there is none to measure.
    """
    pseudo = workspace.metadata.artifact(state.outputs[PseudoLabel.name]) if PseudoLabel.name in state.outputs else None
    head = head_result(workspace, state)
    if head is not None:
        head["sentence"] = head_sentence(head, (state.metrics or {}).get("accuracy"))
    no_head = f"No linear head was measured: {state.no_head}." if state.no_head and state.labels else ""
    return {
        "pseudo_labels": pseudo.meta[PSEUDO]["records"] if pseudo else 0,
        "head": head,
        "head_sentence": head["sentence"] if head else no_head,
        "models": _labels_by_models(workspace, state),
        "retention": [*(state.retention or ())],
        "retention_sentences": retention_sentences(state.retention or ()),
        "tuning": state.tuning,
        "tuning_sentences": tuning_sentences(state),
    }


def _labels_by_models(workspace: Workspace, state: RoundState) -> dict[str, Any] | None:
    suggestions = state.outputs.get(Suggest.name)
    if suggestions is None or state.labelled is None or suggestions_of(workspace, state) is None:
        return None
    try:
        return check_report(workspace, suggestions, state.labelled)
    except DamagedArtifactError as error:
        log.warning("%s; what models labelled is unknown", error)
        return None


_SAMPLE_SECONDS = 1.0
_GPU_SECONDS = 5.0
_GPU_QUERY = "--query-gpu=name,utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class Use:
    """A resource in use.

    Attributes:
        kind: ``cpu``, ``memory``, ``disk``, ``gpu`` or ``gpu_memory``.
        name: Name of the device, or "".
        used: Amount in use: bytes, or for processors how many of them.
        total: All there is, in the same unit.
    """

    kind: str
    name: str
    used: float
    total: float

    @property
    def share(self) -> float:
        """Returns the share in use, between 0 and 1."""
        return min(max(self.used / self.total, 0.0), 1.0) if self.total else 0.0


class SystemMonitor:
    """Reads the use of the machine; processors are measured from one reading to the next.

    Args:
        folder: A folder on the disk that counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._times = (0.0, 0.0)
        self._busy = 0.0
        self._sampled = -_SAMPLE_SECONDS
        self._gpus: list[Use] = []
        self._gpus_read = -_GPU_SECONDS

    def read(self) -> list[Use]:
        """Returns all resources that can be read on this machine."""
        with self._lock:
            uses = [Use("cpu", "", self._processors(), float(os.cpu_count() or 1))]
            uses += [memory] if (memory := read_memory()) else []
            disk = shutil.disk_usage(self.folder)
            return [*uses, Use("disk", "", disk.used, disk.used + disk.free), *self._read_gpus()]

    def _processors(self) -> float:
        count, now = os.cpu_count() or 1, time.monotonic()
        if now - self._sampled < _SAMPLE_SECONDS:
            return self._busy
        try:
            fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            self._busy = min(os.getloadavg()[0], count)  # no Linux
            return self._busy
        # Idle and waiting for a disk are the fourth and the fifth.
        total, idle = sum(fields), fields[3] + fields[4]
        passed = total - self._times[0]
        self._busy = count * (1 - (idle - self._times[1]) / passed) if passed > 0 else self._busy
        self._times, self._sampled = (total, idle), now
        return self._busy

    def _read_gpus(self) -> list[Use]:
        # Not by torch: it would open a context on the GPU that the training uses.
        if time.monotonic() - self._gpus_read >= _GPU_SECONDS and (program := shutil.which("nvidia-smi")):
            command = [program, _GPU_QUERY, "--format=csv,noheader,nounits"]
            self._gpus = []
            with suppress(OSError, ValueError):
                answer = run_command(command, seconds=5)
                self._gpus = parse_gpus(answer.output.decode()) if answer.code == 0 else []
            self._gpus_read = time.monotonic()
        return self._gpus


def parse_gpus(output: str) -> list[Use]:
    """Parses the lines of ``nvidia-smi``: name, percent in use, MiB in use, MiB.

    Raises:
        ValueError: a line has other fields.
    """
    uses = []
    for line in output.splitlines():
        # A name may hold commas.
        name, *numbers = line.rsplit(",", 3)
        busy, used, total = (float(number) if "N/A" not in number else 0.0 for number in numbers)
        uses.append(Use("gpu", name.strip(), busy / 100, 1.0))
        uses.append(Use("gpu_memory", name.strip(), used * 2**20, total * 2**20))
    return uses


def read_memory() -> Use | None:
    """Returns the memory of this machine, or of the container if that is limited to less."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (float(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None
    used = total - free
    try:
        group = Path("/sys/fs/cgroup")
        limit = float((group / "memory.max").read_text())
        inside = float((group / "memory.current").read_text())
        # Files that the kernel keeps in memory can be dropped at once.
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        inside -= float(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return Use("memory", "", used, total)
    return Use("memory", "", inside, limit) if limit < total else Use("memory", "", used, total)
