"""Models that give numbers for a whole text instead of next tokens: a reward, or one for each class.

They are transformers' own ``...ForSequenceClassification`` models, which read the numbers off the state at the last
token that is no padding.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.folder import check_folder, first_line
from posttrain.models.language_model import DTYPES, LanguageModel, check_whole, load
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

REWARD = ("reward",)
"""The one output of a reward model."""


def load_classifier(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    """Load a model with one output a name: as it is where it has them already, else a language model with a new head.

    Args:
        folder: in Hugging Face layout.
        task: what the model is asked to do.
        dtype: as `load` takes it.
        names: of the K outputs.

    Raises:
        UserError: the folder holds no such model, one with other outputs, or one of a family that has no such head.
    """
    check_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or []):
        return _load_whole(folder, task, dtype, names)
    return _with_head(load(folder, task, dtype), names, folder)


def outputs(lm: LanguageModel, states: Tensor) -> Tensor:
    """float32 [N, K], the outputs for hidden states [N, D]."""
    found: Tensor = lm.model.score(states)
    return found.float()


def output_names(lm: LanguageModel) -> list[str]:
    """The names of the K outputs."""
    names = lm.model.config.id2label
    return [names[place] for place in sorted(names)]


def padding_token(lm: LanguageModel) -> int | None:
    """What transformers takes for padding when it looks for a text's last token."""
    token: int | None = lm.model.config.get_text_config().pad_token_id
    return token


def _load_whole(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"no model for sequences: {first_line(error)}", where=str(folder)) from None
    model, loading = found
    check_whole(loading, folder)
    model.generation_config = GenerationConfig.from_model_config(model.config)  # where stop tokens are looked for
    lm = LanguageModel(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, task)
    if output_names(lm) != list(names):
        what = f"has the outputs {', '.join(output_names(lm)[:5])}, and {', '.join(names[:5])} are wanted"
        raise UserError(what, where=str(folder))
    return lm


def _with_head(lm: LanguageModel, names: Sequence[str], folder: Path) -> LanguageModel:
    """The language model's decoder under a new head, whose weights are drawn as transformers draws them."""
    from transformers import AutoModelForSequenceClassification

    config: Any = lm.model.config
    if config.get_text_config().pad_token_id is None:
        if lm.tokenizer.pad_token is None:
            lm.tokenizer.pad_token = lm.tokenizer.eos_token
        config.get_text_config().pad_token_id = lm.tokenizer.pad_token_id
    config.id2label = dict(enumerate(names))
    config.label2id = {name: place for place, name in enumerate(names)}
    try:
        with torch.device("meta"):  # all but the head is there already
            model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UserError(f"no model for sequences: {first_line(error)}", where=str(folder)) from None
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise UserError(f"models of type {config.model_type} have no head for sequences", where=str(folder))
    weight = lm.model.get_output_embeddings().weight
    head = nn.Linear(model.score.in_features, len(names), bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.normal_(head.weight, std=getattr(config.get_text_config(), "initializer_range", 0.02))
    model.score = head
    setattr(model, model.base_model_prefix, lm.model.base_model)
    model.config = config  # the decoder's own, so that its attention is switched in one place
    model.generation_config = lm.model.generation_config
    return LanguageModel(model.eval(), lm.tokenizer, lm.task)
