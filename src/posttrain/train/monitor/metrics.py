"""The metrics of a training step, the interface of the sinks they go to, and ``metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from posttrain.store.files import disk_errors, make_folder, to_storage_error

if TYPE_CHECKING:
    from posttrain.train.monitor.decisions import MonitorDecision

# Fields that hold several numbers, and the prefix of these in tools that plot.
STEPS = "training.json"
"""File of a trained model: a list with each step's `StepValues.to_json`, without times."""

_DICT_FIELDS = {
    **{"group_norms": "grad_norm", "metrics": "objective", "phases": "seconds"},
    "evaluation": "evaluation",
}

log = logging.getLogger("posttrain")


@dataclass(frozen=True, kw_only=True)
class GradientValues:
    """The metrics of a step that are known before the optimiser steps.

    Attributes:
        step: optimiser step, from 0.
        loss: nats a supervised token, or what the objective counts by; mean over the step.
        grad_norm: L2 norm over all gradients, before clipping.
        supervised_tokens: tokens of this step that the loss is taken on.
    """

    step: int
    loss: float
    grad_norm: float
    supervised_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepValues(GradientValues):
    """All metrics of a step: a line of ``metrics.jsonl``.

    Attributes:
        step: optimiser step, from 0.
        loss: nats a supervised token, or what the objective counts by; mean over the step.
        grad_norm: L2 norm over all gradients, before clipping.
        supervised_tokens: tokens of this step that the loss is taken on.
        epoch: passes over the data that were finished before, from 0.
        loss_count: divisor of ``loss``: its supervised tokens, pairs, answers, texts or their weights.
        lr: learning rate of the step, before a group's own scale.
        tokens: tokens of this step without padding.
        seconds: wall time of the step, waiting for data included.
        tokens_per_second: ``tokens`` over ``seconds``.
        memory_bytes: most memory in use so far, of the accelerator where there is one, else of the process.
        group_norms: gradient norm by layer group.
        update_ratio: norm of the update over norm of the weights.
        loss_scale: factor on the loss (float16 only).
        data_wait: share of ``seconds`` spent waiting for data, 0 to 1.
        data_rate: megabytes of token ids that a thread of the loader read and packed a second.
        mfu: share of the measured matrix-product peak that the model's own work used, 0 to 1.
        metrics: the objective's other values by name, such as ``rewards/margins``; means over the step.
        phases: seconds by phase (see `phase`); with an accelerator those of its host.
        evaluation: ``loss`` and other values on held-out records after this step; empty where it was not evaluated.
    """

    epoch: int
    loss_count: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    group_norms: dict[str, float] = field(default_factory=dict)
    update_ratio: float | None = None
    loss_scale: float | None = None
    data_wait: float = 0.0
    data_rate: float = 0.0
    mfu: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON, by field name; NaN and infinities, which JSON does not have, become None."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if not self.evaluation:
            del values["evaluation"]
        return {
            name: {key: finite(number) for key, number in value.items()} if name in _DICT_FIELDS else finite(value)
            for name, value in values.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restores what `to_json` returned, but for infinities, which come back as NaN."""
        # `to_json` wrote None for what was NaN or infinite, and the detectors want a number.
        not_finite = {name: math.nan for name in ("loss", "grad_norm") if values[name] is None}
        nested = {
            name: {key: math.nan if number is None else number for key, number in values[name].items()}
            for name in _DICT_FIELDS
            if name in values
        }
        return cls(**{**values, **not_finite, **nested})

    def numbers(self) -> dict[str, float]:
        """Returns the finite numbers by name, without ``step``, for tools that plot.

        Group norms are ``grad_norm/GROUP``, the objective's metrics ``objective/NAME``, phases ``seconds/PHASE``.
        """
        values = self.to_json()
        for name, prefix in _DICT_FIELDS.items():
            values |= {f"{prefix}/{key}": number for key, number in values.pop(name, {}).items()}
        del values["step"]
        return {name: float(value) for name, value in values.items() if value is not None}


def finite(value: float | None) -> float | None:
    """Returns ``value``, or None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def mean_loss(steps: Iterable[StepValues]) -> float | None:
    """Returns the mean of the steps' finite losses, weighted by ``loss_count``; None if there is none."""
    finite_steps = [step for step in steps if math.isfinite(step.loss)]
    count = sum(step.loss_count for step in finite_steps)
    return sum(step.loss * step.loss_count for step in finite_steps) / count if count else None


class Sink(Protocol):
    """Receives the metrics of each step and the decisions taken at it.

    To add one: implement these three methods, and open it in ``monitor/sinks.py``.
    """

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        """Writes the metrics of one step."""

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        """Drops all steps after ``steps``, which start at 0, if the sink can; training continues there.

        Args:
            reported: the decisions that were written with these steps, by step.
        """

    def close(self) -> None:
        """Flushes and closes; nothing is written after that."""


def first_error_line(error: Exception) -> str:
    """Returns the first line of a library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class JsonlSink:
    """Appends one line of JSON a step to a file: ``metrics.jsonl``.

    Unreadable lines, such as the half line that a kill leaves, are removed with all that follows, and logged; `rewind`
    writes the steps among them again that still count.

    Args:
        path: the file; made if missing.

    Raises:
        UserError: the disk refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent)
        with disk_errors(path):
            self._file = path.open("ab")
        self._cut()

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        """Appends one line: the metrics by name, and ``decisions`` if there are any."""
        line = values.to_json()
        if decisions:
            line["decisions"] = [decision.to_json() for decision in decisions]
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()  # a kill costs at most the line being written
        # A full disk ends the training with a message about the disk, not with a stack of the sink.
        except OSError as error:
            raise to_storage_error(error, self._path) or error from error

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        kept = self._cut(len(steps))
        if missing := steps[kept:]:
            log.warning("%s: the lines of %d steps from %d on are written again", self._path, len(missing), kept)
        for values in missing:
            self.write(values, reported.get(values.step, ()))

    def close(self) -> None:
        with disk_errors(self._path):
            self._file.close()

    def _cut(self, steps: int | None = None) -> int:
        """Truncates after ``steps`` lines, or at the first missing or unreadable step; returns how many are left."""
        count = size = 0
        for end, line in _read_lines(self._path):
            if line is None:
                log.warning("%s: what follows byte %d cannot be read and is removed", self._path, size)
            # Lines after a missing step belong to a run that was killed before its checkpoint.
            if line is None or (steps is not None and (count == steps or line["step"] != count)):
                break
            count, size = count + 1, end
        with disk_errors(self._path):
            self._file.truncate(size)
        return count


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a `JsonlSink`, up to the first unreadable one."""
    steps = []
    for _, line in _read_lines(path):
        if line is None:
            break
        steps.append(line)
    return steps


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the end of each line in bytes and its values; None for an unreadable one."""
    end = 0
    with path.open("rb") as file:
        for raw in file:
            end += len(raw)
            yield end, _parse_line(raw)


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    whole = raw.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), int)
    return line if whole else None


class MultiSink:
    """Writes to one sink that must not fail and to others that may: a failing one is logged and closed.

    Args:
        own: the workspace's file; its errors are raised.
        others: other sinks, by their name in the log.
    """

    def __init__(self, own: Sink, others: dict[str, Sink]) -> None:
        self._own, self._others = own, others

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self._own.write(values, decisions)
        self._each(lambda sink: sink.write(values, decisions))

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self._own.rewind(steps, reported)
        self._each(lambda sink: sink.rewind(steps, reported))

    def close(self) -> None:
        self._own.close()
        self._each(lambda sink: sink.close())
        self._others.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        # A copy, as a sink that fails is removed on the way.
        for name, sink in list(self._others.items()):
            if (problem := _error_of(sink, call)) is not None:
                log.warning("the sink %s failed (%s) and gets nothing more", name, problem)
                del self._others[name]
                _error_of(sink, lambda failed: failed.close())


def _error_of(sink: Sink, call: Callable[[Sink], None]) -> str | None:
    try:
        call(sink)
    except Exception as error:  # noqa: BLE001 - what a foreign service raises must not end a training
        return f"{type(error).__name__}: {first_error_line(error)}"
    return None
