"""Sets a training up: the model's context managers, the batch sampler, the state, the loader and recovery."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
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
from posttrain.train.evaluation import Evaluation
from posttrain.train.memory.recompute import compile_layers, recompute
from posttrain.train.monitor.detectors import EarlyLimit
from posttrain.train.monitor.meter import StepMeter, phase, wrap_calls
from posttrain.train.monitor.metrics import Sink
from posttrain.train.monitor.monitor import Monitor
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.reference import initial_losses
from posttrain.train.optim.gradient_surgery import GradientSurgery
from posttrain.train.optim.loss_scale import LossScale
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.optim.schedule import phase_lr
from posttrain.train.optim.weights import Weights
from posttrain.train.rank_gates import RankGates
from posttrain.train.recovery import Recovery, read_recovery_log
from posttrain.train.regularization.layers import apply_noise
from posttrain.train.state import Interventions, TrainingState
from posttrain.train.step_hooks import LossObserver, StepHook
from posttrain.train.supernet import Supernet

log = logging.getLogger("posttrain")


@dataclass
class TrainingParts:
    """The parts of a running training.

    Args:
        state: everything that the next step depends on.
        batches: its batches.
        learning_rate: returns the scheduled learning rate of a step.
        recovery: saves, resumes and rolls back.
        meter: measures its steps.
    """

    state: TrainingState
    batches: BatchSource
    learning_rate: Callable[[int], float]
    recovery: Recovery
    meter: StepMeter


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
    evaluation: Evaluation | None = None,
) -> Iterator[TrainingParts]:
    """Prepares model and objective, and resumes from the newest checkpoint; restores the model at the end.

    Args:
        mesh: the processes that train together.
        seed: seed of the order of the data and of dropout.
        scratch: folder of everything that a training resumes from.
        sink: receives the values of each step.
        kinds: each unit's kind, by the column that a phase mixes by or that names its task.
        difficulties: float [units], for a curriculum by a column.
        evaluation: evaluates the model on held-out records; None: it is not evaluated.

    Raises:
        UserError: config and data do not fit, or the folder holds another training.
    """
    make_folder(scratch)
    recovery_log = read_recovery_log(scratch)
    budget = recovery_log.limit_tokens(config.token_budget)
    meter = StepMeter(
        lm,
        config.precision,
        classifier=config.spec.classifier,
        weights_frozen=config.method == "lora",
    )
    units, best = objective.units, [evaluation.best] if evaluation and evaluation.config.patience else []
    checkpoints = Checkpoints(scratch / "checkpoints", config.checkpoint, *best)
    longest = max(int(longest_lengths(held).max()) for held in (units, *([evaluation.units] if evaluation else [])))
    attention: str = lm.decoder.config._attn_implementation  # type: ignore[assignment, union-attr]
    tasks, task_names = _number_tasks(config, kinds)
    with ExitStack() as stack:
        # Before any module is attached: a reward head draws its weights from this seed.
        torch.manual_seed(seed)
        enter = stack.enter_context
        # Everything that changes the model, in its order; the last is taken back first.
        # First, so that all that follows also changes the objective's modules.
        enter(objective.attach_modules(lm))
        # Before attention is replaced and layers are compiled: it replaces the forward passes of whole layers.
        enter(fuse_layers(lm, compiled=config.compile))
        # Attention that sees only a window is equal to full attention up to a length: the data decide. Models that
        # cannot be packed are trained padded: slower, and with the same result.
        padded = not enter(packed_attention(lm, longest))
        # What objectives compute before the training must not be drawn through dropout.
        enter(_training_mode(lm, training=False))
        sampler = _build_sampler(lm, objective, config, seed, scratch, kinds, difficulties, padded=padded)
        with autocast(lm, config)():
            # A reference model runs over the very micro-batches of the training, so that rounding is the same in both.
            groups = first_pass_groups(units, sampler, budget, tasks)
            objective.prepare(lm, scratch, padded=padded, groups=groups)
            if evaluation:
                evaluation.prepare(lm, scratch, padded=padded, attention=attention)
        # Copies the weights: whatever changes them has come before. What noises the embeddings' output comes after.
        weights = enter(closing(MasterWeights(lm.model, config.optimizer)))
        enter(_training_mode(lm, training=True))
        # Outside of noise and recomputation, whose time is the forward pass's too.
        enter(wrap_calls(lm.decoder, partial(phase, "forward")))
        # Dropout in the layers and noise on embedded tokens, before the layers are wrapped to be computed again.
        enter(apply_noise(lm, config.noise))
        enter(recompute(lm, config))
        # After all hooks are set: the compiler would trace again for each.
        if config.compile:
            compile_layers(lm)
        # Waits for the checkpoint in flight before anything above is taken back.
        enter(checkpoints)
        hooks = _build_hooks(lm, config, weights, sampler, seed, task_names)
        state = _initial_state(lm, config, weights, sampler, hooks, can_go_back=lambda: bool(checkpoints.steps()))
        recovery = Recovery(state, recovery_log, checkpoints, scratch, sink, mesh)
        # After everything that sets the model up, and before the loader, which reads what a curriculum has observed.
        recovery.resume()
        batches = enter(
            BatchLoader(
                units,
                sampler,
                budget,
                device=lm.device,
                padded=padded,
                tasks=tasks,
                config=config.loader,
                mesh=mesh,
            )
        )
        rate = partial(phase_lr, config.schedule, config.learning_rate, sampler)
        yield TrainingParts(state, batches, rate, recovery, meter)


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


def _build_hooks(
    lm: LanguageModel,
    config: TrainConfig,
    weights: Weights,
    sampler: BatchSampler,
    seed: int,
    tasks: Sequence[str],
) -> list[StepHook]:
    """Builds the hooks of the config, the outermost first."""
    lora, lora_is_trained = config.lora, config.method == "lora"
    # Gates take the gradient that surgery has combined; surgery counts the losses of whole networks.
    hooks: list[StepHook] = [LossObserver(sampler)] if sampler.follows_losses else []
    if lora_is_trained and lora.gates is not None:
        hooks.append(RankGates(lm.model, weights, lora, seed, sampler.steps))
    if tasks:
        hooks.append(GradientSurgery(weights, seed, tasks))
    if lora_is_trained and lora.supernet:
        hooks.append(Supernet(lm.model, lora, seed))
    return hooks


def _initial_state(
    lm: LanguageModel,
    config: TrainConfig,
    weights: Weights,
    sampler: BatchSampler,
    hooks: Sequence[StepHook],
    can_go_back: Callable[[], bool],
) -> TrainingState:
    vocabulary = getattr(lm.model.config.get_text_config(), "vocab_size", 0)
    monitor = Monitor(config.watch, can_go_back, EarlyLimit.of_objective(config.objective.name, vocabulary))
    scale = LossScale(enabled=config.precision == "float16")
    return TrainingState(weights, sampler, monitor, Interventions(), scale, hooks)


@contextmanager
def _training_mode(lm: LanguageModel, *, training: bool) -> Iterator[None]:
    """Puts the model in training or evaluation mode, and in evaluation mode afterwards."""
    lm.model.train(training)
    try:
        yield
    finally:
        lm.model.eval()
