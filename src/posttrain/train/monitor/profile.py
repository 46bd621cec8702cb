"""Profile a few steps: torch's trace, in which the phases of a step are marked, and its table of operations."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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

# The first steps allocate memory and compile.
_WARMUP = 2

_OPERATIONS = 20  # rows of torch's table


@contextmanager
def profile_steps(lm: LanguageModel, config: ProfileConfig, folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Profiles some of the steps inside the ``with`` block.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev, or chrome://tracing, neither of which sends it anywhere) and
    ``profile.txt`` into the folder. While it profiles, steps take a little longer.

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
        steps = self._done - self._after
        self._running.close()
        self._running, self._after = None, -1
        if not steps:
            return
        make_folder(self._folder)
        with disk_errors(self._folder / TRACE):
            self._profiler.export_chrome_trace(str(self._folder / TRACE))
        operations = self._profiler.key_averages().table(f"self_{self._kind}_time_total", _OPERATIONS)
        write_atomically(self._folder / TABLE, operations.encode())
        log.info("  the profile is in %s: %s and %s", self._folder, TRACE, TABLE)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto would print when it starts and stops
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with ExitStack() as running:
            running.enter_context(meter.mark_phases(lambda name: record_function(PHASE + name)))
            running.enter_context(self._profiler)
            self._running = running.pop_all()
