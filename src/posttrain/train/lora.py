"""Add LoRA adapters before training, and merge them into the weights after it."""

import json
import warnings
from pathlib import Path
from typing import Any

from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import first_line
from posttrain.store.errors import UserError
from posttrain.train.config import LoraConfig

_ADAPTER_CONFIG = "adapter_config.json"


def add_adapter(lm: LanguageModel, config: LoraConfig) -> LanguageModel:
    """Returns the model with a fresh float32 adapter as its only trainable weights."""
    return LanguageModel(attach_lora(lm.model, config), lm.tokenizer, lm.task)


def attach_lora(model: Any, config: LoraConfig, **options: Any) -> Any:
    """Adds a fresh LoRA adapter to a transformers model, perhaps on the ``meta`` device; options are peft's.

    Raises:
        UserError: the model has none of the modules that are to be adapted.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",  # whose head is trained whole, in a copy
    )
    with warnings.catch_warnings():
        # peft asks transformers for it, which no user can do anything about
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        try:
            return get_peft_model(model, settings, **options)
        except ValueError as error:
            raise UserError(first_line(error), where="train.lora.targets") from None


def merge_adapter(adapted: LanguageModel, adapter: Path) -> LanguageModel:
    """Saves the adapter to a folder, and merge it into the base weights."""
    adapted.model.save_pretrained(adapter)
    _strip_run_details(adapter)
    # In float32, so that nothing is rounded twice.
    merged = adapted.model.float().merge_and_unload()
    return LanguageModel(merged, adapted.tokenizer, adapted.task)


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
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()
    _write_adapter_config(file, settings)


def _write_adapter_config(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
