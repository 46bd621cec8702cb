"""Save, resume and roll back a training so that no kill undoes a decision; finish the step on Ctrl-C or SIGTERM.

A log next to the checkpoints holds rollbacks and smaller micro-batches, so that the next attempt knows them.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from posttrain.parallel.mesh import Mesh
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.store.signals import END_SIGNALS, handle_signals
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.monitor.decisions import LOWER_RATE_FACTOR, MonitorDecision, stop_error
from posttrain.train.monitor.meter import phase
from posttrain.train.monitor.metrics import Sink, StepValues
from posttrain.train.state import Interventions, TrainingState

log = logging.getLogger("posttrain")

_LOG_FILE = "notes.json"


@dataclass
class RecoveryLog:
    """Everything the next attempt of a training has to know before it reads a checkpoint.

    Decisions without a rollback are in the checkpoints alone: an attempt that starts before them decides the same.

    Args:
        auto_budget: tokens of a micro-batch where the config says ``auto``; None before that was decided.
        fitting_budget: the most tokens of a micro-batch since memory ran out; None if it has not.
        interventions: the interventions at the last rollback, as JSON; they override a checkpoint with fewer rollbacks.
        decisions: all decisions up to then, as JSON, oldest first.
        unreported: those of them that no line of the metrics file reports.
        rollback_step: the step to roll back to; None once that is done.
        stopping_decisions: all decisions when the monitor stopped the training, as JSON; empty otherwise.
    """

    auto_budget: int | None = None
    fitting_budget: int | None = None
    interventions: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    unreported: list[dict[str, Any]] = field(default_factory=list)
    rollback_step: int | None = None
    stopping_decisions: list[dict[str, Any]] = field(default_factory=list)

    def limit_tokens(self, tokens: int) -> int:
        """Limits the tokens of a micro-batch to what memory has held."""
        return tokens if self.fitting_budget is None else min(tokens, self.fitting_budget)

    def write(self, folder: Path) -> None:
        """Writes the log into a training's folder."""
        write_atomically(folder / _LOG_FILE, json.dumps(asdict(self)).encode())


def read_recovery_log(folder: Path) -> RecoveryLog:
    """Reads the log of a training's folder; a fresh one if there is none."""
    file = folder / _LOG_FILE
    if not file.exists():
        return RecoveryLog()
    return RecoveryLog(**json.loads(file.read_bytes()))


@dataclass
class Recovery:
    """Saves, resumes and rolls back a training.

    Args:
        state: the training's state.
        log: log of the attempts before; fresh if there were none.
        checkpoints: the training's checkpoints.
        scratch: the folder of the log.
        sink: receives each step, and drops those that a rollback undoes.
        mesh: the processes that train together.
    """

    state: TrainingState
    log: RecoveryLog
    checkpoints: Checkpoints
    scratch: Path
    sink: Sink | None
    mesh: Mesh
    unreported: list[MonitorDecision] = field(default_factory=list, init=False)
    """Decisions at steps that were undone, and so have no line of their own; the next line reports them."""
    _saved: int = field(default=0, init=False)  # steps at the last checkpoint
    _reserved: bool = field(default=False, init=False)
    _saved_at: float = field(default_factory=lambda: time.monotonic(), init=False)

    def resume(self) -> None:
        """Resumes an earlier attempt, if there was one.

        Raises:
            UserError: it trained another model, or more steps than this training has.
        """
        state = self.state
        if self.log.stopping_decisions:
            self.log.stopping_decisions = []
            self.log.write(self.scratch)
        if self.log.rollback_step is not None:  # killed in the middle of a rollback
            self._rewind()
        if checkpoint := self.checkpoints.latest():
            state.load(checkpoint, resumed=True)
        # Killed between a rollback and the next checkpoint: only the log knows why it rolled back.
        logged = Interventions.from_state(self.log.interventions) if self.log.interventions else Interventions()
        if logged.rollbacks > state.interventions.rollbacks:
            state.interventions = logged.after_rollback_to(state.interventions)
            state.monitor.decisions = [MonitorDecision.from_json(decision) for decision in self.log.decisions]
            self.unreported = [MonitorDecision.from_json(decision) for decision in self.log.unreported]
        if len(state.steps) > state.sampler.steps:
            raise UserError(
                f"{len(state.steps)} steps are done already, and this config has {state.sampler.steps}",
                where=str(self.scratch),
                fix="raise `train.epochs`, or start again in another folder",
            )
        self._rewind_sink()

    def reserve_memory(self) -> None:
        """Reserves the memory of checkpoints, once, so that the first takes as long as the others."""
        if not self._reserved:
            self.checkpoints.prepare(self.state.tensors())
            self._reserved = True

    def is_due(self) -> bool:
        """Returns whether a checkpoint is due, by the number of steps or by the clock."""
        config, done = self.checkpoints.config, len(self.state.steps)
        # Steps come first, as they are the same on every machine.
        by_steps = config.every_steps is not None and done % config.every_steps == 0
        by_clock = config.every_seconds is not None and time.monotonic() - self._saved_at >= config.every_seconds
        return self.mesh.any(by_steps or by_clock)

    def save(self, *, last: bool) -> bool:
        """Saves a checkpoint.

        Args:
            last: whether the process ends after it: then none is saved where there are none, or there is one already.

        Returns:
            Whether one was saved.
        """
        done, self._saved_at = len(self.state.steps), time.monotonic()
        if last and (not self.checkpoints.config.enabled or self._saved == done):
            return False
        with phase("checkpoint"):
            self.checkpoints.save(done, self.state.checkpoint())
        self._saved = done
        return True

    def limit_budget(self, tokens: int) -> None:
        """Logs the most tokens of a micro-batch that fit into memory."""
        # At once: a resumed training would otherwise run out of memory again.
        self.log.fitting_budget = tokens
        self.log.write(self.scratch)

    def finish_step(self, values: StepValues, before: MonitorDecision | None, *, monitored: bool) -> bool:
        """Has the monitor check a finished step, and reports its values and decisions.

        Args:
            before: the decision before the optimiser's step; None without.
            monitored: False for a step that the monitor leaves out.

        Returns:
            Whether a decision changed the training, which then has no checkpoint after this step.

        Raises:
            WorkError: a decision is to stop.
        """
        monitor = self.state.monitor
        with phase("watch"):
            after = self.mesh.from_first(monitor.observe(values)) if monitored else []
        decisions = [*([before] if before else []), *after]
        gravest = after[0] if after else None
        if gravest and gravest.restores and self.act(gravest, decisions):
            return True
        # Decisions of steps that a rollback took away are written with the first step that stays.
        reported = [*self.unreported, *decisions]
        self.unreported.clear()
        monitor.record(values.step, reported)
        if self.sink:
            with phase("watch"):
                self.sink.write(values, reported)
        if not gravest or gravest.restores or gravest.action == "warn":
            return False
        self.act(gravest, decisions)
        return True

    def act(self, decision: MonitorDecision, decisions: list[MonitorDecision]) -> bool:
        """Carries out a decision.

        Args:
            decisions: all decisions of this step; a rollback undoes the step and its line.

        Returns:
            Whether training was rolled back; if not, it continues with the next step.

        Raises:
            WorkError: the decision is to stop.
        """
        interventions, log = self.state.interventions, self.log
        if decision.action == "stop":
            log.stopping_decisions = self.state.monitor.report()
            log.write(self.scratch)
            raise stop_error(decision)
        available = self.mesh.from_first(self.checkpoints.steps()) if decision.restores else []
        if decision.action == "lower_rate":
            if available:
                interventions.rollback_lr_scale *= LOWER_RATE_FACTOR
            else:
                interventions.lr_scale *= LOWER_RATE_FACTOR
        if decision.drops_gradient:
            interventions.skip_steps(range(decision.finding.since, decision.finding.step + 1))
        if not available:
            return False
        interventions.rollbacks += 1
        self.unreported += decisions
        log.interventions, log.decisions = interventions.state(), self.state.monitor.report()
        log.unreported = [unreported.to_json() for unreported in self.unreported]
        log.rollback_step = max(decision.finding.since, available[0])
        checkpoint = self._rewind()
        if checkpoint is None:
            # No checkpoint was whole: training continues, the gradients are skipped, and the step keeps its line.
            del self.unreported[len(self.unreported) - len(decisions) :]
            return False
        self.state.load(checkpoint, resumed=False)
        self._rewind_sink()
        return True

    def _rewind(self) -> Checkpoint | None:
        """Removes the checkpoints after ``log.rollback_step`` and returns the newest of the others."""
        assert self.log.rollback_step is not None
        # Logged before and after: a kill in between repeats the removal instead of resuming from what was given up.
        self.log.write(self.scratch)
        checkpoint = self.checkpoints.rewind(self.log.rollback_step)
        self.log.rollback_step = None
        self.log.write(self.scratch)
        return checkpoint

    def _rewind_sink(self) -> None:
        self._saved = len(self.state.steps)
        if self.sink:
            self.sink.rewind(self.state.steps, self.state.monitor.reported)


@contextmanager
def graceful_shutdown() -> Iterator[Callable[[], bool]]:
    """Catches Ctrl-C, SIGTERM and SIGHUP; yields a function that returns whether one has arrived.

    The step is finished and saved first. A second signal ends the process at once.

    Raises:
        KeyboardInterrupt, SystemExit: a signal has arrived, and the context has ended.
    """
    requests: list[BaseException] = []

    def handle(number: int, frame: FrameType | None) -> None:
        requests.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        if len(requests) > 1:
            raise requests[-1]
        log.warning("shutting down after this step and its checkpoint; a second signal exits at once")

    with handle_signals(END_SIGNALS, handle):
        yield lambda: bool(requests)
    if requests:
        raise requests[0]
