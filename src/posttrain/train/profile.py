"""A close look at a few steps: a trace of every operation, and a table of where the time went in plain words."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import record_function

from posttrain.models.language_model import LanguageModel
from posttrain.store.files import make_folder, write_atomically, writing
from posttrain.train.watch import phases
from posttrain.train.watch.attribution import PART, PHASE, parts_of_phases
from posttrain.train.watch.config import ProfileConfig
from posttrain.train.watch.where import Where, table

log = logging.getLogger("posttrain")

TRACE, TABLE = "trace.json.gz", "profile.txt"


@contextmanager
def profiled(lm: LanguageModel, config: ProfileConfig, folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Look closely at some of the steps within.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev, or chrome://tracing, neither of which sends it anywhere) and
    ``profile.txt`` into the folder, and logs the latter. While it looks, it waits for the accelerator after each
    phase, and steps take a little longer.

    Args:
        config: how many steps; where fewer are to come, as many as there are.
        folder: made if missing.
        steps: how many are to come.

    Yields:
        A function to be called after each step.

    Raises:
        UserError: the disk refused.
    """
    if not config.steps:
        yield lambda: None
        return
    profile = _Profile(lm, folder, min(config.after, max(0, steps - config.steps)), config.steps)
    try:
        profile.step_over(0)
        yield lambda: profile.step_over(1)
    finally:
        profile.stop()


class _Profile:
    def __init__(self, lm: LanguageModel, folder: Path, after: int, steps: int) -> None:
        self._lm, self._folder, self._after, self._steps = lm, folder, after, steps
        self._done = 0
        self._running: ExitStack | None = None
        self._kind = lm.device.type
        self._wait: Callable[[], None] = torch.cuda.synchronize if self._kind == "cuda" else lambda: None

    def step_over(self, count: int) -> None:
        self._done += count
        if self._done == self._after and self._running is None:
            self._start()
        elif self._done == self._after + self._steps:
            self.stop()

    def stop(self) -> None:
        """Write what there is, once."""
        if self._running is None:
            return
        self._wait()
        took, by_phase = time.perf_counter() - self._began, phases.since(self._before)
        steps = self._done - self._after
        self._running.close()
        self._running, self._after = None, -1
        if not steps:
            return
        make_folder(self._folder)
        with writing(self._folder / TRACE):
            self._profiler.export_chrome_trace(str(self._folder / TRACE))
        events = self._profiler.events()  # type: ignore[no-untyped-call]
        parts = parts_of_phases(events, on_accelerator=self._kind == "cuda")
        text = table(Where(took, by_phase, parts, steps, self._kind))
        write_atomically(self._folder / TABLE, text.encode())
        for line in text.splitlines():
            log.info("  %s", line)
        log.info("  the trace is in %s", self._folder / TRACE)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts and stops
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with ExitStack() as running:
            for module, part in _parts(self._lm):
                running.enter_context(phases.around_calls(module, partial(record_function, PART + part)))
            running.enter_context(
                phases.marked(lambda name: record_function(PHASE + name), self._wait if self._kind == "cuda" else None)
            )
            running.enter_context(self._profiler)
            self._running = running.pop_all()
        self._wait()
        self._before, self._began = phases.seconds(), time.perf_counter()


def _parts(lm: LanguageModel) -> Iterator[tuple[nn.Module, str]]:
    """The modules whose work is told apart, and what it is; what a compiled layer does inside is told by operation."""
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
