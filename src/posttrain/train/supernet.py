"""A LoRA adapter as a supernet: its sub-networks have lesser ranks, share its weights, and are trained together."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.train.data.loader import Batch
from posttrain.train.lora import ADAPTER_WEIGHTS, add_adapter, factor_module, restored
from posttrain.train.lora_config import RANDOM_SUBNETWORKS, LoraConfig
from posttrain.train.objectives.loss import Loss, merge_metrics
from posttrain.train.step_hooks import MicroBatchPass, StepHook

Ranks = Mapping[str, int]
"""A sub-network: the ranks of its modules, by patterns of ``train.lora.ranks``."""

_MAX_DRAWS = 100  # of one random sub-network, until a module of it has an adapter


class Supernet(StepHook):
    """The sub-networks of a model's LoRA adapter.

    A module of rank r uses the first r rows of A and columns of B, as slimmable networks use their first channels
    (Yu et al. 2018, arXiv:1812.08928) and DyLoRA its first ranks (arXiv:2210.07558). The scale ``alpha / rank`` is that
    of the whole adapter, so that a sub-network is the adapter of its ranks with these weights.

    Args:
        model: a peft model with one adapter, whose weights are used in place.
        config: its settings, with the ranks of the sub-networks.
        seed: of the random sub-networks.
    """

    def __init__(self, model: Any, config: LoraConfig, seed: int) -> None:
        self._choices, self._seed = config.supernet, seed
        self._factors: list[tuple[str, int, Tensor]] = []  # pattern, dimension of the rank, A or B
        self._fixed = False  # whether a module has an adapter in every sub-network
        for name, weight in model.named_parameters():
            if ".lora_" not in name:
                continue
            pattern = config.pattern_of(factor_module(name))
            if pattern in self._choices:
                self._factors.append((pattern, _rank_dimension(name), weight))
            else:
                self._fixed = True

    def subnetworks(self, step: int) -> list[Ranks]:
        """Returns the sub-networks of a step: the largest, the smallest and random ones, by the seed and the step.

        The smallest has an adapter: where 0 everywhere would leave none, it has the least ranks above 0.
        """
        largest = {pattern: max(ranks) for pattern, ranks in self._choices.items()}
        smallest = {pattern: min(ranks) for pattern, ranks in self._choices.items()}
        if not self.has_adapter(smallest):
            smallest = {pattern: min(filter(None, ranks), default=0) for pattern, ranks in self._choices.items()}
        if smallest == largest:
            return [largest]
        generator = np.random.default_rng([self._seed, step])
        return [largest, smallest, *(self._draw(generator, largest) for _ in range(RANDOM_SUBNETWORKS))]

    def has_adapter(self, ranks: Ranks) -> bool:
        """Returns whether a module of a sub-network has an adapter."""
        return self._fixed or any(ranks.values())

    @contextmanager
    def active(self, ranks: Ranks) -> Iterator[None]:
        """Makes the model a sub-network within a ``with`` block.

        Rows of A and columns of B beyond its ranks are 0 meanwhile: so the others' gradients are those of the
        sub-network, and their own are 0.
        """
        # `.data`, as weights must not change for autograd, which is done with them at both ends of the block.
        unused = [
            weight.data.narrow(dimension, ranks[pattern], weight.shape[dimension] - ranks[pattern])
            for pattern, dimension, weight in self._factors
        ]
        with restored(unused):
            for part in unused:
                part.zero_()
            yield

    def backward(self, batch: Batch, number: int, run: MicroBatchPass, divisor: float) -> Loss:
        """Runs the passes of a step's sub-networks (the sandwich rule, arXiv:1903.05134, section 3.3).

        The gradient is the mean of theirs. The paper sums: the mean leaves clipping and the limits of the monitor as
        they are.

        Returns:
            The largest network's loss, with the losses of the smallest and of random ones as metrics.
        """
        subnetworks = self.subnetworks(batch.step)
        losses = []
        for ranks in subnetworks:
            with self.active(ranks):
                losses.append(run(divisor * len(subnetworks)))
        largest, *others = losses
        names = ["loss/smallest", *["loss/random"] * (len(others) - 1)]
        measured = [{name: (loss.sum, loss.count)} for name, loss in zip(names, others, strict=False)]
        return replace(largest, metrics=merge_metrics([largest.metrics, *measured]))

    def _draw(self, generator: np.random.Generator, largest: Ranks) -> Ranks:
        for _ in range(_MAX_DRAWS):
            ranks = {pattern: choices[generator.integers(len(choices))] for pattern, choices in self._choices.items()}
            if self.has_adapter(ranks):
                return ranks
        return largest


def add_subnetwork(lm: LanguageModel, adapter: Path, config: LoraConfig) -> LanguageModel:
    """Returns the model with a sub-network of a saved adapter.

    Args:
        lm: the base model.
        adapter: folder of the adapter.
        config: settings with the ranks of the sub-network, at most those of the adapter.

    Raises:
        UserError: no module of the sub-network has an adapter.
    """
    adapted = add_adapter(lm, config)
    saved = load_file(adapter / ADAPTER_WEIGHTS)
    with torch.no_grad():
        for name, weight in adapted.model.named_parameters():
            if ".lora_" in name:
                dimension = _rank_dimension(name)
                factor = saved[name.replace(".default", "")]
                weight.copy_(factor.narrow(dimension, 0, weight.shape[dimension]))
    return adapted


def _rank_dimension(name: str) -> int:
    """Returns the dimension of a factor that is the rank: rows of A, columns of B."""
    return 0 if name.rpartition(".lora_")[2].removeprefix("embedding_").startswith("A.") else 1
