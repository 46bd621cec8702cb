"""Profile a few steps: torch's trace and table of operations, and a table of where the time of a step went."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from posttrain.models.language_model import LanguageModel
from posttrain.store.files import disk_errors, make_folder, write_atomically
from posttrain.train.monitor import meter
from posttrain.train.monitor.config import ProfileConfig

log = logging.getLogger("posttrain")

TRACE, TABLE = "trace.json.gz", "profile.txt"

PHASE = "phase: "
"""Prefix of the profiler ranges that mark a step's phases."""

_REST = "everything else"

# The first steps allocate memory and compile.
_WARMUP = 2

_OPERATIONS = 20  # rows of torch's table

_ADVICE = (
    ("data", 0.01, "raise train.loader.prefetch or train.loader.workers"),
    ("optimizer", 0.20, "a larger train.batch_size steps it less often"),
    ("checkpoint", 0.05, "raise train.checkpoint.every_seconds"),
    ("watch", 0.02, "leave out a slow entry of train.sinks"),
    (_REST, 0.10, "raise train.micro_batch_tokens"),
)
"""Phases that may take too much of a step: from which share on, and what to do."""


@contextmanager
def profile_steps(lm: LanguageModel, config: ProfileConfig, folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Profiles some of the steps inside the ``with`` block.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev, or chrome://tracing, neither of which sends it anywhere) and
    ``profile.txt`` into the folder, and logs the table of phases. While it profiles, it waits for the accelerator after
    each phase, and steps take a little longer.

    Args:
        config: how many steps, at most all that are left.
        folder: made if missing.
        steps: how many steps are left.

    Yields:
        A function to call after each step.

    Raises:
        UserError: the disk refused.
    """
    if not config.steps:
        yield lambda: None
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
        self._folder, self._after, self._steps = folder, after, steps
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
        averages = self._profiler.key_averages()
        calls = sum(event.count for event in averages if _is_call(event, self._kind)) // steps
        text = time_table(ProfileSummary(took, by_phase, steps, self._kind, calls))
        for line in text.splitlines():
            log.info("  %s", line)
        log.info("  the trace is in %s", self._folder / TRACE)
        operations = averages.table(f"self_{self._kind}_time_total", _OPERATIONS)
        write_atomically(self._folder / TABLE, f"{text}\n{operations}".encode())

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto would print when it starts and stops
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with ExitStack() as running:
            wait = self._wait if self._kind == "cuda" else None
            running.enter_context(meter.mark_phases(lambda name: record_function(PHASE + name), wait))
            running.enter_context(self._profiler)
            self._running = running.pop_all()
        self._wait()
        self._before, self._began = meter.phase_seconds(), time.perf_counter()


def _is_call(event: Any, device: str) -> bool:
    """Returns whether a row of the profiler's averages is a kernel, or on a CPU one of torch's operations."""
    if device == "cuda":
        return bool(event.device_type.name == "CUDA" and not event.key.startswith(PHASE))
    return bool(event.key.startswith("aten::"))


@dataclass(frozen=True)
class ProfileSummary:
    """The time of the profiled steps.

    Args:
        seconds: seconds of all steps together.
        phases: seconds of each phase, all steps together.
        steps: number of steps.
        device: type of the device.
        calls: kernels that a step starts on a GPU, or operations of torch on a CPU.
    """

    seconds: float
    phases: Mapping[str, float]
    steps: int
    device: str
    calls: int

    def shares(self) -> dict[str, float]:
        """Returns the share of each phase that took time, in the order of a step, and of what lies between them."""
        names = (*meter.PHASES, *(name for name in self.phases if name not in meter.PHASES))
        seconds = {name: self.phases[name] for name in names if self.phases.get(name)}
        # Clock ticks between phases may sum to slightly more than the steps.
        seconds[_REST] = max(0.0, self.seconds - sum(seconds.values()))
        total = sum(seconds.values()) or 1.0
        return {name: took / total for name, took in seconds.items()}


def time_table(summary: ProfileSummary) -> str:
    """Formats the time by phase as text, with a line of advice for each phase that takes more than it should."""
    shares = summary.shares()
    names = {name: meter.PHASES.get(name, name) for name in shares}
    width, a_step = max(map(len, names.values())), summary.seconds / summary.steps
    steps = f"{summary.steps} steps" if summary.steps > 1 else "one step"
    calls = f"{summary.calls:,} {'kernels' if summary.device == 'cuda' else 'operations'} a step"
    measured = f"{steps} of {a_step:.3g} s on {summary.device}, profiler included; {calls}"
    lines = [f"Where the time of a step went ({measured})", ""]
    lines.append(f"{'':{width}}  {'s a step':>8}  share")
    lines += [f"{names[name]:{width}}  {a_step * share:8.4f}  {share:5.1%}" for name, share in shares.items()]
    slow = [(name, fix) for name, limit, fix in _ADVICE if shares.get(name, 0.0) > limit]
    advice = [f"{names[name]}: {shares[name]:.0%} of a step; {fix}" for name, fix in slow]
    return "\n".join([*lines, "", *(advice or ["Nothing takes more than it should."])]) + "\n"
