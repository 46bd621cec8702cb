"""How much of the machine a training uses: its work in FLOPs against a measured peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from posttrain.train.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    import torch

_SECONDS = 1.0
_BLOCK = 0.05
# Larger products come closer to the peak until a cache is full; small ones first, so that a slow machine stops early.
_SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
# Feed-forward blocks of two matrices; all others that are known here have a gate and so three.
_WITHOUT_GATE = {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "opt", "phi", "starcoder2"}


@cache
def matmul_peak(device: str, dtype: torch.dtype) -> float:
    """The most FLOP/s that square matrix products reach here with the threads torch uses now.

    The best of several sizes and of several blocks of a twentieth of a second, which is long enough to leave out what
    no machine keeps up; all within a second or so, once a process. Work beside it makes the peak look smaller.

    Args:
        device: as torch names it, such as ``cpu`` or ``cuda:0``.
        dtype: of the factors and the product.
    """
    import torch

    kind = torch.device(device).type
    wait: Callable[[], None] = torch.cuda.synchronize if kind == "cuda" else lambda: None

    def seconds(count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right)
        wait()
        return time.perf_counter() - start

    best = 0.0
    end = time.perf_counter() + _SECONDS
    sizes = _SIZES.get(kind, _SIZES["cpu"])
    for position, size in enumerate(sizes):
        work = 2.0 * size**3
        now = time.perf_counter()
        if best and now + 3 * work / best > end:
            break
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        until = now + (end - now) / (len(sizes) - position)
        seconds(1)  # the first call pays for what later ones find ready
        count = max(1, round(_BLOCK / seconds(1)))
        while True:
            best = max(best, count * work / seconds(count))
            if time.perf_counter() >= until:
                break
    return best


@dataclass(frozen=True)
class Decoder:
    """What the work of a dense decoder-only transformer depends on.

    Attributes:
        matrices: weights of all matrix products of the decoder layers: attention projections and feed-forward.
        head: weights of the output head, hidden size times vocabulary, tied or not, or times a classifier's labels.
        attention: layers times heads times head size.
    """

    matrices: int
    head: int
    attention: int

    @classmethod
    def of(cls, config: Any, objective: str = "sft") -> Self | None:
        """From a transformers config; None for a model whose work is not known here, such as a mixture of experts."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if any(not isinstance(getattr(config, name, None), int) for name in names):
            return None
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        size = getattr(config, "head_dim", None) or hidden // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        projections = 2 * hidden * size * (heads + shared)  # queries and output; keys and values
        forward = (2 if config.model_type in _WITHOUT_GATE else 3) * hidden * inner
        classifier = OBJECTIVES[objective].output in ("reward", "classes")
        outputs = config.num_labels if classifier else config.vocab_size
        return cls(layers * (projections + forward), hidden * outputs, layers * heads * size)


def training_flops(
    decoder: Decoder, tokens: int, pairs: int, supervised_tokens: int, *, weights_frozen: bool = False
) -> float:
    """FLOPs that one forward and backward pass over some rows needs.

    A weight of a matrix product costs 2 FLOPs a token forward and 4 backward, 2 for the input's gradient and 2 for the
    weight's (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention costs 12 FLOPs a pair of tokens, layer and
    channel: two products, forward and twice backward (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), and only
    pairs that causality lets through are counted, ``n (n + 1) / 2`` of a sequence by itself. So, with T tokens::

        6 T matrices + 12 attention pairs + 6 supervised_tokens head

    Padding, what sequences share but for once, logits where nothing is supervised, recomputed activations, norms,
    embeddings and the optimiser do not count, so that work which need not be done does not look like speed.

    Args:
        tokens: of all rows, without padding.
        pairs: of a token and one that it sees, itself included.
        supervised_tokens: positions at which the output head is needed.
        weights_frozen: adapters alone are trained: no gradient of the weights, 4 instead of 6. Theirs are left out.
    """
    passes = 4 if weights_frozen else 6
    linear = passes * (tokens * decoder.matrices + supervised_tokens * decoder.head)
    return float(linear + 12 * decoder.attention * pairs)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOP utilisation: the share of ``peak`` (FLOP/s) that ``flops`` of work in ``seconds`` makes."""
    return flops / (seconds * peak)
