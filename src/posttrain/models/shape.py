"""Reads a model's shape from its config alone: no weight is downloaded or loaded."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.models.chat import ChatTemplate
from posttrain.models.gguf import load_gguf_config, load_gguf_tokenizer
from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import load_config, load_tokenizer, model_file_errors
from posttrain.models.sources import TINY_MODEL, fetch
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError

LAYER_LISTS = ("layer_types", "no_rope_layers")
"""Keys of a config that have an entry for each layer."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer that the memory of its training depends on.

    Attributes:
        family: transformers' ``model_type``.
        hidden: width of the hidden states.
        layers: decoder layers.
        vocabulary: rows of the output head; 0 without a head.
        tied: whether the output head is the embedding.
    """

    family: str
    hidden: int
    layers: int
    vocabulary: int
    tied: bool


def read_config(source: str) -> Any:
    """Reads the transformers config of a model.

    Args:
        source: as ``posttrain.models.sources.locate`` returns it. Downloads only ``config.json`` of a Hub id, and
            reads only the header of a ``.gguf`` file.

    Raises:
        UserError: there is none, or transformers does not know the family.
    """
    if source == TINY_MODEL:
        with tempfile.TemporaryDirectory() as folder:
            fetch(source, Path(folder))
            return load_config(folder)
    path = Path(source)
    if path.suffix == ".gguf":
        return load_gguf_config(path)
    return load_config(source)


def read_chat(source: str, config: Any) -> ChatTemplate:
    """Reads a model's tokenizer and template; downloads the tokenizer of a Hub id. ``source`` is as in `read_config`.

    Raises:
        UserError: there is no tokenizer, or none that names a stop token.
    """
    path = Path(source)
    if source == TINY_MODEL:
        tokenizer: Any = byte_tokenizer()
    elif path.suffix == ".gguf":
        tokenizer = load_gguf_tokenizer(path)
    else:
        tokenizer = load_tokenizer(source)
    return LanguageModel(meta_model(config), tokenizer, TaskConfig()).chat


def meta_model(config: Any, *, classifier: bool = False) -> Any:
    """Builds a config's model on the ``meta`` device: names and shapes of all its weights, no numbers.

    Args:
        config: a transformers config.
        classifier: whether it scores a text instead of predicting the next token.

    Raises:
        UserError: no such model has this config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    what = "classifier" if classifier else "causal language model"
    with model_file_errors(f"no {what} has this config", "model"), torch.device("meta"):
        return kind.from_config(config, trust_remote_code=False)


def change_config(config: Any, changes: Mapping[str, Any], where: str = "model") -> Any:
    """Returns a copy of a transformers config with other values; a value of None is computed again from the others.

    Raises:
        UserError: the family's config refuses the values.
    """
    with model_file_errors(f"models of type {config.model_type} cannot have this shape", where):
        return type(config).from_dict({**config.to_dict(), **changes})


def resized_config(
    config: Any,
    where: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    inner: int | None = None,
) -> Any:
    """Returns a copy of a transformers config with another shape; None: as it is.

    A head size that is the hidden size divided by the heads stays that, another one is kept. Without ``kv_heads`` a
    model whose query heads have each their own key and value head stays such a one. What a family says of each layer
    follows from its rule for the number of layers.

    Args:
        where: config section of the arguments, named in errors.

    Raises:
        UserError: the numbers do not fit each other, or the family.
    """
    if config.get_text_config() is not config:
        raise UserError(f"the shape of models of type {config.model_type} cannot be changed", where=where)
    shape = {name: getattr(config, name, None) for name in ("hidden_size", "num_attention_heads")}
    old_hidden, old_heads = shape.values()
    if not isinstance(old_hidden, int) or not isinstance(old_heads, int):
        raise UserError(f"models of type {config.model_type} have no shape that is known here", where=where)
    grouped = getattr(config, "num_key_value_heads", None)
    old_size = getattr(config, "head_dim", None)
    new_hidden, new_heads = hidden or old_hidden, heads or old_heads
    if kv_heads is not None and grouped is None:
        raise UserError(f"models of type {config.model_type} have no groups of heads", where=f"{where}.kv_heads")
    new_groups = kv_heads or (new_heads if grouped in (None, old_heads) else grouped)
    if new_heads % new_groups:
        what = f"{new_heads} heads cannot share {new_groups} key and value heads"
        fix = "heads are a multiple of kv_heads"
        raise UserError(what, where=f"{where}.{'heads' if kv_heads is None else 'kv_heads'}", fix=fix)
    implied = old_size in (None, old_hidden // old_heads)
    # Rotary positions turn pairs of numbers.
    unit = 2 * new_heads if getattr(config, "rope_parameters", None) else new_heads
    if implied and new_hidden % unit:
        what = f"a hidden size of {new_hidden} cannot be divided among {new_heads} heads"
        fix = f"give a multiple of {unit}, or other heads"
        raise UserError(what, where=f"{where}.{'heads' if hidden is None else 'hidden'}", fix=fix)
    changes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        _inner_name(config): inner,
        "num_key_value_heads": None if grouped is None else new_groups,
        "head_dim": new_hidden // new_heads if implied and old_size is not None else None,
    }
    named = {config.attribute_map.get(name, name): value for name, value in changes.items() if value is not None}
    # Computed again from the number of layers.
    by_layer = dict.fromkeys(name for name in LAYER_LISTS if layers is not None and hasattr(config, name))
    return change_config(config, {**by_layer, **named}, where)


def model_shape(model: Any) -> ModelShape:
    """Returns the shape of a model with or without a head; one on the ``meta`` device suffices.

    Raises:
        UserError: it is not a transformer with a list of decoder layers.
    """
    config = model.config.get_text_config()
    layers = decoder_layers(model)
    hidden = getattr(config, "hidden_size", None)
    if not layers or not isinstance(hidden, int):
        raise UserError(f"models of type {config.model_type} have no shape that is known here", where="model")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return ModelShape(
        family=config.model_type,
        hidden=hidden,
        layers=len(layers),
        vocabulary=0 if head is None else len(head.weight),
        tied=head is not None and head.weight is embedding.weight,
    )


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """Returns the first list of modules in a model, which are its layers."""
    return next((module for module in model.modules() if isinstance(module, nn.ModuleList)), None)


def _inner_name(config: Any) -> str:
    return "n_inner" if hasattr(config, "n_inner") else "intermediate_size"
