"""The training loop: exact resume, sums and counts, float32 where it matters."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import is_out_of_memory
from posttrain.models.packing import Packed
from posttrain.parallel.mesh import Mesh
from posttrain.store.errors import WorkError
from posttrain.store.progress import progress_bar
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import TrainConfig
from posttrain.train.data.loader import Batch
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.meter import phase
from posttrain.train.monitor.metrics import Sink, StepValues, mean_loss
from posttrain.train.monitor.profile import profile_steps
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.loss import Loss, mean_metrics, merge_metrics
from posttrain.train.optim.master_weights import clip_factor
from posttrain.train.out_of_memory import empty_cache
from posttrain.train.recovery import graceful_shutdown
from posttrain.train.regularization.adversarial import backward_adversarial
from posttrain.train.setup import TrainingParts, autocast, set_up_training
from posttrain.train.state import TrainingState, random_state, set_random_state

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step's forward passes.

    Args:
        loss: mean over everything that the objective counts.
        count: number of things that it counts; 0 if there is nothing.
        supervised: supervised tokens.
        metrics: means of the objective's other values.
        unit_losses: float32 [units of the step], nats a supervised token of each, in their order; None if the
            objective does not measure them.
    """

    loss: float
    count: float
    supervised: int
    metrics: dict[str, float]
    unit_losses: Tensor | None


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
    callbacks: CallbackList | None = None
    mesh: Mesh = field(default_factory=Mesh.single)
    parts: TrainingParts = field(init=False)
    state: TrainingState = field(init=False)
    _checkpoint_memory_reserved: bool = field(default=False, init=False)
    _last_checkpoint: float = field(default=0.0, init=False)  # by the monotonic clock

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
        ) as self.parts:
            self.state = self.parts.state
            try:
                self._train_steps()
            except TrainingStopped:
                self._take_averages()
                raise
            self._take_averages()
        return self.state.steps

    def _take_averages(self) -> None:
        """Copies the averaged weights into the model, if they are the result."""
        if self.state.ema:
            # Checkpoints keep the weights, so that a longer training can resume from them.
            self.state.ema.copy_to(self.state.masters.weights)

    def _train_steps(self) -> None:
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
            self._last_checkpoint = time.monotonic()
            if self.callbacks and self.callbacks.on_begin(len(steps), total) and len(steps) < total:
                self._stop(total)
            # The number of finished steps is the position: nothing else counts them that could disagree after a
            # rollback.
            while len(steps) < total and not self._has_learned():
                before = len(steps)
                self.train_step(before)
                if profile_step:
                    profile_step()
                # A rollback shortens the list, and the progress with it.
                advance(len(steps) - before, f"loss {steps[-1].loss:.4g}" if steps else "")
                stop = len(steps) > before and self._call_back() and len(steps) < total
                # A signal counts behind the last step too: it ends the program, and not this training alone.
                if stop or requested_exit():
                    self._stop(total)

    def _call_back(self) -> bool:
        """Calls the callbacks after a step, and returns whether one of them asks to stop."""
        if not self.callbacks:
            return False
        try:
            return self.callbacks.on_step(self.state.steps[-1])
        except WorkError:
            self._save(last=True)
            raise

    def _stop(self, total: int) -> NoReturn:
        self.save_checkpoint(last=True)
        raise TrainingStopped(self.state.steps, total)

    def _has_learned(self) -> bool:
        """Returns whether an epoch just ended with a mean loss below ``train.stop_loss``."""
        steps, limit = self.state.steps, self.config.stop_loss
        if limit is None or not steps or self.state.sampler.position(len(steps)).epoch == steps[-1].epoch:
            return False
        loss = mean_loss(step for step in steps if step.epoch == steps[-1].epoch)
        if loss is None or loss >= limit:
            return False
        total = self.state.sampler.steps
        log.info("  loss %.2g is below train.stop_loss after %d of %d steps", loss, len(steps), total)
        return True

    def train_step(self, step: int) -> None:
        """Runs one optimiser step: forward and backward passes, the monitor's checks, the update, a checkpoint."""
        state, scaler, monitor = self.state, self.state.loss_scale, self.state.monitor
        self.parts.meter.start()
        with phase("data"):
            batch = self.parts.batches.next(step)
        # Loss and gradients of other data are no fault: records learned by heart have next to no gradient, beside which
        # any that a curriculum opens would look like an explosion.
        if batch.changes_data:
            monitor.reset()
        lr = state.interventions.lr_factor * self.parts.learning_rate(step)

        batch, result = self.forward_backward(batch)
        scale = scaler.value if scaler else 1.0
        # Measured on the float32 sums: the norm of all processes would be reduced here, before anything is clipped.
        norms, norm = self.gradient_norms(scale)

        # The loss scaler handles a gradient that overflowed in float16, and a skipped step has been judged before.
        overflowed = scaler is not None and scaler.overflowed(result.loss, norm)
        monitored = step not in state.interventions.skipped_steps and not overflowed
        decision = None
        if monitored:
            with phase("watch"):
                decision = monitor.before_step(result.loss, norm, result.supervised, step)
        # A warning is for the log only; everything else keeps this gradient out of the weights.
        stepped = monitored and (decision is None or decision.action == "warn")
        metrics = result.metrics
        if stepped:
            self.optimizer_step(lr, norm, scale)
            if state.gates:
                metrics = metrics | state.gates.step(step, scale)
        else:
            if decision and self._act(decision, [decision]):
                return  # rolled back: this step is run again
            state.masters.zero_grad()
        if scaler:
            scaler.after(overflowed=overflowed)

        values = StepValues(
            step=step,
            epoch=batch.epoch,
            loss=result.loss,
            loss_count=result.count,
            grad_norm=norm,
            lr=lr,
            group_norms=norms,
            update_ratio=state.masters.update_ratio if stepped else None,
            loss_scale=scale if scaler else None,
            metrics=metrics,
            **self.parts.meter.read(
                tokens=sum(batch.lengths.sequences),
                computed=batch.lengths.computed,
                pairs=batch.lengths.pairs,
                supervised=result.supervised,
                waited=self.parts.batches.waited,
            ),
        )
        state.steps.append(values)
        unit_losses = result.unit_losses if state.sampler.wants_unit_losses(step) else None
        state.sampler.observe(step, result.loss, None if unit_losses is None else unit_losses.cpu().numpy())
        self._finish_step(values, decision, monitored=monitored)

    def forward_backward(self, batch: Batch) -> tuple[Batch, StepResult]:
        """Accumulates the gradient of a step; on out-of-memory, halves the micro-batch and retries the step.

        Returns:
            The batch as it was cut in the end, and the result.

        Raises:
            WorkError: one example does not fit into memory.
        """
        while True:
            random = random_state()  # a retry draws the same dropout
            try:
                gates = self.state.gates
                with gates.sampled(batch.step) if gates else nullcontext():
                    return batch, self.accumulate_gradients(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # One example cannot be cut any further, whatever the budget.
                if max(map(len, batch.rows)) == 1:
                    longest = max(packed.tokens for packed in batch.packed)
                    raise WorkError(
                        f"out of memory with one example of {longest} tokens at a time; "
                        "set train.recompute=full, a lower train.max_length or train.method=lora"
                    ) from None
            # Outside of the `except`: the error's frames hold the tensors that are to be freed.
            self.state.masters.zero_grad()
            empty_cache()
            set_random_state(random)
            batch = self._halve_micro_batch(batch)

    def accumulate_gradients(self, batch: Batch) -> StepResult:
        """Adds the gradient of a step's loss to the weights', one micro-batch after another."""
        with self.autocast():
            count = self.objective.begin_step(self.lm, batch.rows)
        # Each sum is divided by the count of the whole step: the mean of micro-batches' means would weigh a token by
        # how the step happens to be cut.
        divisor = count or 1.0
        scaled = divisor / (self.state.loss_scale.value if self.state.loss_scale else 1.0)
        surgery, supernet = self.parts.surgery, self.parts.supernet
        total, metrics, unit_losses, counts = 0.0, [], [], dict[int, float]()
        for task, rows, packed in zip(batch.tasks, batch.rows, batch.packed, strict=True):
            if surgery and counts and task not in counts:
                with phase("surgery"):
                    surgery.set_aside(len(counts) - 1)  # micro-batches come task by task
            with phase("backward"):
                backward = partial(self.backward, packed, rows)
                loss = supernet.backward(batch.step, backward, scaled) if supernet else backward(scaled)
            # Waits for the device, which has just finished the backward pass.
            total += loss.sum.item()
            counts[task] = counts.get(task, 0.0) + loss.count
            metrics.append(loss.metrics)
            if surgery:
                metrics.append({f"loss/{surgery.names[task]}": (loss.sum, loss.count)})
            if loss.unit_losses is not None:
                unit_losses.append(loss.unit_losses)
        values = mean_metrics(merge_metrics(metrics))
        joined = torch.cat(unit_losses) if unit_losses else None
        if surgery:
            with phase("surgery"):
                values |= surgery.combine(batch.step, [own / divisor for own in counts.values()])
            joined = None if joined is None else joined[np.argsort(batch.places)]  # the step's order again
        return StepResult(
            total / divisor,
            count,
            sum(len(packed.targets) for packed in batch.packed),
            values,
            # Micro-batches keep the rows' order, so that joining them is the step's order.
            joined,
        )

    def backward(self, packed: Packed, rows: list[int], divisor: float) -> Loss:
        """Runs the forward and the backward pass of one micro-batch, and returns its loss without the graph."""
        attack = self.config.noise.adversarial
        if attack.method != "none":
            return backward_adversarial(partial(self.compute_loss, packed, rows), divisor, self.lm, attack)
        loss = self.compute_loss(packed, rows)
        (loss.sum / divisor).backward()  # type: ignore[no-untyped-call]
        return replace(loss, sum=loss.sum.detach())

    def compute_loss(self, packed: Packed, rows: list[int]) -> Loss:
        """Runs the forward pass of one micro-batch, in the config's precision."""
        with phase("head"), self.autocast():
            return self.objective.loss(self.lm, packed, rows)

    def gradient_norms(self, scale: float) -> tuple[dict[str, float], float]:
        """Returns the L2 norm of the gradient by parameter group, and of all; several processes would reduce here."""
        with phase("clip"):
            norms = {name: norm / scale for name, norm in self.state.masters.gradient_norms().items()}
        return norms, math.hypot(*norms.values())

    def optimizer_step(self, lr: float, norm: float, scale: float) -> None:
        """Unscales and clips the gradients, and updates the weights and their average."""
        state = self.state
        with phase("clip"):
            gradients = state.masters.sums
            if scale != 1:
                # Before clipping, whose limits are for the true gradient.
                torch._foreach_div_(gradients, scale)
            factor = clip_factor(norm, self.config.clip)
        with phase("optimizer"):
            state.masters.step(lr, factor)
            if state.ema:
                state.ema.update()
        if not self._checkpoint_memory_reserved:
            # Only now: optimisers allocate their state in the first step.
            self.parts.checkpoints.prepare(state.tensors())
            self._checkpoint_memory_reserved = True

    def save_checkpoint(self, *, last: bool = False) -> None:
        """Saves a checkpoint if one is due, or before the process ends; of several processes, one would write it."""
        done = len(self.state.steps)
        is_due = last or (self._checkpoint_is_due(done) and done < self.state.sampler.steps)
        if is_due and self._save(last=last) and self.callbacks:
            self.callbacks.on_save(done)

    def _save(self, *, last: bool) -> bool:
        self._last_checkpoint = time.monotonic()
        with phase("checkpoint"):
            return self.parts.recovery.save(last=last)

    def _checkpoint_is_due(self, steps: int) -> bool:
        """Returns whether a checkpoint is due after so many steps, by their number or by the clock."""
        config = self.config.checkpoint
        # Steps come first, as they are the same on every machine.
        if config.every_steps and steps % config.every_steps == 0:
            return True
        return config.every_seconds is not None and time.monotonic() - self._last_checkpoint >= config.every_seconds

    def _finish_step(self, values: StepValues, before: MonitorDecision | None, *, monitored: bool) -> None:
        """Checks a finished step, reports its values and decisions, and saves a checkpoint or intervenes."""
        monitor, recovery = self.state.monitor, self.parts.recovery
        with phase("watch"):
            after = monitor.observe(values) if monitored else []
        decisions = [*([before] if before else []), *after]
        gravest = after[0] if after else None
        if gravest and gravest.restores and self._act(gravest, decisions):
            return
        # Decisions of steps that a rollback took away are written with the first step that stays.
        reported = [*recovery.unreported, *decisions]
        recovery.unreported.clear()
        monitor.record(values.step, reported)
        if self.sink:
            with phase("watch"):
                self.sink.write(values, reported)
        if gravest and not gravest.restores and gravest.action != "warn":
            recovery.act(gravest, decisions)
        else:
            self.save_checkpoint()

    def _act(self, decision: MonitorDecision, decisions: list[MonitorDecision]) -> bool:
        """Carries out a decision; returns whether training was rolled back."""
        return self.parts.recovery.act(decision, decisions)

    def _halve_micro_batch(self, batch: Batch) -> Batch:
        """Halves the token budget from this step on, and cuts the step's batch again."""
        batches, recovery = self.parts.batches, self.parts.recovery
        budget = max(1, min(batches.budget, max(packed.tokens for packed in batch.packed)) // 2)
        log.warning(
            "out of memory at step %d: micro-batches of at most %d tokens from here on, the batch stays as it is",
            batch.step,
            budget,
        )
        # Noted at once: a resumed training would otherwise run out of memory again.
        batches.budget = recovery.log.fitting_budget = budget
        recovery.log.write(self.scratch)
        return batches.next(batch.step)
