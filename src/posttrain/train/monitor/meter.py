"""Measure each step: seconds by phase, tokens per second, memory and model FLOP utilisation (MFU)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from posttrain.jobs.memory import peak_bytes
from posttrain.models.machine_rate import matmul_rate, raise_matmul_rate

# No torch at import: the web report reads phase names and step files without it.
if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel
    from posttrain.train.data.loader import BatchLengths

log = logging.getLogger("posttrain")

PHASES = {
    "data": "reading data",
    "forward": "forward",
    "head": "output head and loss",
    "backward": "backward",
    "surgery": "gradient surgery",
    "clip": "gradient norm and clipping",
    "optimizer": "optimiser",
    "checkpoint": "checkpoint",
    "watch": "watching",
}
"""The phases of a training step, in order, with their names for people."""

PhaseMark = Callable[[str], AbstractContextManager[object]]

# Model types whose feed-forward blocks have two matrices; the gated blocks of all others have three.
_WITHOUT_GATE = {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "opt", "phi", "starcoder2"}


class StepMeter:
    """Measures one step after another, each from `start` on.

    Args:
        precision: ``train.precision``, which decides the peak that MFU is a share of.
        classifier: whether the head predicts labels rather than tokens.
        weights_frozen: whether only adapters are trained.
    """

    def __init__(self, lm: LanguageModel, precision: str, *, classifier: bool, weights_frozen: bool) -> None:
        import torch

        # The device's memory is what runs out where there is one.
        self._peak_memory = torch.cuda.max_memory_allocated if torch.cuda.is_available() else peak_bytes
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        # A CPU without bfloat16 instructions multiplies it a hundred times slower than float32, and the other work of a
        # step would exceed that peak: a share of the machine is a share of its faster precision.
        dtypes = {dtype, torch.float32} if lm.device.type == "cpu" else {dtype}
        self._peak = max(matmul_rate(dtype, str(lm.device)) for dtype in dtypes)
        self._dtype, self._device, self._raised = dtype, str(lm.device), False
        self._decoder = DecoderSize.from_config(lm.model.config.get_text_config(), classifier=classifier)
        self._frozen = weights_frozen
        self.start()

    def start(self) -> None:
        """Starts the clock of a step."""
        self._began, self._phases = time.perf_counter(), phase_seconds()

    def read(self, lengths: BatchLengths, supervised: int, waited: float, rate: float) -> dict[str, Any]:
        """Reads the measured fields of `StepValues` for the step that started last.

        Args:
            lengths: the amount of work.
            supervised: supervised tokens.
            waited: seconds of waiting for data.
            rate: megabytes per second of the loader.
        """
        seconds, tokens = time.perf_counter() - self._began, sum(lengths.sequences)
        share = None
        if self._decoder is not None:
            flops = training_flops(
                self._decoder, lengths.computed, lengths.pairs, supervised, weights_frozen=self._frozen
            )
            share = mfu(flops, seconds, self._peak)
            if share > 1:
                self._raise_peak(flops / seconds)
                share = 1.0
        return {
            "tokens": tokens,
            "supervised_tokens": supervised,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "memory_bytes": self._peak_memory(),
            "data_wait": waited / seconds,
            "data_rate": rate,
            "mfu": share,
            "phases": phase_seconds_since(self._phases),
        }

    def _raise_peak(self, flops: float) -> None:
        # Other work on the machine had slowed the products down while they were measured.
        if not self._raised:
            log.info(
                "  the peak is %.3g TFLOP/s, not %.3g as measured: a step was faster", flops / 1e12, self._peak / 1e12
            )
        self._raised, self._peak = True, flops
        raise_matmul_rate(flops, self._dtype, self._device)


class _PhaseClock(threading.local):
    """Seconds by phase, per thread: a checkpoint written in the background does not count as training."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inner: list[float] = []  # for each open phase, the seconds of the phases inside it
        self.mark: PhaseMark = nullcontext


_phase_clock = _PhaseClock()


# A class, as a generator-based context manager costs twice as much, and a step opens dozens.
class phase:
    """Adds the time of a ``with`` block to a phase, without the time of phases inside it.

    About two microseconds each. An accelerator works on after the block.
    """

    __slots__ = ("_mark", "_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._mark = _phase_clock.mark(self._name)
        self._mark.__enter__()
        _phase_clock.inner.append(0.0)
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        took = time.perf_counter() - self._start
        within = _phase_clock.inner.pop()
        _phase_clock.seconds[self._name] = _phase_clock.seconds.get(self._name, 0.0) + took - within
        # The outer phase leaves this one's time out, so that the phases of a step add up to it.
        if _phase_clock.inner:
            _phase_clock.inner[-1] += took
        self._mark.__exit__(kind, error, at)


def phase_seconds() -> dict[str, float]:
    """Returns the seconds of each phase in this thread so far."""
    return dict(_phase_clock.seconds)


def phase_seconds_since(before: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each phase since ``before``, an earlier `phase_seconds`, without empty phases."""
    passed = {name: total - before.get(name, 0.0) for name, total in _phase_clock.seconds.items()}
    return {name: took for name, took in passed.items() if took > 0}


@contextmanager
def wrap_calls(module: Any, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Runs every call of a torch module inside a context from ``make``, such as ``phase("forward")``."""
    opened: list[AbstractContextManager[object]] = []

    def enter(*arguments: object) -> None:
        # A stack, as a decoder that is checkpointed calls itself inside its own backward pass.
        opened.append(make())
        opened[-1].__enter__()

    def leave(*arguments: object) -> None:
        opened.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def mark_phases(mark: PhaseMark) -> Iterator[None]:
    """Opens ``mark(name)`` around every phase of this thread, as a profiler does."""
    before = _phase_clock.mark
    _phase_clock.mark = mark
    try:
        yield
    finally:
        _phase_clock.mark = before


@dataclass(frozen=True)
class DecoderSize:
    """The sizes that decide the FLOPs of a dense decoder-only transformer.

    Attributes:
        matrices: weights of all matrix products of the decoder layers: attention projections and feed-forward.
        head: weights of the output head, hidden size times vocabulary, tied or not, or times a classifier's labels.
        attention: layers times heads times head size.
    """

    matrices: int
    head: int
    attention: int

    @classmethod
    def from_config(cls, config: Any, *, classifier: bool = False) -> Self | None:
        """Reads a transformers config; None for a model of unknown work, such as a mixture of experts."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if any(not isinstance(getattr(config, name, None), int) for name in names):
            return None
        # The work of a mixture depends on the routing, which no config states.
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        size = getattr(config, "head_dim", None) or hidden // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        projections = 2 * hidden * size * (heads + shared)  # queries and output; keys and values
        forward = (2 if config.model_type in _WITHOUT_GATE else 3) * hidden * inner
        outputs = config.num_labels if classifier else config.vocab_size
        return cls(layers * (projections + forward), hidden * outputs, layers * heads * size)


def training_flops(
    decoder: DecoderSize, tokens: int, pairs: int, supervised_tokens: int, *, weights_frozen: bool = False
) -> float:
    """Counts the FLOPs of one forward and backward pass.

    A weight of a matrix product costs 2 FLOPs per token forward and 4 backward, 2 for the input's gradient and 2 for
    the weight's (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention costs 12 FLOPs per pair of tokens,
    layer and channel: two products, forward and twice backward (Chowdhery et al. 2022, arXiv:2204.02311, appendix B),
    and only pairs that causality lets through are counted, ``n (n + 1) / 2`` of a sequence by itself.
    With T tokens::

        6 T matrices + 12 attention pairs + 6 supervised_tokens head

    Padding, what sequences share but for once, logits where nothing is supervised, recomputed activations, norms,
    embeddings and the optimiser do not count, so that work which need not be done does not look like speed.

    Args:
        tokens: tokens of all rows, without padding.
        pairs: pairs of a token and one that it sees, itself included.
        supervised_tokens: positions at which the output head is needed.
        weights_frozen: adapters alone are trained: no gradient of the weights, 4 instead of 6. Theirs are left out.
    """
    passes = 4 if weights_frozen else 6
    linear = passes * (tokens * decoder.matrices + supervised_tokens * decoder.head)
    return float(linear + 12 * decoder.attention * pairs)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Returns the model FLOP utilisation: the share of ``peak`` (FLOP/s) that ``flops`` in ``seconds`` use."""
    return flops / (seconds * peak)
