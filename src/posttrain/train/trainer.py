"""The training loop: exact resume, sums and counts, float32 where it matters."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import is_out_of_memory
from posttrain.parallel.mesh import Mesh
from posttrain.store.errors import WorkError
from posttrain.store.progress import progress_bar
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import TrainConfig
from posttrain.train.data.loader import Batch
from posttrain.train.evaluation import Evaluation
from posttrain.train.monitor.meter import phase
from posttrain.train.monitor.metrics import Sink, StepValues
from posttrain.train.monitor.profile import profile_steps
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.loss import Loss, mean_metrics, merge_metrics
from posttrain.train.optim.master_weights import clip_factor
from posttrain.train.out_of_memory import empty_cache, halve_micro_batch
from posttrain.train.recovery import graceful_shutdown
from posttrain.train.setup import TrainingParts, autocast, set_up_training
from posttrain.train.state import TrainingState, random_state, set_random_state

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step's forward and backward passes.

    Args:
        loss: mean over everything that the objective counts.
        count: number of things that it counts; 0 if there is nothing.
        supervised: supervised tokens.
        metrics: means of the objective's other values.
    """

    loss: float
    count: float
    supervised: int
    metrics: dict[str, float]


@dataclass
class Trainer:
    """Trains one model in place.

    The result does not depend on when or how often the training was killed, nor on how a step is cut into
    micro-batches.

    Args:
        lm: the model.
        objective: units and loss.
        config: settings, with ``micro_batch_tokens`` decided.
        seed: seed of the order of the data and of dropout.
        scratch: folder of everything that the training resumes from.
        sink: receives the values of each step.
        kinds: each unit's kind, by the column that a phase mixes by or that names its task.
        difficulties: float [units], for a curriculum by a column.
        profile: folder of a profile; None: in ``scratch``.
        callbacks: called after each step and at each checkpoint.
        mesh: the processes that train together.
        evaluation: evaluates the model on held-out records; None: it is not evaluated.
        keep_end: whether the state after the last step is saved, from which a longer training may continue.
    """

    lm: LanguageModel
    objective: Objective
    config: TrainConfig
    seed: int
    scratch: Path
    sink: Sink | None = None
    kinds: Mapping[str, Sequence[str]] | None = None
    difficulties: np.ndarray | None = None
    profile: Path | None = None
    callbacks: CallbackList = field(default_factory=CallbackList)
    mesh: Mesh = field(default_factory=Mesh.single)
    evaluation: Evaluation | None = None
    keep_end: bool = False
    parts: TrainingParts = field(init=False)
    state: TrainingState = field(init=False)
    result_steps: int = field(default=0, init=False)
    """After how many steps the weights were those that the training has ended with."""

    def train(self) -> list[StepValues]:
        """Trains, resuming from the newest checkpoint.

        Returns:
            The values of every step.

        Raises:
            WorkError: training failed in a way that the config says to stop at, or that cannot be recovered from, or a
                callback failed.
            TrainingStopped: a callback asked to stop.
        """
        # One context for every forward pass, so that no objective can forget the precision.
        self.autocast = autocast(self.lm, self.config)
        with set_up_training(
            self.lm,
            self.objective,
            self.config,
            self.mesh,
            seed=self.seed,
            scratch=self.scratch,
            sink=self.sink,
            kinds=self.kinds,
            difficulties=self.difficulties,
            evaluation=self.evaluation,
        ) as self.parts:
            self.state = self.parts.state
            finished = self._train_steps()
            if finished:
                self._load_best()
        if not finished:
            raise TrainingStopped(self.state.steps, self.state.sampler.steps)
        return self.state.steps

    def _train_steps(self) -> bool:
        """Runs the steps that are left; returns False if a callback has stopped the training."""
        steps, total = self.state.steps, self.state.sampler.steps
        folder = self.profile or self.scratch / "profile"
        with (
            progress_bar("training", total, "steps") as advance,
            profile_steps(self.lm, self.config.profile, folder, total - len(steps)) as profile_step,
            graceful_shutdown() as requested_exit,
        ):
            advance(len(steps))
            if steps:
                log.info("  resumes behind step %d of %d", len(steps), total)
            stop = self.mesh.any(self.callbacks.on_begin(len(steps), total)) and len(steps) < total
            # The number of finished steps is the position: nothing else counts them that could disagree after a
            # rollback.
            while not stop and len(steps) < total and not self._stops_early():
                before = len(steps)
                self.train_step(before)
                profile_step()
                # A rollback shortens the list, and the progress with it.
                advance(len(steps) - before, f"loss {steps[-1].loss:.4g}" if steps else "")
                stop = self.mesh.any(len(steps) > before and self._call_back()) and len(steps) < total
                # A signal counts behind the last step too: it ends the program, and not this training alone.
                if self.mesh.any(requested_exit()):
                    stop = True
            if stop or self.keep_end:
                self.save_if_due(last=True)
        return not stop

    def _stops_early(self) -> bool:
        """Returns whether the training has learned enough, by its own loss or by the evaluations."""
        state, evaluation = self.state, self.evaluation
        return state.has_learned(self.config.stop_loss) or (evaluation is not None and evaluation.stops(state.steps))

    def _best(self) -> int | None:
        """Returns after how many steps the best evaluation was; None where the last weights are the result."""
        evaluation = self.evaluation
        return evaluation.best(self.state.steps) if evaluation and evaluation.config.patience else None

    def _is_best(self) -> bool:
        """Returns whether the last step's evaluation is the best so far, and its weights may be the result."""
        steps = self.state.steps
        return bool(steps and steps[-1].evaluation) and self._best() == len(steps)

    def _load_best(self) -> None:
        """Loads the weights of the best evaluation, if they are the result."""
        best, self.result_steps = self._best(), len(self.state.steps)
        if best in (None, self.result_steps):
            return
        checkpoint = self.parts.recovery.checkpoints.at(best)
        if checkpoint is None:
            log.warning("  there is no checkpoint of the best evaluation, after %d steps: the last weights stay", best)
            return
        log.info("  the result has the weights of the best evaluation, after %d steps", best)
        self.state.load_weights(checkpoint)
        self.result_steps = best

    def _call_back(self) -> bool:
        """Calls the callbacks after a step, and returns whether one of them asks to stop."""
        try:
            return self.callbacks.on_step(self.state.steps[-1])
        except WorkError:
            self.parts.recovery.save(last=True)
            raise

    def train_step(self, step: int) -> None:
        """Runs one optimiser step: forward and backward passes, the monitor's checks, the update, a checkpoint."""
        state, parts, mesh = self.state, self.parts, self.mesh
        scale = state.loss_scale.value
        parts.meter.start()
        with phase("data"):
            batch = parts.batches.next(step)
        # Losses and gradients of other data say nothing about these: records learned by heart have next to no gradient,
        # so that those of records which a curriculum has opened would look like an explosion.
        if batch.changes_data:
            state.monitor.reset()
        lr = state.interventions.lr_factor * parts.learning_rate(step)

        batch, result = self.forward_backward(batch)
        norms, norm = self.gradient_norms()

        # The loss scaler handles a gradient that overflowed in float16, and a skipped step has been judged before.
        overflowed = state.loss_scale.enabled and mesh.any(state.loss_scale.overflowed(result.loss, norm))
        monitored = step not in state.interventions.skipped_steps and not overflowed
        decision = update_ratio = None
        if monitored:
            with phase("watch"):
                decision = mesh.from_first(state.monitor.before_step(result.loss, norm, result.supervised, step))
        # A warning is for the log only; everything else keeps this gradient out of the weights.
        if monitored and (decision is None or decision.action == "warn"):
            update_ratio = self.optimizer_step(step, lr, norm)
        elif decision and parts.recovery.act(decision, [decision]):
            return  # rolled back: this step is run again
        else:
            state.weights.zero_grad()
        if state.loss_scale.enabled:
            state.loss_scale.after(overflowed=overflowed)

        values = StepValues(
            step=step,
            epoch=batch.epoch,
            loss=result.loss,
            loss_count=result.count,
            grad_norm=norm,
            lr=lr,
            group_norms=norms,
            update_ratio=update_ratio,
            loss_scale=scale if state.loss_scale.enabled else None,
            metrics=result.metrics | {name: value for hook in state.hooks for name, value in hook.metrics.items()},
            **parts.meter.read(batch.lengths, result.supervised, parts.batches.waited, batch.rate),
        )
        if self.evaluation and self.evaluation.is_due(step + 1, state.sampler):
            with self.autocast():
                evaluated = self.evaluation.measure(step + 1, self.lm, state.hooks, parts.batches.budget, mesh)
            values = replace(values, evaluation=evaluated)
        state.steps.append(values)
        for hook in state.hooks:
            hook.observe(step, result.loss)
        # The best evaluation is kept also where the monitor has lowered the rate after it.
        intervened = parts.recovery.finish_step(values, decision, monitored=monitored)
        if not intervened or self._is_best():
            self.save_if_due()

    def forward_backward(self, batch: Batch) -> tuple[Batch, StepResult]:
        """Accumulates the gradient of a step; on out-of-memory, halves the micro-batch and retries the step.

        Returns:
            The batch as it was cut in the end, and the result.

        Raises:
            WorkError: one example does not fit into memory.
        """
        while True:
            random = random_state()  # a retry draws the same dropout
            result = self._try_gradients(batch)
            out_of_memory = self.mesh.any(result is None)
            if result and not out_of_memory:
                return batch, result
            self.state.weights.zero_grad()
            empty_cache()
            set_random_state(random)
            batches = self.parts.batches
            batches.budget = halve_micro_batch(batch, batches.budget)
            self.parts.recovery.limit_budget(batches.budget)
            batch = batches.next(batch.step)

    def _try_gradients(self, batch: Batch) -> StepResult | None:
        """Accumulates the gradient of a step inside its hooks; None if memory ran out."""
        try:
            with ExitStack() as stack:
                for hook in self.state.hooks:
                    stack.enter_context(hook.gradients(batch))
                return self.accumulate_gradients(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The error's frames hold the tensors that are freed after the `except` alone.
        return None

    def accumulate_gradients(self, batch: Batch) -> StepResult:
        """Adds the gradient of a step's loss to the weights', one micro-batch after another."""
        with self.autocast():
            count = self.mesh.sum(self.objective.begin_step(self.lm, batch.rows))
        # Each sum is divided by the count of the whole step: the mean of micro-batches' means would weigh a token by
        # how the step happens to be cut.
        divisor = count or 1.0
        total, metrics = 0.0, []
        for number in range(len(batch.packed)):
            with phase("backward"):
                loss = self.backward(batch, number, divisor / self.state.loss_scale.value)
            # Waits for the device, which has just finished the backward pass.
            total += loss.sum.item()
            metrics.append(loss.metrics)
        total, supervised = self.mesh.sum((total, sum(len(packed.targets) for packed in batch.packed)))
        values = mean_metrics(self.mesh.sum(merge_metrics(metrics)))
        return StepResult(total / divisor, count, supervised, values)

    def backward(self, batch: Batch, number: int, divisor: float) -> Loss:
        """Runs the forward and the backward pass of one micro-batch, through all hooks; the loss has no graph."""

        def run(divisor: float) -> Loss:
            with phase("head"), self.autocast():
                loss = self.objective.loss(self.lm, batch.packed[number], batch.rows[number])
            (loss.sum / divisor).backward()  # type: ignore[no-untyped-call]
            return replace(loss, sum=loss.sum.detach())

        for hook in reversed(self.state.hooks):
            run = partial(hook.backward, batch, number, run)
        return run(divisor)

    def gradient_norms(self) -> tuple[dict[str, float], float]:
        """Returns the L2 norm of the gradient by layer group, and of all, on the float32 sums and before clipping."""
        with phase("clip"):
            norms, scale = self.mesh.join_norms(self.state.weights.gradient_norms()), self.state.loss_scale.value
        return {name: norm / scale for name, norm in norms.items()}, math.hypot(*norms.values()) / scale

    def optimizer_step(self, step: int, lr: float, norm: float) -> float | None:
        """Clips the gradient and updates the weights; returns the norm of the update by that of the weights."""
        scale = self.state.loss_scale.value
        with phase("optimizer"):
            ratio = self.state.weights.step(lr, clip_factor(norm, self.config.clip) / scale)
            for hook in self.state.hooks:
                hook.updated(step, scale)
        # Only now: optimisers allocate their state in the first step.
        self.parts.recovery.reserve_memory()
        return ratio

    def save_if_due(self, *, last: bool = False) -> None:
        """Saves a checkpoint if one is due, or before the process ends."""
        done = len(self.state.steps)
        # After the last step the result is stored.
        is_due = last or ((self.parts.recovery.is_due() or self._is_best()) and done < self.state.sampler.steps)
        if is_due and self.parts.recovery.save(last=last):
            self.callbacks.on_save(done)
