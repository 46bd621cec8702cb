"""Estimates the peak memory of a training: its parameters by count, its activations by the probe.

The peak is at the beginning of the backward pass, when all activations are there and the head or the last layer works.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from posttrain.models.head import vocabulary_chunk
from posttrain.models.packing import Packed
from posttrain.train.config import TrainConfig
from posttrain.train.memory.probe import activation_cost
from posttrain.train.memory.recompute import recomputed_layers
from posttrain.train.memory.weights import (
    ModelSpec,
    master_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    snapshot_bytes,
)

_LIBRARY_BYTES = 60 * 2**20  # code, threads and buffers of matrix products that come with the first of them

_DISTILLED_LOGITS = 2**23  # that a distillation works on at once

_WORKING = 0.25
"""Gradients within a layer, as a share of its activations: a feed-forward block's product and its two factors."""

_HEAP = 0.25
"""Memory that a CPU's allocator holds beside the activations, as a share of them (benchmarks/memory_estimate.py)."""


@dataclass(frozen=True)
class MicroBatch:
    """The size of a micro-batch, as far as memory depends on it.

    Args:
        tokens: tokens in its row, or in its padded rows.
        supervised: places whose next token is supervised.
        longest: tokens of the longest sequence.
    """

    tokens: int
    supervised: int
    longest: int

    @classmethod
    def full(cls, budget: int, config: TrainConfig, longest: int | None = None) -> Self:
        """Returns the largest micro-batch of a token budget: the longest sequences, all tokens supervised.

        Args:
            budget: tokens.
            config: limits the length and the number of sequences.
            longest: tokens of the longest sequence where that is known.
        """
        # Records are cut to `max_length`, so none is longer.
        length = min(longest or config.max_length, config.max_length)
        unit = length * (2 if config.spec.shape == "pair" else 1)
        tokens = max(unit, min(budget, unit * config.batch_size))
        return cls(tokens, tokens, length)

    @classmethod
    def largest(cls, packed: Iterable[Packed]) -> Self:
        """Returns the largest of several packed micro-batches, by each size."""
        sizes = []
        for row in packed:
            queries = sum(group.queries.numel() for group in row.plan.groups)
            # Where rows are padded, linear layers are given the padding too.
            tokens = queries if row.padded else row.ids.shape[1]
            longest = max(group.queries.shape[1] + group.before.shape[1] for group in row.plan.groups)
            sizes.append((tokens, len(row.targets), longest))
        return cls(*(max(values) for values in zip(*sizes, strict=True)))


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that a training takes.

    Args:
        parts: bytes on its device at the peak, by purpose.
        host: bytes in the host's memory, where training runs on an accelerator.
    """

    parts: Mapping[str, int]
    host: int

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return sum(self.parts.values())


def count_step_tasks(config: TrainConfig, kinds: Mapping[str, Sequence[str]] | None = None) -> int:
    """Returns the most tasks in a step whose gradients surgery keeps apart; 1 without it.

    Args:
        kinds: each record's kind, by column; None where the data are not known, of which two tasks are assumed.
    """
    column = config.surgery.task_column
    if column is None:
        return 1
    return 2 if kinds is None else min(len(set(kinds[column])), config.batch_size)


def estimate_memory(
    spec: ModelSpec, config: TrainConfig, batch: MicroBatch, *, device: str = "cpu", process: int = 0, tasks: int = 1
) -> MemoryEstimate:
    """Estimates the memory of a training.

    Args:
        spec: the model.
        config: settings of its training.
        batch: the largest micro-batch.
        device: ``cpu`` or ``cuda``.
        process: bytes of this process with its libraries and without a model (`process_bytes`).
        tasks: most tasks of a step (`count_step_tasks`), each of which has gradient sums of its own.

    Raises:
        UserError: nothing is known of models of this family.
    """
    on_cpu = device == "cpu"
    trained = spec.count(trained=True)
    kept = {
        "float32 masters": master_bytes(spec, config),
        "gradient sums": 4 * trained * tasks,
        "optimiser state": optimizer_state_bytes(spec, config.optimizer),
    }
    snapshot, host = snapshot_bytes(spec, config), 0
    if not on_cpu:
        host = process + snapshot
        if config.optimizer.offload:
            # Masters of adapters and float32 weights are copies there too, and each gradient lands beside its sum.
            host += (
                sum(kept.values()) + 4 * trained - kept["float32 masters"] + parameter_bytes(spec, config, trained=True)
            )
            kept = dict.fromkeys(kept, 0)
    activations, working = _activation_bytes(spec, config, batch, device)
    parts = {
        "parameters": parameter_bytes(spec, config),
        **kept,
        "checkpoint copy": snapshot if on_cpu else 0,
        "activations": activations,
        "working memory": working,
        "process": process + _LIBRARY_BYTES if on_cpu else 0,
    }
    return MemoryEstimate(parts, host)


def _activation_bytes(spec: ModelSpec, config: TrainConfig, batch: MicroBatch, device: str) -> tuple[int, int]:
    """Returns the activations, and what the backward pass works with beside them."""
    cost = activation_cost(spec.config, config, batch.longest, device)
    again = recomputed_layers(config, spec.shape.layers)
    number = 4 if config.dtype == "float32" else 2  # bytes
    hidden, vocabulary = spec.shape.hidden, spec.shape.vocabulary
    a_token = cost.rest + (spec.shape.layers - again) * cost.layer + again * cost.stream
    activations = batch.tokens * a_token + batch.supervised * number * hidden
    if config.precision == "autocast":
        activations += 2 * sum(weight.count for weight in spec.weights if weight.kind == "matrix")
    # The head's gradient is whole once; where it is the embedding too, it waits for that one to the very end.
    weight = number * vocabulary * hidden if config.method == "full" else 0
    head = weight + _logit_bytes(config, batch, vocabulary, device) + batch.supervised * (4 + number) * hidden
    layer = batch.tokens * cost.layer * (_WORKING + (1 if again else 0))
    working = max(head, (weight if spec.shape.tied else 0) + layer)
    if device == "cpu":
        # Of a layer that is computed again only the input stays, between holes that the next layer does not fit into.
        working += _HEAP * (activations + batch.tokens * again * cost.layer / 2)
    return int(activations), int(working)


def _logit_bytes(config: TrainConfig, batch: MicroBatch, vocabulary: int, device: str) -> int:
    """Estimates the working memory of the head: chunks of logits and their gradients, the previous ones included."""
    if config.spec.classifier:
        return 0
    if config.spec.output == "logits":
        # Eight float32 numbers a logit: of the student and the teacher, their log-probabilities and the divergence.
        return 4 * 8 * min(_DISTILLED_LOGITS, batch.supervised * vocabulary)
    chunk = min(vocabulary_chunk(batch.supervised, device), vocabulary)
    return batch.supervised * (chunk * (8 if config.precision == "float32" else 14) + 16)
