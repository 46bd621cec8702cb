"""The training loop: exact resume, sums and counts, float32 where it matters."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.fused import fuse_layers
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, packed_attention
from posttrain.store.errors import WorkError
from posttrain.store.files import make_folder
from posttrain.store.progress import progress_bar
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import curriculum_difficulty
from posttrain.train.data.loader import Batch, BatchLoader
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import first_pass_groups
from posttrain.train.gradients import StepResult, accumulate_gradients, autocast, forward
from posttrain.train.initialization.activation_stats import activation_stats
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.recompute import compile_layers, recompute
from posttrain.train.monitor.decisions import Decision
from posttrain.train.monitor.meter import StepMeter, phase, wrap_calls
from posttrain.train.monitor.metrics import Sink, StepValues
from posttrain.train.monitor.monitor import Monitor
from posttrain.train.monitor.profile import profile_steps
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.reference import initial_losses
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.optim.ema import Ema
from posttrain.train.optim.loss_scale import LossScale
from posttrain.train.optim.master_weights import MasterWeights, clip_gradients
from posttrain.train.optim.schedule import scheduled_lr
from posttrain.train.out_of_memory import empty_cache, is_out_of_memory
from posttrain.train.recovery import Recovery, graceful_shutdown
from posttrain.train.recovery_log import read_recovery_log
from posttrain.train.regularization.dropout import apply_noise
from posttrain.train.regularization.weight_standardization import standardize_weights
from posttrain.train.state import Interventions, TrainingState, random_state, set_random_state

log = logging.getLogger("posttrain")


@dataclass
class Trainer:
    """One training of one model, in place.

    Args:
        lm: the model.
        lesson: what it learns.
        config: how; ``micro_batch_tokens`` decided.
        seed: of the order of the data and of dropout.
        scratch: where the training keeps what it resumes from. Its outcome does not depend on when or how often it
            was killed.
        sink: what is told of every step.
        kinds: for each column that a stage mixes by, what each unit is.
        difficulties: float [units], for a curriculum that goes by a column.
        profile: where a profile is written.
    """

    lm: LanguageModel
    lesson: Objective
    config: TrainConfig
    seed: int
    scratch: Path
    sink: Sink | None = None
    kinds: Mapping[str, Sequence[str]] | None = None
    difficulties: np.ndarray | None = None
    profile: Path | None = None
    _prepared: bool = field(default=False, init=False)

    def fit(self) -> list[StepValues]:
        """Train.

        Returns:
            What each step measured.

        Raises:
            WorkError: if it went wrong in a way that the config says to stop at, or that could not be mended.
        """
        make_folder(self.scratch)
        self.recovery_log = read_recovery_log(self.scratch)
        budget = self.recovery_log.limit_tokens(self.config.token_budget)
        self.meter = StepMeter(
            self.lm,
            self.config.precision,
            classifier=OBJECTIVES[self.config.objective].output in ("reward", "classes"),
            weights_frozen=self.config.method == "lora",
        )
        torch.manual_seed(self.seed)
        with ExitStack() as within:
            if self.config.weight_standardization:
                within.enter_context(standardize_weights(self.lm))
            within.enter_context(self.lesson.attach_modules(self.lm))
            within.enter_context(fuse_layers(self.lm, compiled=self.config.compile))
            padded = not within.enter_context(packed_attention(self.lm, int(longest_lengths(self.lesson.units).max())))
            within.enter_context(_mode(self.lm, training=False))
            order = self._order(padded)
            with autocast(self.lm, self.config):
                parts = first_pass_groups(self.lesson.units, order, budget)
                self.lesson.prepare(self.lm, self.scratch, padded=padded, parts=parts)
            self.initial = self._first_look(order, budget, padded)
            self.state = self._fresh_state(order)
            within.callback(self.state.masters.close)
            for condition in self._conditions(budget):
                within.enter_context(condition)
            self.checkpoints = within.enter_context(Checkpoints(self.scratch / "checkpoints", self.config.checkpoint))
            self.recovery = Recovery(
                self.state, self.recovery_log, self.checkpoints, self.scratch, self.config.watch.rate_factor, self.sink
            )
            self.recovery.resume()
            loader = BatchLoader(
                self.lesson.units, order, budget, device=self.lm.device, padded=padded, config=self.config.loader
            )
            self.loader = within.enter_context(loader)
            self._run()
            if self.state.ema and self.config.ema.save:
                self.state.ema.copy_to(self.state.masters.weights)
        return self.state.steps

    @property
    def monitor(self) -> Monitor:
        """The monitor, with all decisions so far."""
        return self.state.monitor

    def _fresh_state(self, order: BatchSampler) -> TrainingState:
        masters = MasterWeights(self.lm.model, self.config.optimizer)
        ema = None if self.config.ema.decay is None else Ema(self.config.ema, masters.names, masters.masters)
        scale = LossScale(self.config.scaling) if self.config.precision == "float16" else None
        monitor = Monitor(self.config.watch, can_go_back=lambda: bool(self.checkpoints.steps()))
        return TrainingState(masters, order, monitor, Interventions(), ema, scale)

    def _order(self, padded: bool) -> BatchSampler:
        """Which units each step meets, checked against the schedule."""
        units, stages = self.lesson.units, training_phases(self.config)
        difficulties = self.difficulties
        if curriculum_difficulty(stages) == "loss":
            difficulties = initial_losses(self.lm, units, self.scratch, self.config.token_budget, padded=padded)
        order = BatchSampler(
            len(units),
            self.config.batch_size,
            self.seed if self.config.shuffle else None,
            stages,
            kinds=self.kinds,
            lengths=longest_lengths(units),
            difficulties=difficulties,
        )
        for place in order.stages:
            self.config.schedule.check(place.steps)
        self.config.ema.check(order.steps)
        return order

    def _first_look(self, order: BatchSampler, budget: int, padded: bool) -> list[dict[str, Any]]:
        """Variances by layer under weights drawn at random; nothing where the model was trained before."""
        if self.config.initialization.method == "none":
            return []

        def loss(packed: Packed, rows: list[int], scale: float) -> Tensor:
            count = self.lesson.begin(self.lm, [rows]) or 1.0
            return forward(self.lm, self.lesson, self.config, packed, rows).sum * (scale / count)

        return activation_stats(
            self.lm,
            self.lesson.units,
            order.rows(0),
            loss,
            self.config.initialization,
            float16=self.config.precision == "float16",
            budget=budget,
            padded=padded,
            file=self.scratch / "variances.json",
        )

    def _conditions(self, budget: int) -> Iterator[Any]:
        """What changes the model while it trains."""
        yield _mode(self.lm, training=True)
        yield self.state.masters.swapped_in()
        yield wrap_calls(self.lm.decoder, lambda: phase("forward"))
        yield apply_noise(self.lm, self.config.noise)
        batch = MicroBatch.full(budget, self.config, int(longest_lengths(self.lesson.units).max()))
        yield recompute(self.lm, self.config, batch)
        if self.config.compile:
            compile_layers(self.lm)

    def _run(self) -> None:
        steps, count = self.state.steps, self.state.sampler.steps
        folder = self.profile or self.scratch / "profile"
        with (
            progress_bar("training", count, "steps") as advance,
            profile_steps(self.lm, self.config.profile, folder, count - len(steps)) as step_done,
            graceful_shutdown() as asked,
        ):
            advance(len(steps))
            self.loader.seek(len(steps))
            while len(steps) < count:
                before = len(steps)
                self._step(before)
                if step_done:
                    step_done()
                advance(len(steps) - before, f"loss {steps[-1].loss:.4g}" if steps else "")
                if len(steps) < count and (ending := asked()):
                    self.recovery.save_last()
                    raise ending

    def _step(self, number: int) -> None:
        state, scaling = self.state, self.state.loss_scale
        self.meter.start()
        with phase("data"):
            batch = next(self.loader)
        place = state.sampler.place(number)
        if place.step == 0 and number > 0:
            state.monitor.reset()
        learning = state.interventions.lr_factor * scheduled_lr(
            self.config.schedule, place.config.learning_rate or self.config.learning_rate, place.step, place.steps
        )
        batch, summed = self._gradients(batch)
        scale = scaling.value if scaling else 1.0
        with phase("clip"):
            groups = {name: norm / scale for name, norm in state.masters.gradient_norms().items()}
        norm = math.hypot(*groups.values())
        decision, stepped = None, False
        overflowed = scaling is not None and scaling.overflowed(summed.loss, norm)
        watched = number not in state.interventions.skipped_steps and not overflowed
        if watched:
            with phase("watch"):
                decision = state.monitor.before_step(summed.loss, norm, summed.supervised, number)
        if decision and decision.action != "warn":
            if self._went_back(decision, [decision]):
                return
        elif watched:
            self._update(learning, norm, scale)
            stepped = True
        if not stepped:
            state.masters.zero_grad()
        if scaling:
            scaling.after(overflowed=overflowed)
        values = StepValues(
            step=number,
            epoch=batch.epoch,
            loss=summed.loss,
            loss_count=summed.count,
            grad_norm=norm,
            lr=learning,
            group_norms=groups,
            update_ratio=state.masters.update_ratio if stepped else None,
            loss_scale=scale if scaling else None,
            metrics=summed.metrics,
            **self.meter.read(
                tokens=sum(batch.lengths.sequences),
                computed=batch.lengths.computed,
                pairs=batch.lengths.pairs,
                supervised=summed.supervised,
                waited=self.loader.waited,
            ),
        )
        state.steps.append(values)
        units = summed.unit_losses if state.sampler.wants_unit_losses(number) else None
        state.sampler.observe(number, summed.loss, None if units is None else units.cpu().numpy())
        with phase("watch"):
            found = state.monitor.observe(values) if watched else []
        mine = [*([decision] if decision else []), *found]
        if found and found[0].restores and self._went_back(found[0], mine):
            return
        decisions = [*self.recovery.unreported, *mine]
        self.recovery.unreported.clear()
        state.monitor.record(number, decisions)
        if self.sink:
            with phase("watch"):
                self.sink.write(values, decisions)
        if found and not found[0].restores and found[0].action != "warn":
            self.recovery.act(found[0], mine)
        elif self.checkpoints.due(len(state.steps)) and len(state.steps) < state.sampler.steps:
            with phase("checkpoint"):
                self.recovery.save()

    def _went_back(self, decision: Decision, mine: list[Decision]) -> bool:
        """Carry a decision out; whether training went back for it."""
        if back := self.recovery.act(decision, mine):
            self.loader.seek(len(self.state.steps))
        return back

    def _gradients(self, batch: Batch) -> tuple[Batch, StepResult]:
        """Add up the gradients of a step, in smaller micro-batches where memory runs out."""
        scale = self.state.loss_scale.value if self.state.loss_scale else 1.0
        while True:
            random = random_state()
            try:
                return batch, accumulate_gradients(self.lm, self.lesson, self.config, batch, scale)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if max(map(len, batch.rows)) == 1:
                    longest_unit = max(packed.tokens for packed in batch.packed)
                    raise WorkError(
                        f"out of memory with one example of {longest_unit} tokens at a time; "
                        "set train.recompute=full, a lower train.max_length or train.method=lora"
                    ) from None
            self.state.masters.zero_grad()
            empty_cache()
            set_random_state(random)
            budget = max(1, min(self.loader.budget, max(packed.tokens for packed in batch.packed)) // 2)
            log.warning(
                "out of memory at step %d: micro-batches of at most %d tokens from here on, the batch stays as it is",
                batch.step,
                budget,
            )
            self.loader.budget = self.recovery_log.fitting_budget = budget
            self.recovery_log.write(self.scratch)
            self.loader.seek(batch.step)
            batch = next(self.loader)

    def _update(self, learning: float, norm: float, scale: float) -> None:
        """Clip the gradients, and step."""
        state = self.state
        with phase("clip"):
            sums = state.masters.sums
            if scale != 1:
                torch._foreach_div_(sums, scale)
            factor = clip_gradients(sums, norm, self.config.clip, self.config.clip_value)
        with phase("optimizer"):
            state.masters.step(learning, factor)
            if state.ema:
                state.ema.update(len(state.steps) + 1)
        if not self._prepared:
            self.checkpoints.prepare(state.tensors())
            self._prepared = True


@contextmanager
def _mode(lm: LanguageModel, *, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, and in evaluation mode after it."""
    lm.model.train(training)
    try:
        yield
    finally:
        lm.model.eval()
