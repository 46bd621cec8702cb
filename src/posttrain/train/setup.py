"""Sets a training up: the model's context managers, the batch sampler, the state, the loader and recovery."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from posttrain.models.fused import fuse_layers
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import packed_attention
from posttrain.parallel.mesh import Mesh
from posttrain.store.files import make_folder
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import curriculum_difficulty
from posttrain.train.data.loader import BatchLoader, BatchSource
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import first_pass_groups
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.recompute import compile_layers, recompute
from posttrain.train.monitor.decisions import LOWER_RATE_FACTOR
from posttrain.train.monitor.detectors import EarlyLimit
from posttrain.train.monitor.meter import StepMeter, phase, wrap_calls
from posttrain.train.monitor.metrics import Sink
from posttrain.train.monitor.monitor import Monitor
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.reference import initial_losses
from posttrain.train.objectives.registry import objective_spec
from posttrain.train.optim.ema import Ema
from posttrain.train.optim.gradient_surgery import GradientSurgery
from posttrain.train.optim.loss_scale import LossScale
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.optim.schedule import scheduled_lr
from posttrain.train.rank_gates import RankGates
from posttrain.train.recovery import Recovery, read_recovery_log
from posttrain.train.regularization.layers import apply_noise
from posttrain.train.state import Interventions, TrainingState
from posttrain.train.supernet import Supernet

log = logging.getLogger("posttrain")


@dataclass
class TrainingParts:
    """The parts of a running training.

    Args:
        state: everything that the next step depends on.
        batches: its batches.
        learning_rate: returns the scheduled learning rate of a step.
        checkpoints: checkpoints in its folder.
        recovery: saves, resumes and rolls back.
        meter: measures its steps.
        surgery: combines the gradients of several tasks; None without `train.surgery`, or where all are of one task.
        supernet: the sub-networks of the adapter; None unless `train.lora.supernet` has ranks.
    """

    state: TrainingState
    batches: BatchSource
    learning_rate: Callable[[int], float]
    checkpoints: Checkpoints
    recovery: Recovery
    meter: StepMeter
    surgery: GradientSurgery | None
    supernet: Supernet | None


@contextmanager
def set_up_training(
    lm: LanguageModel,
    objective: Objective,
    config: TrainConfig,
    mesh: Mesh,
    *,
    seed: int,
    scratch: Path,
    sink: Sink | None,
    kinds: Mapping[str, Sequence[str]] | None,
    difficulties: np.ndarray | None,
) -> Iterator[TrainingParts]:
    """Prepares model and objective, and resumes from the newest checkpoint; restores the model at the end.

    Args:
        mesh: the processes that train together.
        seed: seed of the order of the data and of dropout.
        scratch: folder of everything that a training resumes from.
        sink: receives the values of each step.
        kinds: each unit's kind, by the column that a phase mixes by or that names its task.
        difficulties: float [units], for a curriculum by a column.

    Raises:
        UserError: config and data do not fit, or the folder holds another training.
    """
    make_folder(scratch)
    recovery_log = read_recovery_log(scratch)
    budget = recovery_log.limit_tokens(config.token_budget)
    step_meter = StepMeter(
        lm,
        config.precision,
        classifier=objective_spec(config.objective).output in ("reward", "classes"),
        weights_frozen=config.method == "lora",
    )
    # Before any module is attached: a reward head draws its weights from this seed.
    torch.manual_seed(seed)
    # Attention that sees only a window is equal to full attention up to a length: the data decide.
    longest = int(longest_lengths(objective.units).max())
    with ExitStack() as stack:
        stack.enter_context(objective.attach_modules(lm))
        stack.enter_context(fuse_layers(lm, compiled=config.compile))
        # Models that cannot be packed are trained padded: slower, and with the same result.
        padded = not stack.enter_context(packed_attention(lm, longest))
        # What objectives compute before the training must not be drawn through dropout.
        stack.enter_context(_training_mode(lm, training=False))
        sampler = _build_sampler(lm, objective, config, seed, scratch, kinds, difficulties, padded=padded)
        tasks, task_names = _number_tasks(config, kinds)
        with autocast(lm, config)():
            # A reference model runs over the very micro-batches of the training, so that rounding is the same in both.
            groups = first_pass_groups(objective.units, sampler, budget, tasks)
            objective.prepare(lm, scratch, padded=padded, groups=groups)
        # Master weights copy the weights: whatever changes them has to come before, and what noises them after.
        checkpoints = Checkpoints(scratch / "checkpoints", config.checkpoint)
        state = _initial_state(lm, config, sampler, seed, can_go_back=lambda: bool(checkpoints.steps()))
        surgery = None if tasks is None else GradientSurgery(state.masters, config.surgery, seed, task_names)
        is_supernet = config.method == "lora" and bool(config.lora.supernet.ranks)
        supernet = Supernet(lm.model, config.lora, seed) if is_supernet else None
        # Hooks that stay behind would add to gradients that nobody reads.
        stack.callback(state.masters.close)
        for context in _training_contexts(lm, config, state, MicroBatch.full(budget, config, longest)):
            stack.enter_context(context)
        if config.compile:
            # After all hooks are set: the compiler would trace again for each.
            compile_layers(lm)
        stack.enter_context(checkpoints)
        recovery = Recovery(state, recovery_log, checkpoints, scratch, LOWER_RATE_FACTOR, sink)
        # After everything that sets the model up, and before the loader, which reads what a curriculum has observed.
        recovery.resume()
        loader = BatchLoader(
            objective.units,
            sampler,
            budget,
            device=lm.device,
            padded=padded,
            tasks=tasks,
            config=config.loader,
            mesh=mesh,
        )
        stack.enter_context(loader)
        rate = partial(_learning_rate, config, sampler)
        yield TrainingParts(state, loader, rate, checkpoints, recovery, step_meter, surgery, supernet)


def autocast(lm: LanguageModel, config: TrainConfig) -> Callable[[], AbstractContextManager[object]]:
    """Returns the context that forward passes run in: bfloat16 under precision ``autocast``, else none."""
    if config.precision == "autocast":
        return partial(torch.autocast, lm.device.type, torch.bfloat16)
    return nullcontext


def _build_sampler(
    lm: LanguageModel,
    objective: Objective,
    config: TrainConfig,
    seed: int,
    scratch: Path,
    kinds: Mapping[str, Sequence[str]] | None,
    difficulties: np.ndarray | None,
    *,
    padded: bool,
) -> BatchSampler:
    """Builds the sampler, and checks it against the learning-rate schedule."""
    units, phases = objective.units, training_phases(config)
    if curriculum_difficulty(phases) == "loss":
        difficulties = initial_losses(lm, units, scratch, config.token_budget, padded=padded)
    sampler = BatchSampler(
        len(units),
        config.batch_size,
        seed if config.shuffle else None,
        phases,
        kinds=kinds,
        lengths=longest_lengths(units),
        difficulties=difficulties,
    )
    # Checked for each phase before the first step: a schedule that does not fit would end a training of days.
    for position in sampler.phases:
        config.schedule.check(position.steps)
    return sampler


def _number_tasks(
    config: TrainConfig, kinds: Mapping[str, Sequence[str]] | None
) -> tuple[np.ndarray | None, list[str]]:
    """Returns int64 [units], the task of each for gradient surgery, and the tasks' names; None without several."""
    column = config.surgery.task_column
    if column is None:
        return None, []
    names, tasks = np.unique((kinds or {})[column], return_inverse=True)
    if len(names) == 1:
        log.warning("  all records are of one task, `%s`: train.surgery changes nothing", names[0])
        return None, []
    return tasks.astype(np.int64), names.tolist()


def _learning_rate(config: TrainConfig, sampler: BatchSampler, step: int) -> float:
    """Returns the learning rate of a step, as its phase schedules it."""
    at = sampler.position(step)
    return scheduled_lr(config.schedule, at.config.learning_rate or config.learning_rate, at.step, at.steps)


def _initial_state(
    lm: LanguageModel, config: TrainConfig, sampler: BatchSampler, seed: int, can_go_back: Callable[[], bool]
) -> TrainingState:
    masters = MasterWeights(lm.model, config.optimizer)
    ema = None if config.ema is None else Ema(config.ema, masters.names, masters.masters)
    scale = LossScale() if config.precision == "float16" else None
    vocabulary = getattr(lm.model.config.get_text_config(), "vocab_size", 0)
    monitor = Monitor(config.watch, can_go_back, EarlyLimit.of_objective(config.objective, vocabulary))
    has_gates = config.method == "lora" and config.lora.gates is not None
    gates = RankGates(masters, config.lora, seed, sampler.steps) if has_gates else None
    return TrainingState(masters, sampler, monitor, Interventions(), ema, scale, gates)


def _training_contexts(
    lm: LanguageModel, config: TrainConfig, state: TrainingState, batch: MicroBatch
) -> Iterator[AbstractContextManager[object]]:
    """Yields the contexts that change the model while it trains, in their order."""
    yield _training_mode(lm, training=True)
    # Outside of the noise, which is added to what the embeddings return.
    yield state.masters.swapped_in()
    yield wrap_calls(lm.decoder, partial(phase, "forward"))
    yield apply_noise(lm, config.noise)
    yield recompute(lm, config, batch)


@contextmanager
def _training_mode(lm: LanguageModel, *, training: bool) -> Iterator[None]:
    """Puts the model in training or evaluation mode, and in evaluation mode afterwards."""
    lm.model.train(training)
    try:
        yield
    finally:
        lm.model.eval()
