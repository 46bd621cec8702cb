"""Evaluates a model on held-out records while it trains; says which evaluation was the best, and when to stop."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, pack
from posttrain.models.task import TaskConfig
from posttrain.parallel.mesh import Mesh
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.train.config import EvaluationConfig, TrainConfig
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.units import group_by_tokens
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.objectives.base import Objective, ObjectiveInputs, evaluation_mode
from posttrain.train.objectives.build import build_objective
from posttrain.train.objectives.config import SftConfig
from posttrain.train.objectives.loss import Loss, mean_metrics, merge_metrics
from posttrain.train.optim.config import SurgeryConfig
from posttrain.train.out_of_memory import run_in_groups
from posttrain.train.state import random_state, set_random_state
from posttrain.train.step_hooks import StepHook
from posttrain.train.training_set import TrainingSet, read_training_set

log = logging.getLogger("posttrain")


class Score(Protocol):
    """Scores the answers of a model."""

    def check(self, records: pa.Table) -> None:
        """Raises a UserError if a record cannot be scored."""

    def __call__(self, model: LanguageModel, records: pa.Table) -> Mapping[str, float]:
        """Returns metrics as ``SCORER/METRIC``; of a scorer's first metric, higher is better."""


@dataclass(frozen=True)
class HeldOut:
    """What a training is evaluated on.

    Args:
        records: rows of the record schema; None: the share of the training records that the config names.
        score: scores the answers; None: the loss alone is measured.
    """

    records: pa.Table | None = None
    score: Score | None = None

    def split(self, records: pa.Table, data: float | str | None, seed: int) -> tuple[Self, np.ndarray]:
        """Takes the share of the training records, if it is not known what is held out.

        Args:
            records: R records to train on.
            data: ``train.evaluate.data``.
            seed: of the draw.

        Returns:
            What is held out, and bool [R], True for the records to train on.
        """
        if isinstance(data, float):
            rows = held_out_rows(records, data, seed)
            return replace(self, records=records.filter(pa.array(rows))), ~rows
        assert self.records is not None, "records that are not a share were read"
        if shared := {*self.records["input_id"].to_pylist()} & {*records["input_id"].to_pylist()}:
            log.warning("  held out, and trained on too: %d inputs; on these no model is measured fairly", len(shared))
        return self, np.ones(records.num_rows, bool)


def held_out_rows(records: pa.Table, share: float, seed: int) -> np.ndarray:
    """Draws about a share of the records, which does not depend on their order.

    Records of one group, or without a group of one input, are on one side.

    Args:
        records: R rows of the record schema.
        share: above 0, below 1.
        seed: of the draw.

    Returns:
        bool [R], True for held-out records.

    Raises:
        UserError: all records belong together.
    """
    groups, inputs = records["group"].to_pylist(), records["input_id"].to_pylist()
    keys = [input_id if group is None else group for group, input_id in zip(groups, inputs, strict=True)]
    counts = Counter(keys)
    if len(counts) < 2:
        raise UserError("all records have one input or group: none can be held out", where="train.evaluate.data")
    drawn, wanted = set[str](), share * len(keys)
    for key in sorted(counts, key=lambda key: digest([seed, key]))[:-1]:
        if wanted <= 0:
            break
        drawn.add(key)
        wanted -= counts[key]
    return np.array([key in drawn for key in keys])


class Evaluation:
    """The evaluations of a training on held-out records.

    An evaluation leaves weights, random generators and the order of the data as they are. Which one was the best, and
    whether the training stops, follows from the values of the steps alone, so that a resumed training decides the same.

    Args:
        config: the section ``train.evaluate``.
        objective: the loss on the held-out units.
        batch_size: examples of a step; objectives that estimate something on a step do so here too.
        score: scores the model's answers; None: the loss alone is measured.
        records: the records that are scored.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        objective: Objective,
        batch_size: int,
        score: Score | None = None,
        records: pa.Table | None = None,
    ) -> None:
        self.config, self._objective, self._batch_size = config, objective, batch_size
        self._score, self._records = score, records
        self._padded, self._attention = False, ""

    @classmethod
    def build(
        cls, lm: LanguageModel, source: str, held_out: HeldOut, config: TrainConfig, task: TaskConfig, scratch: Path
    ) -> Self:
        """Tokenises the held-out records and builds the objective over them; with a teacher, the loss is `sft`'s.

        Args:
            lm: the model before its training.
            source: the model, as ``posttrain.models.sources.locate`` names it.
            held_out: with its records.
            scratch: folder of the token sets.

        Raises:
            UserError: a record cannot be used.
        """
        assert held_out.records is not None, "a share of the training records was drawn before"
        config = _plain(config)
        data = read_held_out_set(source, held_out.records, config, task, scratch)
        if left_out := len(data.too_long) + len(data.identical):
            log.warning("  held out, and left out: %d of %d records", left_out, held_out.records.num_rows)
        if held_out.score:
            held_out.score.check(data.records.table)
        margins = () if data.records.margins is None else data.records.margins.tolist()
        objective = build_objective(ObjectiveInputs(data.units, config, lm, data.units.targets.tolist(), margins))
        return cls(config.evaluate, objective, config.batch_size, held_out.score, data.records.table)

    @property
    def units(self) -> Sequence[Unit]:
        """The held-out units."""
        return self._objective.units

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, attention: str) -> None:
        """Computes what the loss needs of the initial weights.

        Args:
            folder: folder of the caches.
            padded: whether the model needs padded rows.
            attention: the model's own attention, which answers are generated with.
        """
        self._padded, self._attention = padded, attention
        self._objective.prepare(lm, folder, padded=padded)

    @torch.no_grad()
    def measure(
        self, done: int, lm: LanguageModel, hooks: Sequence[StepHook], tokens: int, mesh: Mesh
    ) -> dict[str, float]:
        """Measures the model that the training would end with now.

        Args:
            done: number of steps so far, for the log.
            hooks: the training's.
            tokens: tokens in memory at once.
            mesh: the processes that train together.

        Returns:
            ``loss``, the objective's other metrics, and those of the scorers.
        """
        random = random_state()
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook.result())
            stack.enter_context(evaluation_mode(lm.model))
            values = self._losses(lm, tokens, mesh)
            if self._score:
                stack.enter_context(_attention(lm, self._attention))
                # Compiled layers would be traced again for each length of a cache.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                values |= self._score(lm, self._records)
        set_random_state(random)
        values = mesh.from_first(values)
        log.info("  held out, after %d steps: %s", done, ", ".join(f"{name} {v:.4g}" for name, v in values.items()))
        return values

    def is_due(self, done: int, sampler: BatchSampler) -> bool:
        """Returns whether the model is evaluated after ``done`` of the sampler's steps."""
        if self.config.every is not None:
            return done == sampler.steps or done % self.config.every == 0
        return done == sampler.steps or sampler.position(done).epoch != sampler.position(done - 1).epoch

    def best(self, steps: Sequence[StepValues]) -> int | None:
        """Returns after how many steps the best evaluation was, the first of equal ones; None before the first."""
        values = [(value, done) for done, value in self._values(steps) if math.isfinite(value)]
        return min(values)[1] if values else None

    def stops(self, steps: Sequence[StepValues]) -> bool:
        """Returns whether the last ``patience`` evaluations were no better than one before."""
        # A training ends right after an evaluation, so that not every step has to look at all before it.
        if self.config.patience is None or not steps or not steps[-1].evaluation:
            return False
        best = self.best(steps) or 0
        return sum(done > best for done, _ in self._values(steps)) >= self.config.patience

    def _values(self, steps: Sequence[StepValues]) -> Iterator[tuple[int, float]]:
        """Yields each evaluation's number of steps, and the value that decides: lower is better."""
        for done, step in enumerate(steps, 1):
            if step.evaluation and not self.config.metrics:
                yield done, step.evaluation["loss"]
            for name, value in step.evaluation.items() if self.config.metrics else ():
                if name.startswith(f"{self.config.metrics[0]}/"):
                    yield done, -value
                    break

    def _losses(self, lm: LanguageModel, tokens: int, mesh: Mesh) -> dict[str, float]:
        """Returns the mean loss and the objective's metrics, from sums and counts over all units."""
        objective, units = self._objective, self._objective.units
        rows = range(mesh.rank, len(units), mesh.world_size)
        total = count = 0.0
        metrics = []

        def loss_of(group: Sequence[int]) -> Loss:
            packed = pack([units[row] for row in group], lm.device, padded=self._padded)
            return objective.loss(lm, packed, list(group))

        for start in range(0, len(rows), self._batch_size):
            groups = list(group_by_tokens(units, rows[start : start + self._batch_size], tokens))
            count += objective.begin_step(lm, groups)
            for _, loss in run_in_groups(units, groups, loss_of):
                total += loss.sum.item()
                metrics.append(loss.metrics)
        total, count = mesh.sum((total, count))
        return {"loss": total / count if count else math.nan, **mean_metrics(mesh.sum(merge_metrics(metrics)))}


def read_held_out_set(
    source: str, records: pa.Table, config: TrainConfig, task: TaskConfig, scratch: Path
) -> TrainingSet:
    """Reads held-out records as a training reads its own; arguments as of `read_training_set`."""
    return read_training_set(source, records, _plain(config), task, scratch)


def _plain(config: TrainConfig) -> TrainConfig:
    """Returns the settings of the loss on held-out records, which have no weights, phases and tasks."""
    plain: dict[str, Any] = {"weight": None, "phases": [], "surgery": SurgeryConfig()}
    if config.has_teacher:  # its outputs are those for the training records
        plain["objective"] = SftConfig()
    return config.model_copy(update=plain)


@contextmanager
def _attention(lm: LanguageModel, name: str) -> Iterator[None]:
    """Gives the model another attention within a ``with`` block."""
    config: Any = lm.decoder.config
    before = config._attn_implementation
    lm.model.set_attn_implementation(name)
    try:
        yield
    finally:
        lm.model.set_attn_implementation(before)
