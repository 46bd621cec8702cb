"""Create a model from its config alone, with weights drawn by the configured method."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from posttrain.models.language_model import DTYPES, LanguageModel, check_head
from posttrain.models.loading import load_config, load_generation_config, load_tokenizer, model_file_errors
from posttrain.models.shape import resized_config
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.initialization.config import InitializationConfig, InitMethod, InitRuleConfig
from posttrain.train.optim.parameter_groups import ParameterLocation, parameter_locations

# How the families call the projection whose result is added to the residual stream.
_RESIDUAL_PROJECTIONS = re.compile(
    r"(?:^|\.)(?:o_proj|out_proj|down_proj|c_proj|dense|dense_4h_to_h|fc2|fc_out|wo|w2|output_linear)(?:\.weight)?$"
)


@torch.no_grad()
def initialize_weights(model: nn.Module, config: InitializationConfig, seed: int) -> None:
    """Draws matrices by the config's method, embeddings from N(0, std), and parameters that match a rule by the rule.

    Norms, biases and all else stay as they are, and so do embeddings of padding. Each weight has random numbers of its
    own, which depend on the seed and its name only: a rule for one changes no other.

    Args:
        model: a transformers model as it was made from its config.
        config: how.
        seed: seed of the random numbers.

    Raises:
        UserError: a rule matches nothing or does not fit, or no weight is known to end a block where that is needed.
    """
    locations = parameter_locations(model)
    modules = dict(model.named_modules())
    layers = max((location.depth + 1 for location in locations.values() if location.depth is not None), default=0)
    unused = list(config.rules)
    ending = 0
    for name, weight in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        rule = next((rule for rule in config.rules if re.search(rule.match, name)), None)
        if rule in unused:
            unused.remove(rule)
        role = _weight_role(name, weight, owner, locations[name], layers)
        distribution = _choose_distribution(name, weight.shape, locations[name], config, rule, role)
        if distribution is None:
            continue
        ending += role.ends_block
        padding = owner.padding_idx if isinstance(owner, nn.Embedding) else None
        # A generator for each weight: a rule for one must not change the numbers of those after it.
        weight.copy_(distribution.draw(weight.shape, _weight_generator(seed, name)))
        if padding is not None:
            weight[padding] = 0
    _check_rules_apply(config, unused, ending)


@dataclass(frozen=True)
class WeightRole:
    """The properties of a weight that decide its distribution.

    Args:
        fans: number of inputs of an output, and of outputs that an input reaches; None where it is no matrix.
        layer: number of its layer, from 1; None outside of the layers.
        layers: how many there are.
        ends_block: whether it gives what a block adds to the residual stream.
    """

    fans: tuple[int, int] | None
    layer: int | None
    layers: int
    ends_block: bool


def _weight_role(
    name: str, weight: nn.Parameter, owner: nn.Module, location: ParameterLocation, layers: int
) -> WeightRole:
    inside = location.depth is not None and location.depth >= 0
    return WeightRole(
        fan_in_and_fan_out(weight, owner),
        location.depth + 1 if inside and location.depth is not None else None,
        layers,
        inside and location.kind == "matrix" and _RESIDUAL_PROJECTIONS.search(name) is not None,
    )


@dataclass(frozen=True)
class InitialDistribution:
    """A uniform or normal distribution of mean 0."""

    std: float
    uniform: bool = False

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draws a float32 tensor on the generator's device."""
        if self.uniform:
            # A uniform distribution over [-b, b] has the variance b^2 / 3.
            bound = math.sqrt(3) * self.std
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return torch.empty(shape).normal_(0, self.std, generator=generator)


def _choose_distribution(
    name: str,
    shape: torch.Size,
    location: ParameterLocation,
    config: InitializationConfig,
    rule: InitRuleConfig | None,
    role: WeightRole,
) -> InitialDistribution | None:
    if rule is not None:
        return init_distribution(rule.method, rule.gain, config.std if rule.std is None else rule.std, role, name)
    if location.kind == "embedding":
        return InitialDistribution(config.std)
    # Other two-dimensional parameters, such as a state space's decay rates, mean something: they stay.
    matrix = role.fans is not None and (name.endswith("weight") or len(shape) == 3)
    if location.kind in ("matrix", "head") and matrix and config.method != "none":
        return init_distribution(config.method, config.gain, config.std, role, name)
    return None


def _check_rules_apply(config: InitializationConfig, unused: Sequence[InitRuleConfig], ending: int) -> None:
    if unused:
        raise UserError(
            f"no parameter's name matches `{unused[0].match}`",
            where=f"train.initialization.rules.{config.rules.index(unused[0])}",
        )
    if config.method == "depth_scaled" and not ending:
        raise UserError(
            "it is not known which of the model's weights end a block",
            where="train.initialization.method",
            fix="take normal, with a rule for those weights",
        )


def _weight_generator(seed: int, name: str) -> torch.Generator:
    own = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # A seed is a signed 64-bit integer: the shift leaves the sign's bit free.
    return torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)


def init_distribution(method: InitMethod, gain: float, std: float, role: WeightRole, name: str) -> InitialDistribution:
    """Returns the distribution of a weight with fans n and m.

    - ``normal``: N(0, (gain std)^2).
    - ``xavier``: uniform of variance gain^2 2 / (n + m) (X. Glorot, Y. Bengio, Understanding the difficulty of training
      deep feedforward neural networks, 2010, equation 16).
    - ``kaiming``: N(0, gain^2 2 / n) (K. He et al., 2015, arXiv:1502.01852, equation 10).
    - ``depth_scaled``: as ``normal``, divided by sqrt(2 layers) where a block ends (A. Radford et al., Language Models
      are Unsupervised Multitask Learners, 2019, section 2.3).
    - ``ds_init``: as ``xavier``, divided by sqrt(l) in layer l (B. Zhang et al., 2019, arXiv:1908.11365).
    - ``zeros``: 0.

    Raises:
        UserError: the method needs fans, and the weight is no matrix.
    """
    if method == "zeros":
        return InitialDistribution(0.0)
    if method in ("normal", "depth_scaled"):
        # Each layer adds to the residual stream twice, after attention and after the feed-forward block.
        shrunk = math.sqrt(2 * role.layers) if method == "depth_scaled" and role.ends_block else 1.0
        return InitialDistribution(gain * std / shrunk)
    if role.fans is None:
        raise UserError(
            f"{method} is for matrices, and `{name}` is none", where="train.initialization", fix="use normal or zeros"
        )
    inputs, outputs = role.fans
    if method == "kaiming":
        return InitialDistribution(gain * math.sqrt(2 / inputs))
    depth = math.sqrt(role.layer) if method == "ds_init" and role.layer else 1.0
    return InitialDistribution(gain * math.sqrt(2 / (inputs + outputs)) / depth, uniform=True)


def fan_in_and_fan_out(weight: Tensor, owner: nn.Module) -> tuple[int, int] | None:
    """Counts the inputs of each output of a weight, and the outputs of each input.

    Args:
        weight: weight of a linear layer, an embedding, a convolution, or of several experts [E, ...].
        owner: the module whose parameter it is.
    """
    from transformers.pytorch_utils import Conv1D

    if weight.ndim < 2:
        return None
    if isinstance(owner, _ConvNd):
        window = math.prod(weight.shape[2:])
        # An input reaches the outputs of its own group only.
        return weight.shape[1] * window, weight.shape[0] // owner.groups * window
    if weight.ndim > 3:
        return None
    first, second = weight.shape[-2:]
    # GPT-2's Conv1D and the experts of some models hold [inputs, outputs], nn.Linear [outputs, inputs].
    by_input: Any = isinstance(owner, Conv1D) or (weight.ndim == 3 and getattr(owner, "is_transposed", False))
    return (first, second) if by_input else (second, first)


def model_from_config(
    folder: Path, task: TaskConfig, config: InitializationConfig, seed: int, dtype: str = "bfloat16"
) -> LanguageModel:
    """Creates the model that a folder's config describes, with random weights.

    Args:
        folder: holds ``config.json`` and a tokenizer; weights that lie there are not read.
        task: task of the model.
        config: initialisation of the weights.
        seed: seed of the weights; the same seed gives the same weights whatever was drawn before.
        dtype: one of ``bfloat16``, ``float32``, ``float16``; they are drawn in float32.

    Raises:
        UserError: the folder describes no causal language model, or the config does not fit it.
    """
    from transformers import AutoModelForCausalLM

    what = "describes no causal language model"
    tokenizer, described = load_tokenizer(str(folder), what), load_config(str(folder), what)
    if config.shape.is_set:
        described = resized_config(described, "train.initialization.shape", **config.shape.model_dump())
    # For all that is not drawn below, such as a state space's decay rates; torch's own generator stays as it was.
    with model_file_errors(what, str(folder)), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        # Drawn in float32 and rounded at the end: one seed means the same model in every dtype.
        model = factory.from_config(described, dtype=torch.float32, trust_remote_code=False)
    if generation := load_generation_config(str(folder)):
        model.generation_config = generation
    initialize_weights(model, config, seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = LanguageModel(model.to(DTYPES[dtype]).to(device).eval(), tokenizer, task)
    check_head(lm, folder)
    return lm
