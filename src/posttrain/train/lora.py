"""Add LoRA adapters before training, and merge them into the weights after it."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from posttrain.models.language_model import DTYPES, LanguageModel
from posttrain.models.loading import first_line
from posttrain.models.shape import meta_model, read_config
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora_config import LoraConfig
from posttrain.train.shape import trained_config

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_ADAPTER_CONFIG = "adapter_config.json"


def add_adapter(lm: LanguageModel, config: LoraConfig) -> LanguageModel:
    """Returns the model with a fresh float32 adapter as its only trainable weights."""
    return LanguageModel(attach_lora(lm.model, config), lm.tokenizer, lm.task)


def check_ranks(source: str, config: TrainConfig) -> None:
    """Checks patterns of ``train.lora.ranks``, and the share of gates, by the model's config; loads no weights.

    Args:
        source: the model, as `posttrain.models.sources.locate` returns it.
        config: the training.

    Raises:
        UserError: a pattern matches no module of the model, or the share has no room for a single rank.
    """
    lora = config.lora
    if config.method == "lora" and (lora.ranks or lora.gates is not None):
        classifier = config.spec.classifier
        model = meta_model(trained_config(read_config(source), config), classifier=classifier)
        adapted = attach_lora(model, lora, low_cpu_mem_usage=True)
        if lora.gates is not None:
            _check_share(adapted, lora.gates)


def _check_share(adapted: Any, share: float) -> None:
    weights = {name: weight for name, weight in adapted.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    if not weights:
        raise UserError("are of the ranks of matrices, and none is adapted", where="train.lora.gates")
    total = sum(weight.numel() for weight in weights.values())
    # A row of A and a column of B.
    least = min(
        weight[0].numel() + weights[name.replace(".lora_A.", ".lora_B.")][:, 0].numel()
        for name, weight in weights.items()
        if ".lora_A." in name
    )
    if least > share * total:
        what = f"{share:g} of {total:,} parameters has no room for the {least:,} of one rank"
        raise UserError(what, where="train.lora.gates", fix="raise it")


def attach_lora(model: Any, config: LoraConfig, **options: Any) -> Any:
    """Adds a fresh LoRA adapter to a transformers model, perhaps on the ``meta`` device; options are peft's.

    Raises:
        UserError: the model has none of the modules that are to be adapted, or a pattern of ``ranks`` matches none.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    patterns = _matching_patterns(model, config)
    excluded = [module for module, pattern in patterns.items() if config.ranks[pattern] == 0]
    # By module, as the order of patterns is lost where peft's settings are saved sorted.
    ranks = {module: config.ranks[pattern] for module, pattern in patterns.items() if config.ranks[pattern]}

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        rank_pattern=ranks,
        # Else peft would divide alpha by each module's own rank.
        alpha_pattern={module: config.alpha * rank / config.rank for module, rank in ranks.items()},
        exclude_modules=excluded or None,
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",  # whose head is trained whole, in a copy
    )
    with warnings.catch_warnings():
        # peft asks transformers for it, which no user can do anything about
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # of modules that match and are not targets; patterns that match no target are refused below
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        try:
            adapted = get_peft_model(model, settings, **options)
        except ValueError as error:
            where = "train.lora.ranks" if excluded else "train.lora.targets"
            raise UserError(first_line(error), where=where) from None
    targeted = set(adapted.base_model.targeted_module_names)
    used = {patterns.get(module) for module in targeted}
    for pattern, rank in config.ranks.items():
        if rank and pattern not in used:
            what = f"`{pattern}` matches no adapted module that is not an earlier pattern's"
            raise UserError(what, where="train.lora.ranks", fix="correct it, or move it before a wider one")
    for saved in (settings.rank_pattern or {}, settings.alpha_pattern or {}):
        for module in saved.keys() - targeted:
            del saved[module]
    return adapted


def _matching_patterns(model: Any, config: LoraConfig) -> dict[str, str]:
    """Returns the first pattern of ``ranks`` that matches each module with a matrix, by name, where one does.

    Raises:
        UserError: a pattern for modules without adapter matches none.
    """
    if not config.ranks:
        return {}
    matrices = {name.rpartition(".")[0] for name, weight in model.named_parameters() if weight.ndim == 2}
    patterns = {module: pattern for module in sorted(matrices) if (pattern := config.pattern_of(module)) is not None}
    for pattern, rank in config.ranks.items():
        if rank == 0 and pattern not in patterns.values():
            raise UserError(f"`{pattern}` matches no module", where="train.lora.ranks", fix="correct or remove it")
    return patterns


def factor_module(name: str) -> str:
    """Returns the module of the base model that a factor of an adapter is of, by the factor's name."""
    return name.removeprefix("base_model.model.").split(".lora_")[0]


@contextmanager
def restored(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Gives weights, at the end of a ``with`` block, the values back that they had at its beginning.

    Args:
        weights: tensors without gradients, such as the ``data`` of parameters.
    """
    kept = [weight.clone() for weight in weights]
    try:
        yield
    finally:
        for weight, values in zip(weights, kept, strict=True):
            weight.copy_(values)


def merge_adapter(adapted: LanguageModel, adapter: Path, dtype: str = "bfloat16") -> LanguageModel:
    """Saves the adapter to a folder, and merges it into the base weights.

    Args:
        adapted: the model with its adapter, which it loses.
        adapter: the folder.
        dtype: dtype that 16-bit layers are rounded to after they were merged in float32, one of ``bfloat16``,
            ``float32``, ``float16``; layers in float32 stay as they are.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted.model.save_pretrained(adapter)
    _strip_run_details(adapter)
    _untie_adapted_head(adapted.model)
    # Layer by layer: the whole model in float32 can be more than the memory that sufficed to train it.
    for layer in adapted.model.modules():
        if isinstance(layer, BaseTunerLayer):
            _merge_layer(layer, DTYPES[dtype])
    return LanguageModel(adapted.model.unload(), adapted.tokenizer, adapted.task)


def _untie_adapted_head(adapted: Any) -> None:
    """Gives a tied head its own weights where the adapter changes it or the embedding: merging would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    model: Any = adapted.get_base_model()
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends):
        return
    layers: list[Any] = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    embedding, head = layers
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        model.tie_weights()


def _merge_layer(layer: Any, dtype: torch.dtype) -> None:
    weights = dict(layer.get_base_layer().named_parameters())
    rounded = {name: weight.data for name, weight in weights.items() if weight.dtype != torch.float32}
    layer.get_base_layer().float()
    layer.merge()
    for name, before in rounded.items():
        merged = weights[name].data
        # Into the weight's own memory where it fits: the file that it is mapped from stays so until the last is freed.
        weights[name].data = before.copy_(merged) if before.dtype == dtype else merged.to(dtype)


def set_base_model(adapter: Path, model: str) -> None:
    """Writes the base model of a saved adapter, a folder or a Hub id, where peft looks for it."""
    file = adapter / _ADAPTER_CONFIG
    _write_adapter_config(file, json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": model})


def _strip_run_details(adapter: Path) -> None:
    """Removes everything that differs between runs of the same training, so that they write the same bytes.

    peft notes the base model's path, in its settings and in a form for a model card, and writes a set of module names
    in an order that changes from process to process.
    """
    (adapter / "README.md").unlink(missing_ok=True)
    file = adapter / _ADAPTER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = None
    for key in ("target_modules", "exclude_modules"):
        if isinstance(settings[key], list):
            settings[key].sort()
    _write_adapter_config(file, settings)


def _write_adapter_config(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
