"""Gates on the ranks of a LoRA adapter: training decides which components of which module stay."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.data.loader import Batch
from posttrain.train.lora import add_adapter, factor_module, restored
from posttrain.train.lora_config import LoraConfig
from posttrain.train.optim.optimizers import OptimizerState
from posttrain.train.optim.weights import Weights
from posttrain.train.step_hooks import StepHook

_LOW, _HIGH, _TEMPERATURE = -0.1, 1.1, 2 / 3
"""Limits and temperature of the hard concrete distribution, as in arXiv:1712.01312, section 4.1."""

_LEAST_NOISE = 1e-6  # uniform noise keeps so far from 0 and 1, where its logit is infinite

_OPEN = 2.0  # log alpha at the start: a gate is above 0 with a probability of 97%

_TRAVEL = 25.0  # that Adam can move log alpha in all steps, several times from open to shut

_WARMUP = 0.3  # share of the steps in which the target falls from 1 to the config's share

_BETAS = (0.0, 0.99)  # momentum would carry the share far below the target, which moves


def sample_gates(log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Samples hard concrete gates in [0, 1] (Louizos et al. 2018, arXiv:1712.01312, equations 10 and 11).

    Args:
        log_alpha: float32 [C].
        noise: float32 [C], uniform in (0, 1).

    Returns:
        float32 [C].
    """
    concrete = torch.sigmoid((noise.logit() + log_alpha) / _TEMPERATURE)
    return (concrete * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def final_gates(log_alpha: Tensor) -> Tensor:
    """Returns the gates without noise, in [0, 1] (equation 13)."""
    return (torch.sigmoid(log_alpha) * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """Returns the probability that a gate is above 0 (equation 12)."""
    return torch.sigmoid(log_alpha - _TEMPERATURE * math.log(-_LOW / _HIGH))


@dataclass(frozen=True)
class _GatedModule:
    """The factor B of an adapted module.

    Args:
        name: of the module in the base model.
        index: of the factor B among the trained weights.
        factor: the factor B in the model.
        master: the same in float32.
        components: its gates among all.
    """

    name: str
    index: int
    factor: Tensor
    master: Tensor
    components: slice


class RankGates(StepHook):
    """A hard concrete gate for each component of each module's adapter, B diag(z) A.

    The gates are trained with the adapter, with an augmented Lagrangian that drives the expected share s of the
    adapter's parameters to a target t: lambda_1 (s - t) + lambda_2 (s - t)^2, which the multipliers maximise, and t
    falls from 1 to the config's share (CoFi, Xia et al. 2022, arXiv:2204.00408, section 3.1; Wang et al. 2020,
    arXiv:1910.04732). All micro-batches of a step have the same noise, which follows from the seed and the step.

    Args:
        model: a peft model with one adapter.
        weights: the adapter's weights and their gradients.
        config: settings of the adapter, with ``gates``.
        seed: of the noise.
        steps: of the whole training.

    Attributes:
        log_alpha: float32 [C], of all components.
        costs: float64 [C], parameters of a component: a row of A and a column of B.
    """

    def __init__(self, model: nn.Module, weights: Weights, config: LoraConfig, seed: int, steps: int) -> None:
        assert config.gates is not None, "the config asks for gates"
        self._weights, self._seed = weights, seed
        self._share, self._warmup = config.gates, _WARMUP * steps
        factors, masters = dict(model.named_parameters()), weights.tensors()
        self._modules: list[_GatedModule] = []
        costs: list[float] = []
        for index, other in enumerate(weights.names):
            if ".lora_B." in other:
                # `.data`, as weights must not change for autograd, which is done with them before and after each use.
                first, second = factors[other.replace(".lora_B.", ".lora_A.")], factors[other].data
                rank, cost = len(first), first[0].numel() + second[:, 0].numel()
                components = slice(len(costs), len(costs) + rank)
                module = _GatedModule(factor_module(other), index, second, masters[f"master.{other}"], components)
                self._modules.append(module)
                costs += [float(cost)] * rank
        self.costs = torch.tensor(costs, dtype=torch.float64)
        self.log_alpha = torch.full((len(costs),), _OPEN, requires_grad=True)
        self._multipliers = torch.zeros(2, requires_grad=True)
        rate = _TRAVEL / max(1, steps)
        groups: list[dict[str, Any]] = [
            {"params": [("log_alpha", self.log_alpha)]},
            {"params": [("multipliers", self._multipliers)], "maximize": True},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=_BETAS, weight_decay=0.0)
        self._state = OptimizerState(self._optimizer)
        self._noise = torch.full_like(self.log_alpha, 0.5)
        self._gradient = torch.zeros_like(self.log_alpha)  # of the loss with respect to the step's gates

    def share(self) -> Tensor:
        """Returns the expected share of the adapter's parameters whose gate is above 0, float64."""
        return (open_probability(self.log_alpha) * self.costs).sum() / self.costs.sum()

    def target(self, step: int) -> float:
        """Returns the share that a step aims at."""
        progress = min(1.0, step / self._warmup) if self._warmup else 1.0
        return 1 + (self._share - 1) * progress

    @contextmanager
    def gradients(self, batch: Batch) -> Iterator[None]:
        self.metrics = {}
        with self.sampled(batch.step):
            yield

    @contextmanager
    def sampled(self, step: int) -> Iterator[None]:
        """Multiplies gates with a step's noise into the factors B for its forward and backward passes.

        At the end the gradients of the products become those of the factors B, and of the gates.
        """
        uniform = np.random.default_rng([self._seed, step]).random(len(self.costs))
        self._noise = torch.from_numpy(uniform).float().clamp(_LEAST_NOISE, 1 - _LEAST_NOISE)
        with torch.no_grad():
            gates = sample_gates(self.log_alpha, self._noise)
        with self._multiplied(gates):
            yield
        with torch.no_grad():
            sums = self._weights.finished_sums()
            for module in self._modules:
                total, factor = sums[module.index], module.master
                products = (total.double() * factor.double()).sum([dim for dim in range(factor.ndim) if dim != 1])
                self._gradient[module.components] = products.float().cpu()
                total.mul_(_along_columns(gates[module.components], total))

    def updated(self, step: int, scale: float) -> None:
        """Updates gates and multipliers by the gradient of the last `sampled`.

        The metrics are the expected share before, and the target.
        """
        share, target = self.share(), self.target(step)
        gap = share - target
        first, second = self._multipliers
        loss = (sample_gates(self.log_alpha, self._noise) * (self._gradient / scale)).sum()
        (loss + first * gap + second * gap.square()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.metrics = {"gates/share": share.item(), "gates/target": target}

    @contextmanager
    def result(self) -> Iterator[None]:
        """Multiplies the gates that the training would end with now into the factors B, within a ``with`` block."""
        with self._multiplied(self.kept()):
            yield

    @torch.no_grad()
    def kept(self) -> Tensor:
        """Returns the gates without noise, float32 [C], 0 for components that are cut.

        Where those above 0 have more parameters than the share, the smallest are cut; one component stays always.
        """
        gates = final_gates(self.log_alpha)
        order = torch.sort(self.log_alpha, descending=True, stable=True).indices
        fits = self.costs[order].cumsum(0) <= self._share * self.costs.sum()
        kept = torch.zeros_like(gates)
        chosen = order[fits & (gates[order] > 0)]
        if not len(chosen):
            chosen = order[self.costs[order] <= self._share * self.costs.sum()][:1]
        kept[chosen] = gates[chosen].clamp(min=torch.finfo().tiny)
        return kept

    def by_module(self) -> dict[str, Tensor]:
        """Returns the gates of `kept` by module."""
        kept = self.kept()
        return {module.name: kept[module.components] for module in self._modules}

    def tensors(self) -> dict[str, Tensor]:
        """Returns gates, multipliers and the state of their optimiser by name, without a copy."""
        state = {f"gates.optimizer.{name}": tensor for name, tensor in self._state.tensors().items()}
        return {"gates.log_alpha": self.log_alpha.detach(), "gates.multipliers": self._multipliers.detach()} | state

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned.

        Raises:
            UserError: the checkpoint has no gates, or those of another adapter.
        """
        saved = tensors.get("gates.log_alpha")
        if saved is None or saved.shape != self.log_alpha.shape:
            fix = "train as it began, or start again in another folder"
            raise UserError("the checkpoint has no gates of this adapter", where="train.lora.gates", fix=fix)
        own = "gates.optimizer."
        self._state.load({name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)})
        self.log_alpha.copy_(saved)
        self._multipliers.copy_(tensors["gates.multipliers"])

    @contextmanager
    def _multiplied(self, gates: Tensor) -> Iterator[None]:
        with restored([module.factor for module in self._modules]):
            for module in self._modules:
                module.factor.mul_(_along_columns(gates[module.components], module.factor))
            yield


def cut_adapter(lm: LanguageModel, gates: Mapping[str, Tensor], config: LoraConfig) -> LanguageModel:
    """Returns the model with an adapter of the components whose gates are above 0, each gate multiplied into B.

    Args:
        lm: the model with its whole adapter, which it loses.
        gates: float32 [rank] by module, such as of `RankGates.by_module`.
        config: settings of the whole adapter.
    """
    factors = {name: weight.detach() for name, weight in lm.model.named_parameters() if ".lora_" in name}
    ungated = {factor_module(name): len(factor) for name, factor in factors.items() if ".lora_embedding_A." in name}
    ranks = ungated | gate_ranks(gates, config)
    settings = config.model_copy(update={"ranks": ranks, "gates": None})
    cut = add_adapter(LanguageModel(lm.model.unload(), lm.tokenizer, lm.task), settings)
    with torch.no_grad():
        for name, weight in cut.model.named_parameters():
            if ".lora_" not in name:
                continue
            if factor_module(name) not in gates:  # an adapter of embeddings
                weight.copy_(factors[name])
                continue
            values = gates[factor_module(name)].to(weight.device)
            chosen = values.nonzero()[:, 0]
            if ".lora_A." in name:
                weight.copy_(factors[name][chosen])
            else:
                weight.copy_(factors[name][:, chosen] * _along_columns(values[chosen], weight))
    return cut


def gate_ranks(gates: Mapping[str, Tensor], config: LoraConfig) -> dict[str, int]:
    """Returns the ranks that gates leave, as ``train.lora.ranks`` takes them: by module, and 0 by the config's pattern.

    Args:
        gates: float32 [rank] by module.
        config: settings of the whole adapter.
    """
    # The longest first: a pattern also matches names that end in it.
    names = sorted(gates, key=lambda name: (-len(name), name))
    without = {pattern: 0 for pattern, rank in config.ranks.items() if rank == 0}
    return {name: int((gates[name] > 0).sum()) for name in names} | without


def _along_columns(gates: Tensor, factor: Tensor) -> Tensor:
    """Returns gates [R] in a shape and on the device to multiply a factor B [O, R, ...]."""
    return gates.to(factor.device).view(1, -1, *[1] * (factor.ndim - 2))
