"""Supervised fine-tuning."""

from posttrain.train.objectives.config import SftConfig
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sequences import Sequences


def sft(sequences: Sequences, config: SftConfig | None = None) -> Loss:
    """Negative log-likelihood of the supervised tokens, a mean over tokens, not sequences, as TRL has it."""
    return Loss(-sequences.sums.sum(), float(sequences.counts.sum()))
