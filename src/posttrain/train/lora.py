"""Low-rank adapters: put on before training, folded into the weights after it."""

from pathlib import Path

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.config import LoraConfig


def adapt(lm: LanguageModel, config: LoraConfig) -> LanguageModel:
    """The model with a fresh float32 adapter as its only trainable weights."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets,
        task_type="CAUSAL_LM",
    )
    try:
        return LanguageModel(get_peft_model(lm.model, settings), lm.tokenizer, lm.task)
    except ValueError as error:
        raise UserError(str(error).splitlines()[0], where="train.lora.targets") from None


def fold(adapted: LanguageModel, adapter: Path) -> LanguageModel:
    """Save the adapter into a folder, and add it to the base weights (in float32, so that nothing is rounded twice)."""
    adapted.model.save_pretrained(adapter)
    merged = adapted.model.float().merge_and_unload()
    return LanguageModel(merged, adapted.tokenizer, adapted.task)
