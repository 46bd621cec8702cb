"""What a training learns from: units of sequences in the trainer's order, and the loss of some of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posttrain.models.head import token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, micro_batches, pack
from posttrain.models.reading import read
from posttrain.store.files import write_atomically
from posttrain.store.progress import task
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.functions import FUNCTIONS
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.objectives.sequences import Sequences


@dataclass
class Lesson:
    """The units of a training under its objective.

    Args:
        units: one sequence each, or the chosen and the rejected one of a pair.
        config: names the objective and its settings.
        reference: float32 [units, sequences], log-probabilities under the weights that training starts from; filled
            by ``refer`` where the objective needs them.
    """

    units: Sequence[Unit]
    config: TrainConfig
    reference: Tensor | None = field(default=None, init=False)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        """The loss of the units ``rows``, which ``packed`` holds in this order."""
        found = sequences(lm, packed)
        name = self.config.objective
        function, settings = FUNCTIONS[name], getattr(self.config, name, None)
        if OBJECTIVES[name].shape == "completion":
            return function(found, settings)
        pair = found[slice(0, None, 2)], found[slice(1, None, 2)]
        if not OBJECTIVES[name].reference:
            return function(*pair, settings)
        assert self.reference is not None, "refer first"
        before = self.reference[list(rows)].to(found.sums.device)
        first, second = (Sequences(before[:, side], pair[side].counts) for side in (0, 1))
        return function(*pair, first, second, settings)

    def refer(self, lm: LanguageModel, cache: Path, *, padded: bool) -> None:
        """Compute the reference's log-probabilities once, before the first step, and keep them in a file."""
        if not OBJECTIVES[self.config.objective].reference:
            return
        if not cache.exists():
            write_atomically(cache, _log_probabilities(lm, self.units, self.config, padded).numpy().tobytes())
        held = np.frombuffer(cache.read_bytes(), np.float32).reshape(len(self.units), -1)
        self.reference = torch.from_numpy(held.copy())


def sequences(lm: LanguageModel, packed: Packed) -> Sequences:
    """Log-probabilities of a micro-batch's sequences, with their graph."""
    found = token_log_probabilities(lm, read(lm, packed), packed.targets)
    sums = found.new_zeros(packed.sequences).index_add(0, packed.sequence, found)
    return Sequences(sums, torch.bincount(packed.sequence, minlength=packed.sequences))


@torch.no_grad()
def _log_probabilities(lm: LanguageModel, units: Sequence[Unit], config: TrainConfig, padded: bool) -> Tensor:
    found = []
    with task("reading the reference", len(units), "pairs") as advance:
        for part in micro_batches(units, config.micro_batch_tokens):
            found.append(sequences(lm, pack(part, lm.device, padded=padded)).sums.cpu())
            advance(len(part))
    return torch.cat(found).view(len(units), -1)
