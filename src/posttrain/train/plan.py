"""Plans a training: memory, micro-batch, work and time, from the model's config and perhaps the data."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from posttrain.jobs.memory import process_bytes
from posttrain.models.machine_rate import matmul_rate
from posttrain.models.packing import Packed, Unit, micro_batches, pack
from posttrain.models.precision import choose_precision, count_weights
from posttrain.models.shape import read_config
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.encoding import encode, load_encoder
from posttrain.train.data.mix import mix_counts
from posttrain.train.data.record_columns import RecordColumns
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.memory.estimate import MicroBatch, count_step_tasks, estimate_memory
from posttrain.train.memory.token_budget import available_bytes, choose_budget, fits
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.monitor.meter import DecoderSize, training_flops
from posttrain.train.objectives.build import objective_class, record_shape
from posttrain.train.shape import trained_config
from posttrain.train.standalone import TrainJobConfig
from posttrain.train.training_set import ANY_LENGTH, different_answers, require_fitting


@dataclass(frozen=True)
class Machine:
    """The machine to plan for.

    Args:
        device: ``cpu`` or ``cuda``.
        memory: bytes that a training may take; None where nobody knows.
        peak: FLOP/s in matrix products; None where it must be measured.
        mfu: the share of it that training reaches.
    """

    device: str
    memory: int | None
    peak: float | None
    mfu: float

    @classmethod
    def detect(cls, device: str | None, memory: int | None, peak: float | None, mfu: float) -> "Machine":
        """Describes this machine, with the given values instead of measured ones.

        Args:
            memory: bytes.
            peak: TFLOP/s.

        Raises:
            UserError: the device is not here, and what it can do is not given.
        """
        here = "cuda" if torch.cuda.is_available() else "cpu"
        device = device or here
        if device not in ("cpu", "cuda"):
            raise UserError(f"no device `{device}`", where="--device", fix="give cpu or cuda")
        if device == "cuda" and here == "cpu":
            for name, value in (("--device-memory", memory), ("--peak", peak)):
                if value is None:
                    raise UserError("there is no CUDA device here to measure", where=name, fix="say what it has")
        memory = available_bytes(device) if memory is None else memory
        return cls(device, memory, None if peak is None else peak * 1e12, mfu)


@dataclass(frozen=True)
class _StepWork:
    """Average work of a training step.

    Args:
        tokens: a step, without padding.
        flops: a step, without what is computed again.
        recomputed: FLOPs per step that are computed again.
        parts: micro-batches per step.
        steps: steps of the whole training; None where the data are not known.
    """

    tokens: float
    flops: float
    recomputed: float
    parts: float
    steps: int | None


def plan_training(settings: TrainJobConfig, source: str, records: pa.Table | None, machine: Machine) -> dict[str, Any]:
    """Estimates memory, micro-batch and time of a training.

    Args:
        settings: settings of the training.
        source: the model, as ``posttrain.models.sources.locate`` names it.
        records: its data; without them every example is as long as ``train.max_length`` and supervised throughout.
        machine: the machine that it will run on.

    Returns:
        ``memory`` (``recompute`` is the least ``train.recompute`` that fits), ``micro_batch``, ``work``,
        ``parameters``, ``mixes`` (as `mix_counts` gives them) and what they are of, as JSON values; bytes, FLOPs,
        seconds.

    Raises:
        UserError: there is no such model, or the records cannot be used.
    """
    # For an accelerator that is not here, bfloat16: all that are sold for training support it.
    here = torch.cuda.is_available() or machine.device == "cpu"
    precision = choose_precision(count_weights(Path(source))) if here else "bfloat16"
    train = settings.train.with_precision(precision)
    settings = settings.model_copy(update={"train": train})
    config = trained_config(read_config(source), train)
    spec = ModelSpec.from_config(config, train)
    process = process_bytes() if machine.device == "cpu" else 0
    phases, mixes, tasks = _plan_phases(settings, source, records)
    most_tokens = max(phase.longest for phase in phases)
    # As training does it, which does not pack all of its data for every budget.
    options: dict[str, Any] = {"device": machine.device, "process": process, "tasks": tasks}
    auto = choose_budget(spec, train, machine.memory, most_tokens, **options)
    tokens = train.micro_batch_tokens if isinstance(train.micro_batch_tokens, int) else auto.tokens
    batches = [phase.batch(tokens) for phase in phases]
    each = [estimate_memory(spec, train, batch, **options) for batch in batches]
    most = max(range(len(each)), key=lambda number: each[number].total)
    peak_estimate, batch = each[most], batches[most]
    others = {choice: train.model_copy(update={"recompute": choice}) for choice in ("none", "50%", "full")}
    fitting = [
        choice
        for choice, other in others.items()
        if fits(estimate_memory(spec, other, batch, **options), machine.memory)
    ]
    return {
        "model": settings.model,
        "family": spec.shape.family,
        "device": machine.device,
        "precision": train.precision,
        "parameters": {"all": spec.count()} | spec.table(),
        "memory": {
            "total": peak_estimate.total,
            "stage": most if train.phases else None,
            "stages": [item.total for item in each],
            "parts": {name: bytes for name, bytes in peak_estimate.parts.items() if bytes},
            "host": peak_estimate.host,
            "available": machine.memory,
            "fits": fits(peak_estimate, machine.memory),
            "recompute": fitting[0] if fitting else None,
        },
        "micro_batch": {
            "budget": tokens,
            "tokens": batch.tokens,
            "supervised": batch.supervised,
            "auto": auto.tokens if auto.fits else None,
        },
        "mixes": mixes,
        "work": _work_report(
            _mean_work([_step_work(config, train, phase, tokens) for phase in phases]), train, machine
        ),
    }


@dataclass(frozen=True)
class _PhasePlan:
    """One phase of a training, by its data or by the limits in its config.

    Args:
        train: the whole training.
        longest: tokens of the training's longest sequences, or of those that the phase may have.
        steps: None where the data are not known.
        batches: the steps of its first pass over the data; none where the data are not known.
    """

    train: TrainConfig
    longest: int
    steps: int | None
    batches: Sequence[Sequence[Unit]] = ()

    def batch(self, budget: int) -> MicroBatch:
        """Returns the largest micro-batch under a token budget."""
        if not self.batches:
            return MicroBatch.full(budget, self.train, self.longest)
        return MicroBatch.largest(self.packed(budget))

    def packed(self, budget: int) -> Iterator[Packed]:
        """Yields the micro-batches under a token budget; none if the data are unknown."""
        return (pack(part) for step in self.batches for part in micro_batches(step, budget))


def _plan_phases(
    settings: TrainJobConfig, source: str, records: pa.Table | None
) -> tuple[list[_PhasePlan], list[dict[str, Any]], int]:
    """Plans the phases of a training, and counts the categories of their mixes, and the most tasks of a step.

    Of a curriculum's records, all of them from the start.
    """
    train = settings.train
    configs = [phase.model_copy(update={"curriculum": None}) for phase in training_phases(train)]
    if records is None:
        longest_ones = [min(phase.max_length or train.max_length, train.max_length) for phase in configs]
        plans = [_PhasePlan(train, most, phase.steps) for most, phase in zip(longest_ones, configs, strict=True)]
        return plans, [], count_step_tasks(train)
    shape = record_shape(train, records)
    encoder = load_encoder(source, settings.task)
    if shape == "pair":
        records = records.filter(pa.array(different_answers(records)))
    if train.too_long == "drop":
        whole, _ = encode(encoder, records, ANY_LENGTH, shape)
        fits = [max(len(sequence.ids) for sequence in unit) <= train.max_length for unit in whole]
        records = records.filter(pa.array(fits))
        require_fitting(sum(fits), len(fits), train.max_length)
    encoded, _ = encode(encoder, records, train.max_length, shape)
    units = objective_class(train.objective.name).record_units(encoded)
    lengths = longest_lengths(units)
    times = len(units) // len(encoded)
    kinds = {
        name: np.repeat(values, times).tolist()
        for name, values in RecordColumns(records).kinds(train.phases, train.surgery.task_column).items()
    }
    sampler = BatchSampler(
        len(units),
        train.batch_size,
        settings.seed if train.shuffle else None,
        configs,
        kinds=kinds,
        lengths=lengths,
    )
    plans = []
    start = 0
    for position in sampler.phases:
        steps = range(start, start + position.steps)
        # One pass is enough: later epochs have the same records in another order.
        rows_of_steps = [sampler.rows(step) for step in steps if sampler.position(step).epoch == position.epoch]
        batches = [[units[row] for row in rows] for rows in rows_of_steps]
        plans.append(_PhasePlan(train, int(lengths.max()), position.steps, batches))
        start = steps.stop
    return plans, mix_counts(sampler, kinds), count_step_tasks(train, kinds)


def _step_work(config: Any, train: TrainConfig, phase: _PhasePlan, budget: int) -> _StepWork:
    classifier = train.spec.classifier
    decoder = DecoderSize.from_config(config.get_text_config(), classifier=classifier)
    if phase.batches:
        sizes = [
            (packed.tokens, packed.ids.shape[1], packed.pairs, len(packed.targets)) for packed in phase.packed(budget)
        ]
        (tokens, computed, pairs, supervised), passes = np.sum(sizes, axis=0).tolist(), len(phase.batches)
        parts = len(sizes)
    else:
        count = train.batch_size * (2 if train.spec.shape == "pair" else 1)
        tokens = computed = supervised = count * phase.longest
        pairs, passes = tokens * (phase.longest + 1) // 2, 1
        parts = -(-tokens // max(budget, phase.longest))
    frozen = train.method == "lora"
    flops = layers = 0.0
    if decoder is not None:
        networks = train.lora.networks if frozen else 1
        flops, layers = (
            networks * training_flops(decoder, computed, pairs, places, weights_frozen=frozen)
            for places in (supervised, 0)
        )
    # The forward pass is a third of a layer's work, and half of it where its weights have no gradients.
    recomputed = train.recompute_share * layers / (2 if frozen else 3)
    return _StepWork(tokens / passes, flops / passes, recomputed / passes, parts / passes, phase.steps)


def _mean_work(works: Sequence[_StepWork]) -> _StepWork:
    """Averages the steps of all phases; weighs phases equally if the steps of one are unknown."""
    steps = [work.steps for work in works if work.steps is not None]
    weights = steps if len(steps) == len(works) else [1] * len(works)

    def mean(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    return _StepWork(
        mean(work.tokens for work in works),
        mean(work.flops for work in works),
        mean(work.recomputed for work in works),
        mean(work.parts for work in works),
        sum(steps) if len(steps) == len(works) else None,
    )


def _work_report(work: _StepWork, train: TrainConfig, machine: Machine) -> dict[str, Any]:
    dtype = torch.float32 if train.precision == "float32" else torch.bfloat16
    peak = machine.peak or matmul_rate(dtype, machine.device)
    flops = work.flops + work.recomputed
    return {
        "tokens": work.tokens,
        "flops": flops,
        "recomputed_flops": work.recomputed,
        "micro_batches": work.parts,
        "steps": work.steps,
        "peak": peak,
        "mfu": machine.mfu,
        "seconds": flops / (peak * machine.mfu),
    }
