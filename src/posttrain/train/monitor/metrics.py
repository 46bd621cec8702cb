"""The metrics of a training step, the interface of the sinks they go to, and ``metrics.jsonl``."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self

from posttrain.store.files import disk_errors, make_folder
from posttrain.train.monitor.decisions import Decision, finite

# Fields that hold several numbers, and what stands before these in tools that plot.
_DICT_FIELDS = {"group_norms": "grad_norm", "metrics": "objective", "phases": "seconds"}

log = logging.getLogger("posttrain")


@dataclass(frozen=True, kw_only=True)
class GradientValues:
    """What is known once the gradient is there and the optimiser has not stepped yet.

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
    """All that a step measured.

    Attributes:
        epoch: passes over the data that were finished before, from 0.
        loss_count: what ``loss`` is a mean over: supervised tokens, pairs, answers, texts or their weights.
        lr: learning rate of the step, before a group's own scale.
        tokens: tokens of this step without padding.
        seconds: wall time of the step, waiting for data included.
        tokens_per_second: ``tokens`` over ``seconds``.
        memory_bytes: most memory in use so far, of the accelerator where there is one, else of the process.
        group_norms: gradient norm by layer group.
        update_ratio: norm of the update over norm of the weights.
        loss_scale: what the loss was multiplied by (float16 only).
        data_wait: share of ``seconds`` spent waiting for data, 0 to 1.
        mfu: share of the measured matrix-product peak that the model's own work used, 0 to 1.
        metrics: what the objective measured besides, by its name, such as ``rewards/margins``; means over the step.
        phases: seconds by phase (see `phases`); with an accelerator those of its host.
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
    mfu: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every value by its name; a number that is not finite becomes None, as JSON has no word for it."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: {key: finite(one) for key, one in value.items()} if name in _DICT_FIELDS else finite(value)
            for name, value in found.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`, but for infinities, which come back as NaN.

        Lines of before there was ``loss_count`` have the supervised tokens instead.
        """
        lost = {name: math.nan for name in ("loss", "grad_norm") if values[name] is None}
        several = {
            name: {key: math.nan if one is None else one for key, one in values[name].items()}
            for name in _DICT_FIELDS
            if name in values
        }
        return cls(**{"loss_count": values["supervised_tokens"], **values, **lost, **several})

    def numbers(self) -> dict[str, float]:
        """The finite numbers by name, without ``step``: for tools that plot.

        Group norms are ``grad_norm/GROUP``, the objective's metrics ``objective/NAME``, phases ``seconds/PHASE``.
        """
        values = self.to_json()
        for name, prefix in _DICT_FIELDS.items():
            values |= {f"{prefix}/{key}": one for key, one in values.pop(name).items()}
        del values["step"]
        return {name: float(value) for name, value in values.items() if value is not None}


def mean_loss(steps: Iterable[StepValues]) -> float | None:
    """Mean loss over all that the steps counted; None where that is nothing. Losses that are no number are left out."""
    known = [step for step in steps if math.isfinite(step.loss)]
    count = sum(step.loss_count for step in known)
    return sum(step.loss * step.loss_count for step in known) / count if count else None


class Sink(Protocol):
    """A place that the values of each step and the decisions taken at it go to."""

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        """Take a step in."""

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        """The training goes on after ``steps``, all from 0 on: forget later ones, where the sink can.

        Args:
            told: the decisions that were written with some of them, by step.
        """

    def close(self) -> None:
        """Bring everything to its place and let go of what is open. Nothing is written after that."""


def first_error_line(error: Exception) -> str:
    """What a library says is wrong, without the rest of its explanation."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class JsonlSink:
    """Appends to a file and flushes after each line, so that a kill costs the line being written at most.

    Args:
        path: the file; made if missing.

    What cannot be read, such as the half line that a kill leaves, is removed with all that follows, and named; `rewind`
    writes again what still counts of that.

    Raises:
        UserError: the disk refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent)
        with disk_errors(path):
            self._file = path.open("ab")
        self._cut()

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        """One line: the values by name, and ``decisions`` where there are any."""
        line = values.to_json()
        if decisions:
            line["decisions"] = [decision.to_json() for decision in decisions]
        with disk_errors(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        kept = self._cut(len(steps))
        if missing := steps[kept:]:
            log.warning("%s: the lines of %d steps from %d on are written again", self._path, len(missing), kept)
        for values in missing:
            self.write(values, told.get(values.step, ()))

    def close(self) -> None:
        with disk_errors(self._path):
            self._file.close()

    def _cut(self, steps: int | None = None) -> int:
        """Keep the lines of the first ``steps``, or all, up to one that is missing; returns how many these are."""
        kept = size = 0
        for end, line in _read_lines(self._path):
            if line is None:
                log.warning("%s: what follows byte %d cannot be read and is removed", self._path, size)
            if line is None or (steps is not None and (kept == steps or line["step"] != kept)):
                break
            kept, size = kept + 1, end
        with disk_errors(self._path):
            self._file.truncate(size)
        return kept


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines that `JsonlSink` wrote, up to the first that cannot be read."""
    found = []
    for _, line in _read_lines(path):
        if line is None:
            break
        found.append(line)
    return found


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each line's end in bytes and its values; None for one that cannot be read."""
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
    """One sink that must not fail and others that may: one of these that does is named, closed and left out.

    Args:
        own: the workspace's file; its errors are raised.
        others: by a name for the log.
    """

    def __init__(self, own: Sink, others: dict[str, Sink]) -> None:
        self._own, self._others = own, others

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        self._own.write(values, decisions)
        self._each(lambda sink: sink.write(values, decisions))

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        self._own.rewind(steps, told)
        self._each(lambda sink: sink.rewind(steps, told))

    def close(self) -> None:
        self._own.close()
        self._each(lambda sink: sink.close())
        self._others.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
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
