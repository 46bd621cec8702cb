"""Changes layers of a model while it trains: dropout and noise."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

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
