"""Save, resume and roll back a training so that no kill undoes a decision; finish the step on Ctrl-C or SIGTERM."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from posttrain.store.errors import UserError
from posttrain.train.checkpoint import Checkpoint, Checkpoints
from posttrain.train.monitor.decisions import Decision, stop_error
from posttrain.train.monitor.metrics import Sink, mean_loss
from posttrain.train.recovery_log import RecoveryLog
from posttrain.train.state import Interventions, TrainingState

log = logging.getLogger("posttrain")


@dataclass
class Recovery:
    """What leads a training back to a state that it was in.

    Args:
        state: of the training.
        notes: as the attempt before left them.
        checkpoints: of the training.
        scratch: where the notes are kept.
        rate_factor: what lowering the rate multiplies it by.
        sink: what is told which steps stand.
    """

    state: TrainingState
    notes: RecoveryLog
    checkpoints: Checkpoints
    scratch: Path
    rate_factor: float
    sink: Sink | None
    untold: list[Decision] = field(default_factory=list, init=False)
    """Decisions at steps that have no line of their own."""
    _saved: int = field(default=0, init=False)  # steps at the last checkpoint

    def resume(self) -> None:
        """Go on where an earlier attempt was stopped, if there was one.

        Raises:
            UserError: it was of another model, or has done more steps than this training is to have.
        """
        state, notes = self.state, self.notes
        if notes.ended:
            notes.ended = []
            notes.write(self.scratch)
        if notes.back_to is not None:
            self._gone_back()
        if checkpoint := self.checkpoints.latest():
            state.load(checkpoint, resumed=True)
        if notes.course and notes.course["turns"] > state.course.turns:
            state.course = Interventions(**notes.course).after_rollback_to(state.course)
            state.watch.decisions = [Decision.from_json(one) for one in notes.decisions]
            self.untold = [Decision.from_json(one) for one in notes.untold]
        done, wanted = len(state.steps), state.order.steps
        if done > wanted:
            raise UserError(
                f"{done} steps are done already, and this config has {wanted}",
                where=str(self.scratch),
                fix="raise `train.epochs`, or start afresh in another folder",
            )
        self._stands()

    def save(self) -> None:
        """Save a checkpoint; the best one is that with the lowest mean loss since the one before."""
        since = self.state.steps[self._saved :]
        if self.checkpoints.save(len(self.state.steps), self.state.checkpoint(), metric=mean_loss(since)):
            self._saved = len(self.state.steps)

    def save_last(self) -> None:
        """Save a checkpoint before the process ends, whatever is being written."""
        if self.checkpoints.config.wanted and self._saved < len(self.state.steps):
            self.checkpoints.steps()  # waits
            self.save()

    def act(self, decision: Decision, mine: list[Decision]) -> bool:
        """Carry a decision out.

        Args:
            mine: all decisions of the step, which is forgotten with its line where training goes back.

        Returns:
            Whether training went back; if not, it goes on with the next step.

        Raises:
            WorkError: the decision is to stop.
        """
        course, notes = self.state.course, self.notes
        if decision.action == "stop":
            notes.ended = self.state.watch.report()
            notes.write(self.scratch)
            raise stop_error(decision)
        there = self.checkpoints.steps() if decision.restores else []
        if decision.action == "lower_rate":
            if there:
                course.turned_factor *= self.rate_factor
            else:
                course.rate_factor *= self.rate_factor
        if decision.drops_gradient:
            course.skip_steps(range(decision.finding.since, decision.finding.step + 1))
        if not there:
            return False
        course.turns += 1
        self.untold += mine
        notes.course, notes.decisions = course.state(), self.state.watch.report()
        notes.untold = [one.to_json() for one in self.untold]
        notes.back_to = max(decision.finding.since, there[0])
        checkpoint = self._gone_back()
        if checkpoint is None:  # none was whole: what is left out are the gradients from here on
            del self.untold[len(self.untold) - len(mine) :]  # their step keeps its line
            return False
        self.state.load(checkpoint, resumed=False)
        self._stands()
        return True

    def _gone_back(self) -> Checkpoint | None:
        """The checkpoint to go back to, once those that came after it are gone; noted first, as a kill may come."""
        assert self.notes.back_to is not None
        self.notes.write(self.scratch)
        checkpoint = self.checkpoints.rewind(self.notes.back_to)
        self.notes.back_to = None
        self.notes.write(self.scratch)
        return checkpoint

    def _stands(self) -> None:
        self._saved = len(self.state.steps)
        if self.sink:
            self.sink.rewind(self.state.steps, self.state.watch.told)


@contextmanager
def graceful_shutdown() -> Iterator[Callable[[], BaseException | None]]:
    """What to raise once the process was asked to end; None before.

    A second request ends it at once. Only the main thread is told of signals; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[BaseException] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        if len(asked) > 1:
            raise asked[-1]
        log.warning("asked to end: after this step and its checkpoint; once more ends it at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
