"""What a training will take of a machine: memory, work and time, from the model's config and perhaps the data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from posttrain.models.packing import Unit, micro_batches, pack
from posttrain.models.shape import read_chat, read_config
from posttrain.store.errors import UserError
from posttrain.train.alone import AloneConfig
from posttrain.train.config import TrainConfig
from posttrain.train.examples import Encoder, encode
from posttrain.train.memory.available import available_bytes, process_bytes
from posttrain.train.memory.batch import MicroBatch, largest
from posttrain.train.memory.budget import choose_budget, fits
from posttrain.train.memory.estimate import Estimate, estimate
from posttrain.train.memory.weights import Blueprint
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.passes import epoch_order
from posttrain.train.watch.throughput import Decoder, matmul_peak, training_flops


@dataclass(frozen=True)
class Machine:
    """Where training is to run.

    Args:
        device: ``cpu`` or ``cuda``.
        memory: bytes that a training may take; None where nobody knows.
        peak: FLOP/s in matrix products; None where it is to be measured.
        mfu: the share of it that training reaches.
    """

    device: str
    memory: int | None
    peak: float | None
    mfu: float

    @classmethod
    def of(cls, device: str | None, memory: int | None, peak: float | None, mfu: float) -> "Machine":
        """This machine, but for what is given.

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
            for name, given in (("--device-memory", memory), ("--peak", peak)):
                if given is None:
                    raise UserError("there is no CUDA device here to measure", where=name, fix="say what it has")
        memory = available_bytes(device) if memory is None else memory
        return cls(device, memory, None if peak is None else peak * 1e12, mfu)


@dataclass(frozen=True)
class _Work:
    """A training's work on average.

    Args:
        tokens: a step, without padding.
        flops: a step, without what is computed again.
        parts: micro-batches a step.
        steps: of the whole training; None where the data are not known.
    """

    tokens: float
    flops: float
    parts: float
    steps: int | None


def forecast(settings: AloneConfig, source: str, records: pa.Table | None, machine: Machine) -> dict[str, Any]:
    """What a training takes.

    Args:
        settings: of the training.
        source: of the model, as ``posttrain.models.sources.locate`` names it.
        records: its data; without them every example is as long as ``train.max_length`` and supervised throughout.
        machine: where it is to run.

    Returns:
        ``memory``, ``micro_batch``, ``work``, ``parameters`` and what they are of, as JSON values; bytes, FLOPs,
        seconds.

    Raises:
        UserError: there is no such model, or the records cannot be used.
    """
    config, train = read_config(source), settings.train
    blueprint = Blueprint.of(config, train)
    process = process_bytes() if machine.device == "cpu" else 0
    units = None
    if records is not None:
        shape = OBJECTIVES[train.objective].shape
        units, _ = encode(Encoder(read_chat(source, config), settings.task), records, train.max_length, shape)
    batch = _batches(units, train, settings.seed)
    auto = choose_budget(blueprint, train, machine.memory, device=machine.device, process=process, batch=batch)
    tokens = train.micro_batch_tokens if isinstance(train.micro_batch_tokens, int) else auto.tokens
    found = estimate(blueprint, train, batch(tokens), device=machine.device, process=process)
    return {
        "model": settings.model,
        "family": blueprint.shape.family,
        "device": machine.device,
        "parameters": {"all": blueprint.count()} | blueprint.table(),
        "memory": {
            "total": found.total,
            "phase": found.peak,
            "parts": {name: bytes for name, bytes in found.parts.items() if bytes},
            "phases": found.phases,
            "host": found.host,
            "available": machine.memory,
            "fits": fits(found, machine.memory),
        },
        "micro_batch": {
            "budget": tokens,
            "tokens": batch(tokens).tokens,
            "supervised": batch(tokens).supervised,
            "auto": auto.tokens if auto.fits else None,
        },
        "work": _time(_work(config, train, units, settings.seed, tokens), found, train, machine),
    }


def _batches(units: Sequence[Unit] | None, config: TrainConfig, seed: int) -> Callable[[int], MicroBatch]:
    """The largest micro-batch of the first pass over the data, by token budget."""
    if units is None:
        return lambda budget: MicroBatch.full(budget, config)
    known: dict[int, MicroBatch] = {}

    def of(budget: int) -> MicroBatch:
        if budget not in known:
            steps = _steps(units, config, seed)
            parts = (part for step in steps for part in micro_batches(step, budget))
            known[budget] = largest(MicroBatch.of(pack(part)) for part in parts)
        return known[budget]

    return of


def _steps(units: Sequence[Unit], config: TrainConfig, seed: int) -> Iterator[list[Unit]]:
    for rows in epoch_order(len(units), config.batch_size, seed if config.shuffle else None, 0):
        yield [units[row] for row in rows]


def _work(config: Any, train: TrainConfig, units: Sequence[Unit] | None, seed: int, budget: int) -> _Work:
    decoder = Decoder.of(config.get_text_config())
    frozen = train.method == "lora"
    if units is None:
        count = train.batch_size * (2 if OBJECTIVES[train.objective].shape == "pair" else 1)
        lengths, supervised, steps, passes = [train.max_length] * count, train.max_length * count, None, 1
        parts = float(-(-sum(lengths) // max(budget, train.max_length)))
    else:
        every = list(_steps(units, train, seed))
        lengths = [len(sequence.ids) for unit in units for sequence in unit]
        supervised = sum(sum(sequence.supervised[1:]) for unit in units for sequence in unit)
        steps, passes = len(every) * train.epochs, len(every)
        parts = sum(len(list(micro_batches(step, budget))) for step in every) / passes
    flops = 0.0 if decoder is None else training_flops(decoder, lengths, supervised, weights_frozen=frozen)
    return _Work(sum(lengths) / passes, flops / passes, parts, steps)


def _time(work: _Work, found: Estimate, train: TrainConfig, machine: Machine) -> dict[str, Any]:
    dtype = torch.float32 if train.precision == "float32" else torch.bfloat16
    peak = machine.peak or matmul_peak(machine.device, dtype)
    flops = work.flops + work.parts * found.recomputed
    return {
        "tokens": work.tokens,
        "flops": flops,
        "recomputed_flops": work.parts * found.recomputed,
        "micro_batches": work.parts,
        "steps": work.steps,
        "peak": peak,
        "mfu": machine.mfu,
        "seconds": flops / (peak * machine.mfu),
    }
