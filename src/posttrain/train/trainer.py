"""The training loop: exact resume, sums and counts, float32 where it matters."""

import contextlib
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import micro_batches, pack
from posttrain.models.reading import packing
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.progress import task
from posttrain.train.checkpoint import Checkpoint, Checkpoints
from posttrain.train.compiled import compile_layers
from posttrain.train.config import TrainConfig
from posttrain.train.examples import epoch_order
from posttrain.train.lesson import Lesson
from posttrain.train.masters import Masters
from posttrain.train.schedule import rate
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.policies import stopped
from posttrain.train.watch.sinks.base import Sink
from posttrain.train.watch.throughput import Decoder, matmul_peak, mfu, training_flops
from posttrain.train.watch.values import StepValues
from posttrain.train.watch.watch import Watch


@dataclass
class Trainer:
    """One training of one model, in place.

    Args:
        lm: the model.
        lesson: what it learns.
        config: how.
        seed: of the order of the data and of dropout.
        scratch: where the training keeps what it resumes from. Its outcome does not depend on when or how often it
            was killed.
        sink: what is told of every step.
    """

    lm: LanguageModel
    lesson: Lesson
    config: TrainConfig
    seed: int
    scratch: Path
    sink: Sink | None = None
    steps: list[StepValues] = field(default_factory=list, init=False)
    left_out: dict[str, Any] = field(default_factory=lambda: {"steps": [], "factor": 1.0}, init=False)

    def fit(self) -> list[StepValues]:
        """Train.

        Returns:
            What each step measured.

        Raises:
            WorkError: if it went wrong in a way that the config says to stop at, or that could not be mended.
        """
        order = self._order()
        self.config.schedule.check(len(order))
        make_folder(self.scratch)
        if self.config.compile:
            compile_layers(self.lm)
        self.watch = Watch(self.config.watch)
        self.masters = Masters(self.lm.model, self.config.optimizer)
        working = torch.float32 if self.config.precision == "float32" else torch.bfloat16
        self._peak = matmul_peak(self.lm.device.type, working)
        self._decoder = Decoder.of(self.lm.model.config.get_text_config())
        try:
            with (
                packing(self.lm, self._longest()) as packs,
                Checkpoints(self.scratch / "checkpoints", self.config.checkpoint) as self.checkpoints,
            ):
                self._padded = not packs
                torch.manual_seed(self.seed)
                self.lm.model.eval()
                self.lesson.refer(self.lm, self.scratch / "reference.f32", padded=self._padded)
                self.lm.model.train()
                self._resume()
                with task("training", len(order), "steps") as advance:
                    advance(len(self.steps))
                    while len(self.steps) < len(order):
                        before = len(self.steps)
                        self._step(*order[before], len(order))
                        advance(len(self.steps) - before)
        finally:
            self.masters.close()
            self.lm.model.eval()
        return self.steps

    def _order(self) -> list[tuple[int, list[int]]]:
        """Epoch and units of every step."""
        count = len(self.lesson.units)
        return [
            (epoch, rows)
            for epoch in range(self.config.epochs)
            for rows in epoch_order(count, self.config.batch_size, self.seed if self.config.shuffle else None, epoch)
        ]

    def _step(self, epoch: int, rows: Sequence[int], steps: int) -> None:
        start, number = time.perf_counter(), len(self.steps)
        learning = rate(self.config.schedule, self.config.learning_rate, number, steps) * self.left_out["factor"]
        units = [self.lesson.units[row] for row in rows]
        loss, supervised = self._accumulate(rows)
        norm = self.masters.gradient_norm()
        decision = None
        if number in self.left_out["steps"]:
            self.masters.forget()
        elif (decision := self.watch.before_step(loss, norm, supervised, number)) and decision.action != "warn":
            if self._act(decision):
                return
            self.masters.forget()
        else:
            self.masters.step(learning, scale=self.config.clip / (norm + 1e-6) if norm > self.config.clip else 1.0)
            if not self.steps:
                self.checkpoints.prepare(self.masters.tensors())
        lengths = [len(sequence.ids) for unit in units for sequence in unit]
        seconds = time.perf_counter() - start
        values = StepValues(
            step=number,
            epoch=epoch,
            loss=loss,
            grad_norm=norm,
            lr=learning,
            tokens=sum(lengths),
            supervised_tokens=supervised,
            seconds=seconds,
            tokens_per_second=sum(lengths) / seconds,
            memory_bytes=_memory(),
            mfu=self._mfu(lengths, supervised, seconds),
        )
        found = self.watch.observe(values) if number not in self.left_out["steps"] else []
        self.steps.append(values)
        if self.sink:
            self.sink.write(values, [decision, *found] if decision else found)
        if found and found[0].action != "warn":
            self._act(found[0])
        elif self.checkpoints.due(len(self.steps)) and len(self.steps) < steps:
            self._save()

    def _accumulate(self, rows: Sequence[int]) -> tuple[float, int]:
        """Add up the gradients of one step's micro-batches: the gradient of the mean over all that it counts.

        Returns:
            The mean loss, and the supervised tokens.
        """
        units = [self.lesson.units[row] for row in rows]
        parts = list(micro_batches(units, self.config.micro_batch_tokens))
        packed = [pack(part, self.lm.device, padded=self._padded) for part in parts]
        supervised = sum(len(batch.targets) for batch in packed)
        whole = supervised if self.config.objective == "sft" else len(units)
        total, first = 0.0, 0
        for part, batch in zip(parts, packed, strict=True):
            with self._autocast():
                loss = self.lesson.loss(self.lm, batch, rows[first : first + len(part)])
            (loss.sum / max(whole, 1)).backward()  # type: ignore[no-untyped-call]
            total += loss.sum.item()
            first += len(part)
        return total / max(whole, 1), supervised

    def _act(self, decision: Decision) -> bool:
        """Carry a decision out, noting it first so that a kill does not undo it.

        Returns:
            Whether training went back; if not, it goes on with the next step.
        """
        if decision.action == "stop":
            raise stopped(decision)
        first, last = decision.finding.since, decision.finding.step
        if decision.action == "lower_rate":
            self.left_out["factor"] *= self.config.watch.rate_factor
        if decision.drops_gradient:
            self.left_out["steps"] = sorted({*self.left_out["steps"], *range(first, last + 1)})
        write_atomically(self._notes, json.dumps(self.left_out | {"decisions": self.watch.report()}).encode())
        if not decision.restores:
            return False
        oldest = min(self.checkpoints.steps(), default=first)
        checkpoint = self.checkpoints.rewind(max(first, oldest))
        if checkpoint is None:
            return False  # nothing to go back to: what is left out are the gradients from here on
        self._load(checkpoint)
        self.watch.rolled_back(checkpoint.state["watch"])
        if self.sink:
            self.sink.rewind(len(self.steps))
        return True

    @property
    def _notes(self) -> Path:
        return self.scratch / "left_out.json"

    def _save(self) -> None:
        random = {"random.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["random.cuda"] = torch.cuda.get_rng_state()
        state = {"steps": [step.to_json() for step in self.steps], "watch": self.watch.state()}
        self.checkpoints.save(len(self.steps), Checkpoint(self.masters.tensors() | random, state))

    def _resume(self) -> None:
        if self._notes.exists():
            self.left_out = json.loads(self._notes.read_bytes())
        if checkpoint := self.checkpoints.latest():
            self._load(checkpoint)
            self.watch.load(checkpoint.state["watch"])
        if self._notes.exists():
            self.watch.decisions = [Decision.from_json(one) for one in self.left_out.pop("decisions")]
        if self.sink:
            self.sink.rewind(len(self.steps))

    def _load(self, checkpoint: Checkpoint) -> None:
        self.masters.load(checkpoint.tensors)
        self.masters.forget()
        torch.set_rng_state(checkpoint.tensors["random.cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"])
        self.steps = [StepValues.from_json(step) for step in checkpoint.state["steps"]]

    def _longest(self) -> int:
        return max(len(sequence.ids) for unit in self.lesson.units for sequence in unit)

    def _mfu(self, lengths: Sequence[int], supervised: int, seconds: float) -> float | None:
        if self._decoder is None:
            return None
        frozen = self.config.method == "lora"
        return mfu(training_flops(self._decoder, lengths, supervised, weights_frozen=frozen), seconds, self._peak)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.config.precision == "autocast":
            return torch.autocast(self.lm.device.type, torch.bfloat16)
        return contextlib.nullcontext()


def _memory() -> int:
    """The most bytes in use so far: the accelerator's, or the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
