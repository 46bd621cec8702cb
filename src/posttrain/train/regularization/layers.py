"""Changes layers of a model while it trains: dropout and noise."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.regularization.config import NoiseConfig
from posttrain.train.regularization.embedding_noise import neftune

# What transformers' configs call the dropout of attention weights, of residual sums and of embedded tokens.
_CONFIG_NAMES = (
    *("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    *("resid_pdrop", "resid_dropout", "residual_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout"),
    *("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout"),
)


@contextmanager
def apply_noise(lm: LanguageModel, config: NoiseConfig) -> Iterator[None]:
    """Applies the configured dropout and NEFTune, in training mode only.

    Raises:
        UserError: a dropout is set, and the model has none.
    """
    with set_dropout(lm, config.dropout):
        if not config.neftune:
            yield
            return
        with neftune(lm, config.neftune):
            yield


@contextmanager
def set_dropout(lm: LanguageModel, share: float | None) -> Iterator[None]:
    """Sets the dropout of a model, and restores its own afterwards; None leaves it as it is.

    Raises:
        UserError: the model has no dropout.
    """
    if share is None:
        yield
        return
    model = lm.model.get_base_model() if hasattr(lm.model, "get_base_model") else lm.model
    config = model.config.get_text_config()
    fields = {name: share for name in _CONFIG_NAMES if hasattr(config, name)}
    if not fields:
        raise UserError(f"{config.model_type} has no dropout", where="train.noise.dropout", fix="leave it out")
    before = _set_fields(model, fields)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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
