"""The base class of all objectives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.functions import FUNCTIONS
from posttrain.train.objectives.loss import Loss

_DEFAULT_TOKENS = 4096


class Objective(ABC):
    """The units of a training under its objective.

    The trainer adds up the sums of a step's micro-batches and divides them by what ``begin`` gave before the first, so
    that neither loss nor gradient depends on how a step is cut.

    Args:
        units: what the trainer packs; it names them by their places.
        config: names the objective and its settings.
    """

    has_teacher = False
    """Whether ``consult`` has something to do; the model that is trained need not be in memory then."""
    weights: Tensor | None = None
    """float64 [units]: what each counts in the loss, in its sum and in what that is divided by; None: 1 each."""

    def __init__(self, units: Sequence[Unit], config: TrainConfig) -> None:
        self.units, self.config = units, config
        self.function: Callable[..., Loss] = FUNCTIONS[config.objective]
        self.settings: Any = getattr(config, config.objective, None)

    @property
    def tokens_at_once(self) -> int:
        """How many are in memory where nothing is learned of them, which takes little."""
        budget = self.config.micro_batch_tokens
        return budget if isinstance(budget, int) else _DEFAULT_TOKENS

    def cache_teacher_outputs(self, folder: Path) -> None:
        """Ask a teacher, once and ahead of the training, and keep its answers in ``folder``."""
        return None

    @contextmanager
    def attach_modules(self, lm: LanguageModel) -> Iterator[None]:
        """The model with what is trained beside it and thrown away after."""
        yield

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, parts: Iterable[Sequence[int]] = ()) -> None:
        """Compute what the model says before its first step, and keep it in ``folder``.

        Args:
            padded: whether the model must be given padded rows.
            parts: the micro-batches in which the training will meet the units first.
        """
        return None

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """Take up a step.

        Args:
            parts: the places of each micro-batch's units.

        Returns:
            What the sum of all the micro-batches' losses is divided by: here the units, by their weights.
        """
        rows = [row for part in parts for row in part]
        return self.counted(rows, [1] * len(rows))

    def counted(self, rows: Sequence[int], counts: Sequence[int]) -> float:
        """The sum of what some units count, each times its weight."""
        if self.weights is None:
            return float(sum(counts))
        return float(self.weights[list(rows)] @ torch.tensor(counts, dtype=torch.float64))

    def row_weights(self, rows: Sequence[int], like: Tensor) -> Tensor | None:
        """float32 [rows], on the device of ``like``; None where all count alike."""
        return None if self.weights is None else self.weights[list(rows)].to(like.device, torch.float32)

    @abstractmethod
    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        """The loss of the units ``rows``, which ``packed`` holds in this order."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model without dropout and other noise."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
