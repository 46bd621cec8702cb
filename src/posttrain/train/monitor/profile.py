"""Profile a few steps: a trace of every operation, and a table of where the time went, in plain words."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from posttrain.models.language_model import LanguageModel
from posttrain.store.files import disk_errors, make_folder, write_atomically
from posttrain.train.monitor import meter
from posttrain.train.monitor.config import ProfileConfig

log = logging.getLogger("posttrain")

TRACE, TABLE = "trace.json.gz", "profile.txt"

PHASE, PART = "phase: ", "part: "
"""Prefixes of the profiler ranges that mark a step's phases and the parts of a model."""

TimeShares = Mapping[str, Mapping[str, float]]
"""Share of each phase's time by part: embedding, attention, linear, rest, head, again, sums."""

_EVALUATE = "autograd::engine::evaluate_function: "

# The first steps allocate memory and compile.
_WARMUP = 2

_BACKWARD_SCOPE = 1  # at::RecordScope

# In compiled layers no module is called: the part is recognised by these fragments of an operation's name.
_NAME_WORDS = {
    "attention": ("attention", "bmm", "softmax", "rearranged", "repeated"),
    "linear": ("::mm", "addmm", "linear", "matmul"),
    "embedding": ("embedding",),
}

_FORWARD_ROWS = {
    "embedding": ("forward: embedding", "looking up the vector of each token"),
    "attention": ("forward: attention", "tokens taking in what stands before them"),
    "linear": ("forward: linear layers", "the large matrix products of each layer"),
    "rest": ("forward: norms, activations", "what lies between the matrix products"),
}

_BACKWARD_ROWS = {
    "head": ("backward: output head", "how the last vectors should change"),
    "linear": ("backward: linear layers", "how weights and inputs should change, twice the forward work"),
    "attention": ("backward: attention", "the same for attention"),
    "rest": ("backward: norms, activations", "the same for what lies between"),
    "embedding": ("backward: embedding", "the same for the tokens' vectors"),
    "again": ("backward: computed again", "activations that were not kept, to save memory"),
    "sums": ("gradient sums", "adding up the micro-batches' gradients in float32"),
}

_PHASE_ROWS = {
    "data": ("reading data", "waiting for the next batch, and packing it"),
    "head": ("output head and loss", "a score for every word of the vocabulary, and how wrong it was"),
    "clip": ("gradient norm and clipping", "measuring the gradient, and shortening it if it is too long"),
    "surgery": ("gradient surgery", "comparing the tasks' gradients, and adding up what they agree on"),
    "optimizer": ("optimiser", "from the gradient to new weights"),
    "checkpoint": ("checkpoint", "copying the state, so that a kill costs little"),
    "watch": ("watching", "looking for faults, and writing the step down"),
}

_PHASE_ORDER = ("data", "forward", "head", "backward", "clip", "optimizer", "checkpoint", "watch")


@contextmanager
def profile_steps(
    lm: LanguageModel, config: ProfileConfig, folder: Path, steps: int
) -> Iterator[Callable[[], None] | None]:
    """Profiles some of the steps inside the ``with`` block.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev, or chrome://tracing, neither of which sends it anywhere) and
    ``profile.txt`` into the folder, and logs the latter. While it profiles, it waits for the accelerator after each
    phase, and steps take a little longer.

    Args:
        config: how many steps, at most all that are left.
        folder: made if missing.
        steps: how many steps are left.

    Yields:
        A function to call after each step; None if nothing is profiled.

    Raises:
        UserError: the disk refused.
    """
    if not config.steps:
        yield None
        return
    # Less warm-up where too few steps would be left to profile.
    profile = _Profiler(lm, folder, min(_WARMUP, max(0, steps - config.steps)), config.steps)
    try:
        profile.count_steps(0)
        yield lambda: profile.count_steps(1)
    finally:
        profile.stop()


class _Profiler:
    def __init__(self, lm: LanguageModel, folder: Path, after: int, steps: int) -> None:
        self._lm, self._folder, self._after, self._steps = lm, folder, after, steps
        self._done = 0
        self._running: ExitStack | None = None
        self._kind = lm.device.type
        self._wait: Callable[[], None] = torch.cuda.synchronize if self._kind == "cuda" else lambda: None

    def count_steps(self, count: int) -> None:
        self._done += count
        if self._done == self._after and self._running is None:
            self._start()
        elif self._done == self._after + self._steps:
            self.stop()

    def stop(self) -> None:
        """Stops profiling and writes the trace and the table, once."""
        if self._running is None:
            return
        self._wait()
        took, by_phase = time.perf_counter() - self._began, meter.phase_seconds_since(self._before)
        steps = self._done - self._after
        self._running.close()
        self._running, self._after = None, -1
        if not steps:
            return
        make_folder(self._folder)
        with disk_errors(self._folder / TRACE):
            # Written after the time was taken: a trace may take longer than the steps.
            self._profiler.export_chrome_trace(str(self._folder / TRACE))
        events = self._profiler.events()  # type: ignore[no-untyped-call]
        parts = attribute_time(events, on_accelerator=self._kind == "cuda")
        text = time_table(ProfileSummary(took, by_phase, parts, steps, self._kind))
        write_atomically(self._folder / TABLE, text.encode())
        for line in text.splitlines():
            log.info("  %s", line)
        log.info("  the trace is in %s", self._folder / TRACE)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto would print when it starts and stops
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with ExitStack() as running:
            for module, part in _labelled_modules(self._lm):
                running.enter_context(meter.wrap_calls(module, partial(record_function, PART + part)))
            running.enter_context(
                meter.mark_phases(
                    lambda name: record_function(PHASE + name), self._wait if self._kind == "cuda" else None
                )
            )
            running.enter_context(self._profiler)
            self._running = running.pop_all()
        self._wait()
        self._before, self._began = meter.phase_seconds(), time.perf_counter()


def _labelled_modules(lm: LanguageModel) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules whose time is attributed, and their part; compiled layers are attributed by operation."""
    layers = set(next((module for module in lm.decoder.modules() if isinstance(module, nn.ModuleList)), ()))
    compiled = {inner for layer in layers if layer._compiled_call_impl is not None for inner in layer.modules()}
    for module in lm.decoder.modules():
        if module in compiled:
            continue
        if isinstance(module, nn.Linear):
            yield module, "linear"
        elif isinstance(module, nn.Embedding):
            yield module, "embedding"
        elif type(module).__name__.endswith("Attention"):
            yield module, "attention"
        elif module in layers:
            yield module, "rest"


@dataclass(frozen=True)
class _OperationLabel:
    """The phase and part of an operation; ``part`` is None while unknown."""

    phase: str | None = None
    part: str | None = None
    backward: bool = False


def attribute_time(events: Iterable[Any], *, on_accelerator: bool = False) -> dict[str, dict[str, float]]:
    """Divides the time of the forward and backward phases among the parts of the model.

    A forward operation belongs to the innermost marked module around it; a backward one to the part of its forward
    operation, matched by autograd's sequence number. Forward modules inside the backward pass are ``again``:
    recomputed activations.

    Args:
        events: events of torch's profiler, with ranges named ``phase: NAME`` and ``part: NAME``.
        on_accelerator: count the accelerator's time rather than the host's.

    Returns:
        Shares by part, that add up to 1, of the phases ``forward`` and ``backward``; a phase without time is left out.
    """
    on_host = (event for event in events if not event.is_async and event.device_type.name == "CPU")
    # Outer ranges start first and end last, so that a label is known before those inside it ask for it.
    ordered = sorted(on_host, key=lambda event: (event.time_range.start, -event.time_range.end))
    labels: dict[int, _OperationLabel] = {}
    parts: dict[int, str | None] = {}  # by sequence number; of nested operations the innermost starts last, and wins
    for event in ordered:
        label = _label_operation(event, labels, parts)
        labels[id(event)] = label
        if event.scope != _BACKWARD_SCOPE and event.sequence_nr >= 0 and not event.name.startswith((PHASE, PART)):
            parts[event.sequence_nr] = "head" if label.phase == "head" else _forward_label(event, label)
    seconds: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for event in ordered:
        label = labels[id(event)]
        time_spent = event.self_device_time_total if on_accelerator else event.self_cpu_time_total
        phase = "backward" if label.backward else label.phase
        if phase in seconds and time_spent > 0:
            # What no range covers is recognised by its name, and else counted as the rest, so that shares add up to 1.
            part = label.part or _label_by_name(event.name) or "rest"
            seconds[phase][part] = seconds[phase].get(part, 0.0) + time_spent
    return {
        phase: {part: time_spent / sum(times.values()) for part, time_spent in times.items()}
        for phase, times in seconds.items()
        if times
    }


def _label_operation(
    event: Any, labels: Mapping[int, _OperationLabel], parts: Mapping[int, str | None]
) -> _OperationLabel:
    parent = event.cpu_parent
    outer = labels.get(id(parent), _OperationLabel()) if parent is not None else _OperationLabel()
    name = event.name
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE)
        return _OperationLabel(phase, None, phase == "backward")
    if name.startswith(PART):
        return replace(outer, part="again" if outer.backward else name.removeprefix(PART))
    if name.startswith(_EVALUATE):  # with an accelerator autograd runs in another thread, outside of any phase's range
        if "AccumulateGrad" in name:
            return _OperationLabel("backward", "sums", True)
        node = next((child for child in event.cpu_children if child.scope == _BACKWARD_SCOPE), None)
        part = parts.get(node.sequence_nr) if node is not None else None
        return _OperationLabel("backward", part or _label_by_name(name), True)
    return outer


def _forward_label(event: Any, label: _OperationLabel) -> str | None:
    """Returns the part of a forward operation; a recomputed one is named by its own operation."""
    return _label_by_name(event.name) or "rest" if label.part == "again" else label.part or _label_by_name(event.name)


def _label_by_name(name: str) -> str | None:
    lowered = name.lower()
    return next(
        (part for part, fragments in _NAME_WORDS.items() if any(fragment in lowered for fragment in fragments)), None
    )


@dataclass(frozen=True)
class ProfileSummary:
    """The time of the profiled steps.

    Args:
        seconds: seconds of all steps together.
        phases: seconds of each phase, all steps together.
        parts: shares of the parts in ``forward`` and ``backward``.
        steps: number of steps.
        device: type of the device.
    """

    seconds: float
    phases: Mapping[str, float]
    parts: TimeShares
    steps: int
    device: str


def time_rows(summary: ProfileSummary) -> list[tuple[str, float, str]]:
    """Returns name, share and meaning of everything that took time, in the order of a step; shares add up to 1."""
    rows = list(_iterate_rows(summary))
    # Clock ticks between phases may sum to slightly more than the steps.
    rest = summary.seconds - sum(summary.phases.values())
    rows.append(("everything else", max(0.0, rest), "Python between the phases"))
    total = sum(took for _, took, _ in rows) or 1.0
    return [(name, took / total, meaning) for name, took, meaning in rows if took > 0]


def profile_advice(summary: ProfileSummary) -> list[str]:
    """Returns one line of advice for each phase that takes more than it should."""
    share = {name: part for name, part, _ in time_rows(summary)}

    def share_of(*names: str) -> float:
        return sum(share.get(name, 0.0) for name in names)

    between = share_of("forward: norms, activations", "backward: norms, activations")
    judged = (
        (share_of("reading data"), 0.01, "waiting for data", "raise train.loader.prefetch or train.loader.workers"),
        (share_of("optimiser"), 0.20, "the optimiser", "a larger train.batch_size steps it less often"),
        (
            share_of("backward: computed again"),
            0.15,
            "computing activations again",
            "if memory allows, keep more of them",
        ),
        (between, 0.25, "norms and activations", "train.compile=true fuses them"),
        (share_of("checkpoint"), 0.05, "saving checkpoints", "raise train.checkpoint.every_seconds"),
        (share_of("watching"), 0.02, "watching", "leave out a slow entry of train.sinks"),
        (share_of("everything else"), 0.10, "Python between the phases", "raise train.micro_batch_tokens"),
    )
    return [f"{what}: {part:.0%} of a step; {fix}" for part, limit, what, fix in judged if part > limit]


def time_table(summary: ProfileSummary) -> str:
    """Formats the table and the advice as text."""
    rows = time_rows(summary)
    width = max(len(name) for name, _, _ in rows)
    a_step = summary.seconds / summary.steps
    steps = f"{summary.steps} steps" if summary.steps > 1 else "one step"
    lines = [f"Where the time of a step went ({steps} of {a_step:.3g} s on {summary.device}, profiler included)", ""]
    lines.append(f"{'':{width}}  {'s a step':>8}  share")
    lines += [f"{name:{width}}  {a_step * part:8.4f}  {part:5.1%}  {meaning}" for name, part, meaning in rows]
    lines += ["", *(profile_advice(summary) or ["Nothing takes more than it should."])]
    return "\n".join(lines) + "\n"


def _iterate_rows(summary: ProfileSummary) -> Iterator[tuple[str, float, str]]:
    for phase in (*_PHASE_ORDER, *(name for name in summary.phases if name not in _PHASE_ORDER)):
        took = summary.phases.get(phase, 0.0)
        part_rows = {"forward": _FORWARD_ROWS, "backward": _BACKWARD_ROWS}.get(phase)
        if part_rows is None:
            name, meaning = _PHASE_ROWS.get(phase, (phase, ""))
            yield name, took, meaning
            continue
        parts = summary.parts.get(phase) or {"rest": 1.0}
        for part, (name, meaning) in part_rows.items():
            yield name, took * parts.get(part, 0.0), meaning
