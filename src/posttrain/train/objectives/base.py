"""The base class of all objectives, and what one is built from.

To add an objective, write its formula as a plain function of log-probabilities, logits or hidden states that returns a
`Loss`, a subclass of `Objective` that computes those from a model, and an `ObjectiveSpec` that names the class.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.train.objectives.config import ObjectiveConfig
from posttrain.train.objectives.loss import Loss, weighted_count

_DEFAULT_TOKENS = 4096


class TrainArguments(Protocol):
    """The settings of a training that objectives read; ``TrainConfig`` has them all."""

    @property
    def objective(self) -> ObjectiveConfig:
        """Name and settings of the objective."""

    @property
    def batch_size(self) -> int:
        """Examples per optimiser step."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def micro_batch_tokens(self) -> int | Literal["auto"]:
        """Tokens in memory at once."""

    @property
    def dtype(self) -> str:
        """Dtype of the weights that the model computes with."""


@dataclass(frozen=True)
class ObjectiveInputs:
    """Everything that an objective is built from.

    Args:
        units: the records', in their order and in the shape that `build.record_shape` names.
        config: the training's.
        lm: the loaded model, to inspect; no objective keeps it, as a teacher may need its memory.
        targets: the class of each record, or whether its answer is desirable.
        margins: the margin by which each chosen answer is better.
        weights: float64 [units], above 0, each unit's weight in the loss; None: 1 each.
    """

    units: Sequence[Unit]
    config: TrainArguments
    lm: LanguageModel
    targets: Sequence[int] = ()
    margins: Sequence[float] = ()
    weights: np.ndarray | None = None


class Objective(ABC):
    """The units of a training under its objective.

    The trainer adds up the sums of a step's micro-batches and divides them by what ``begin_step`` returned before the
    first, so that neither loss nor gradient depends on how a step is cut.

    Args:
        units: sequences that the trainer packs; it refers to them by row.
        config: names the objective and its settings.
    """

    formula: ClassVar[Callable[..., Loss]]
    """The objective as a plain function."""
    has_teacher = False
    """True if ``cache_teacher_outputs`` runs a teacher, for which the trained model need not be in memory."""
    weights: Tensor | None = None
    """float64 [units]: each unit's weight in the loss, in both its sum and its count; None: 1 each."""

    def __init__(self, units: Sequence[Unit], config: TrainArguments) -> None:
        self.units, self.config = units, config
        self.settings: Any = config.objective

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        """Builds the objective; override it where more than units and config is needed."""
        return cls(inputs.units, inputs.config)

    @classmethod
    def record_units(cls, units: Sequence[Unit]) -> Sequence[Unit]:
        """Returns the units that steps draw: as many of each record, in the records' order.

        Args:
            units: the records', one each.
        """
        return units

    @classmethod
    def mark_supervised(cls, unit: Unit, settings: Any) -> Unit:
        """Marks the tokens of a record's unit that the objective takes a loss on."""
        return unit

    @property
    def inference_tokens(self) -> int:
        """Tokens in memory at once in passes without gradients."""
        budget = self.config.micro_batch_tokens
        return budget if isinstance(budget, int) else _DEFAULT_TOKENS

    def cache_teacher_outputs(self, folder: Path) -> None:
        """Runs the teacher once, before the training, and caches its outputs in ``folder``."""
        return None

    @contextmanager
    def attach_modules(self, lm: LanguageModel) -> Iterator[None]:
        """Attaches modules that are trained with the model and discarded afterwards."""
        yield

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, groups: Iterable[Sequence[int]] = ()) -> None:
        """Computes what depends on the initial weights, and caches it in ``folder``.

        Args:
            padded: whether the model needs padded rows.
            groups: the rows of the micro-batches in which training first reads the units.
        """
        return None

    def begin_step(self, lm: LanguageModel, groups: Sequence[Sequence[int]]) -> float:
        """Begins an optimiser step.

        Args:
            groups: the rows of each micro-batch.

        Returns:
            The divisor of the sum of all micro-batches' losses: here the number of units, by their weights.
        """
        rows = [row for group in groups for row in group]
        return weighted_count(self.weights, rows, [1] * len(rows))

    @abstractmethod
    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        """Computes the loss of the units ``rows``, which ``packed`` holds in this order."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Runs the model without dropout and other noise."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
