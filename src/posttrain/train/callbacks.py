"""Callbacks of a training: what a program is told after each step, at each checkpoint and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.store.errors import UserError, WorkError
from posttrain.store.message import counted
from posttrain.train.monitor.metrics import StepValues, first_error_line

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel
    from posttrain.train.api import TrainResult

_EVENTS = ("on_begin", "on_step", "on_save", "on_stop", "on_end")


class Callback:
    """Base class of callbacks of `posttrain.train`; each method does nothing until it is overridden.

    A plain function is a callback too: it is called as ``on_step``. An object needs only the methods that it uses, and
    need not derive from this class. An exception in a callback saves a checkpoint and ends the training with a
    `WorkError`. Calls happen between two steps, in the thread that trains, so that a slow callback makes a slow
    training.
    """

    def on_begin(self, steps: int, total: int) -> bool | None:
        """Called before the first step of a call of `posttrain.train`.

        Args:
            steps: steps that earlier calls have done.
            total: steps of the whole training.

        Returns:
            True to stop at once, as `on_step` does.
        """

    def on_step(self, step: StepValues) -> bool | None:
        """Called after every optimiser step.

        Steps that an earlier call of a resumed training has done are not repeated. After a roll-back the steps since
        the checkpoint are run, and called for, again.

        Args:
            step: the step's number (from 0), ``loss``, ``lr``, ``grad_norm``, ``tokens_per_second`` and the other
                values of a line of ``metrics.jsonl``.

        Returns:
            True to stop: the training saves a checkpoint, and the same call of `posttrain.train` resumes from it. Any
            other value continues.
        """

    def on_save(self, steps: int) -> None:
        """Called when a checkpoint is saved, or copied to be written in the background, after so many steps."""

    def on_stop(self, model: LanguageModel) -> None:
        """Called with the model as it is, once a callback has stopped the training; it may be measured."""

    def on_end(self, result: TrainResult) -> None:
        """Called with the result once the model is written, or once a callback has stopped the training."""


AnyCallback = Callback | Callable[[StepValues], Any]


class TrainingStopped(Exception):
    """Raised where a callback has stopped a training; its checkpoint is saved.

    Args:
        steps: the values of every step so far.
        total: the steps that the training has in all.
    """

    def __init__(self, steps: Sequence[StepValues], total: int) -> None:
        super().__init__(f"stopped by a callback after {len(steps)} of {counted(total, 'step')}")
        self.steps, self.total = list(steps), total


class CallbackList:
    """Calls several callbacks in their order.

    Args:
        callbacks: functions, or objects with some of the methods of `Callback`; one may stand without a list.

    Raises:
        UserError: one of them is neither.
    """

    def __init__(self, callbacks: Any = ()) -> None:
        if not isinstance(callbacks, Sequence):
            callbacks = [callbacks]
        self._handlers: dict[str, list[tuple[str, Callable[..., Any]]]] = {event: [] for event in _EVENTS}
        for index, callback in enumerate(callbacks):
            for event, handler in _handlers(callback, index):
                name = getattr(callback, "__name__", type(callback).__name__)
                self._handlers[event].append((f"callbacks[{index}] ({name})", handler))

    def on_begin(self, steps: int, total: int) -> bool:
        """Calls them with the steps that are done, and those in all; returns whether one of them asks to stop."""
        return self._call("on_begin", "before the first step", steps, total)

    def on_step(self, step: StepValues) -> bool:
        """Calls them with a step's values; returns whether one of them asks to stop."""
        return self._call("on_step", f"at step {step.step}", step)

    def on_save(self, steps: int) -> None:
        """Calls them with the number of steps of a checkpoint."""
        self._call("on_save", f"at the checkpoint after {counted(steps, 'step')}", steps)

    def on_stop(self, model: LanguageModel) -> None:
        """Calls them with the model of a training that was stopped."""
        self._call("on_stop", "at the stop", model)

    def on_end(self, result: TrainResult) -> None:
        """Calls them with the result."""
        self._call("on_end", "at the end", result)

    def _call(self, event: str, when: str, *values: Any) -> bool:
        stop = False
        for name, handler in self._handlers[event]:
            try:
                answer = handler(*values)
            # Whatever it raises is the user's own: the training reports it and ends in order.
            except Exception as error:
                line = f"{type(error).__name__}: {first_error_line(error)}"
                raise WorkError(f"{name} failed {when}: {line}") from error
            # Not any true value: functions such as `dict.setdefault` return what they have stored.
            stop |= isinstance(answer, bool | np.bool_) and bool(answer)
        return stop


def _handlers(callback: Any, index: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    # A class passed in place of an object would fail at the first step only, in its missing `self`.
    methods = [] if isinstance(callback, type) else [event for event in _EVENTS if hasattr(callback, event)]
    # transformers' has `on_save`, too, with other arguments: it would end the training at the first checkpoint.
    if hasattr(callback, "on_step_end"):
        what = f"{type(callback).__name__} is a callback of transformers' Trainer, whose methods are not called"
        raise UserError(what, where=f"callbacks[{index}]", fix="give on_step(step), on_save(steps) or on_end(result)")
    if methods:
        yield from ((event, getattr(callback, event)) for event in methods)
    elif callable(callback) and not isinstance(callback, type):
        yield "on_step", callback
    else:
        what = f"{callback.__name__} is a class" if isinstance(callback, type) else f"{callback!r} is not a callback"
        fix = "give a function of a step, or an object with on_step, on_save or on_end"
        raise UserError(what, where=f"callbacks[{index}]", fix=fix)
