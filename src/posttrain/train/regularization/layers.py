"""Changes layers of a model while it trains: dropout, noise, and convolutions with standardised weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.regularization.config import DropoutConfig, NoiseConfig
from posttrain.train.regularization.embedding_noise import neftune

# What transformers' configs call them.
_CONFIG_NAMES = {
    "attention": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "residual": (
        "resid_pdrop",
        "resid_dropout",
        "residual_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
    ),
    "embedding": ("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout"),
}


_MIN_DEVIATION = 1e-5  # standard deviation, so that a filter of equal weights does not divide by 0


@contextmanager
def apply_noise(lm: LanguageModel, config: NoiseConfig) -> Iterator[None]:
    """Applies the configured dropout and NEFTune, in training mode only.

    Raises:
        UserError: the model has no place for a dropout that is set.
    """
    with set_dropout(lm, config.dropout):
        if not config.neftune:
            yield
            return
        with neftune(lm, config.neftune):
            yield


@contextmanager
def set_dropout(lm: LanguageModel, config: DropoutConfig) -> Iterator[None]:
    """Sets the config's dropout, and restores the model's own afterwards.

    Raises:
        UserError: the model has no place for one that is set.
    """
    model = lm.model.get_base_model() if hasattr(lm.model, "get_base_model") else lm.model
    fields = _config_fields(model.config.get_text_config(), config)
    if not fields:
        yield
        return
    before = _set_fields(model, fields)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _config_fields(model: Any, config: DropoutConfig) -> dict[str, float]:
    """Returns the fields of the model's config with their new values."""
    fields: dict[str, float] = {}
    for position in _CONFIG_NAMES:
        share: float | None = getattr(config, position)
        if share is None:
            continue
        names = [name for name in _CONFIG_NAMES[position] if hasattr(model, name)]
        if not names:
            raise UserError(
                f"{model.model_type} has no {position} dropout",
                where=f"train.noise.dropout.{position}",
                fix="leave it out",
            )
        fields |= dict.fromkeys(names, share)
    return fields


def _set_fields(model: Any, fields: dict[str, float]) -> list[tuple[Any, str, Any]]:
    """Sets the dropout of every module to that of a fresh model with these config fields.

    Returns:
        What was there: object, attribute and value.
    """
    changed = copy.deepcopy(model.config)
    for name, share in fields.items():
        setattr(changed.get_text_config(), name, share)
    # A fresh model shows which attribute each family derives from which field; on `meta` it takes no memory.
    with torch.device("meta"):
        modules = dict(type(model)(changed).named_modules())
    before: list[tuple[Any, str, Any]] = []
    for path, module in model.named_modules():
        if path in modules:
            for name in _dropout_attributes(modules[path]):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, getattr(modules[path], name))
    own = model.config.get_text_config()  # which some families read in each forward pass
    for name, share in fields.items():
        before.append((own, name, getattr(own, name)))
        setattr(own, name, share)
    return before


def _dropout_attributes(module: nn.Module) -> list[str]:
    """Returns the names of a module's dropout rates."""
    if isinstance(module, nn.Dropout):
        return ["p"]
    return [name for name, value in vars(module).items() if "drop" in name and type(value) in (int, float)]


@contextmanager
def standardize_weights(lm: LanguageModel) -> Iterator[None]:
    """Trains convolutions with standardised weights, which stay in the model afterwards.

    S. Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight Standardization, 2019,
    arXiv:1903.10520: each filter less its mean and by its standard deviation, over all inputs of an output channel.
    transformers' ``Conv1D`` is a linear layer, and filters of a single weight would be 0: neither is touched.

    Raises:
        UserError: the model has no such convolution that is trained.
    """
    convolutions = [
        module
        for module in lm.model.modules()
        if isinstance(module, _ConvNd) and module.weight.requires_grad and module.weight[0].numel() > 1
    ]
    if not convolutions:
        raise UserError(
            f"{lm.model.config.model_type} has no convolution that is trained",
            where="train.weight_standardization",
            fix="set it to false",
        )
    for module in convolutions:
        parametrize.register_parametrization(module, "weight", _Standardized())
    try:
        yield
    finally:
        for module in convolutions:
            # The standardised weights become the model's own, so that serving it needs nothing of this.
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


class _Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        # In 16 bits each of the next steps would round the filters once more.
        filters = weight.float().flatten(1)
        centred = filters - filters.mean(1, keepdim=True)
        deviation = (centred.square().mean(1, keepdim=True) + _MIN_DEVIATION**2).sqrt()
        standardized: Tensor = (centred / deviation).view_as(weight).to(weight.dtype)
        return standardized
