"""What one optimiser step took: time by phase, memory, and how much of the machine it used."""

import time
from typing import Any

import torch

from posttrain.models.language_model import LanguageModel
from posttrain.train.config import TrainConfig
from posttrain.train.loader import Lengths
from posttrain.train.memory.available import peak_bytes
from posttrain.train.watch import phases
from posttrain.train.watch.throughput import Decoder, matmul_peak, mfu, training_flops


class Meter:
    """Measures one step after another, each from `start` on."""

    def __init__(self, lm: LanguageModel, config: TrainConfig) -> None:
        dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
        self._peak = matmul_peak(lm.device.type, dtype)
        self._decoder = Decoder.of(lm.model.config.get_text_config(), config.objective)
        self._frozen = config.method == "lora"
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._began, self._phases = time.perf_counter(), phases.seconds()

    def read(self, lengths: Lengths, supervised: int, waited: float) -> dict[str, Any]:
        """The fields of `StepValues` that a clock and a ruler give, for the step that began last.

        Args:
            lengths: of the step.
            supervised: supervised tokens.
            waited: seconds for data.
        """
        seconds, tokens = time.perf_counter() - self._began, sum(lengths.sequences)
        share = None
        if self._decoder is not None:
            computed, pairs = lengths.computed, lengths.pairs
            flops = training_flops(self._decoder, computed, pairs, supervised, weights_frozen=self._frozen)
            share = mfu(flops, seconds, self._peak)
        return {
            "tokens": tokens,
            "supervised_tokens": supervised,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_bytes(),
            "data_wait": waited / seconds,
            "mfu": share,
            "phases": phases.since(self._phases),
        }
