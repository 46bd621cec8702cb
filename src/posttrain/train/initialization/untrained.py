"""A model from its config only."""

from pathlib import Path
from typing import Any

import torch

from posttrain.models.folder import first_line
from posttrain.models.language_model import DTYPES, LanguageModel, check_head
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.initialization.config import InitializationConfig
from posttrain.train.initialization.initialize import initialize
from posttrain.train.objectives.registry import OBJECTIVES


def check_from_scratch(config: TrainConfig) -> None:
    """Raise a UserError where the config asks for weights that training from scratch throws away."""
    name, needed = "", ""
    if config.method == "lora":
        name, needed = "train.method=lora", "train.method=full"
    elif config.start == "champion":
        name, needed = "train.start=champion", "train.start=base"
    elif OBJECTIVES[config.objective].output in ("reward", "classes"):
        name, needed = f"train.objective={config.objective}", "a language model first"
    if name:
        raise UserError(
            f"{name} goes on from trained weights, and training from scratch has none",
            where="train.initialization.method",
            fix=f"take {needed}, or none",
        )


def untrained(
    folder: Path, task: TaskConfig, config: InitializationConfig, seed: int, dtype: str = "bfloat16"
) -> LanguageModel:
    """The model that a folder describes, with weights drawn at random.

    Args:
        folder: holds ``config.json`` and a tokenizer; weights that lie there are not read.
        task: what the model is asked to do.
        config: how the weights begin.
        seed: of the weights; the same seed gives the same weights whatever was drawn before.
        dtype: one of ``bfloat16``, ``float32``, ``float16``; they are drawn in float32.

    Raises:
        UserError: the folder describes no causal language model, or the config does not fit it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            made: Any = AutoModelForCausalLM
            model = made.from_config(described, dtype=torch.float32, trust_remote_code=False)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"describes no causal language model: {first_line(error)}", where=str(folder)) from None
    initialize(model, config, seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = LanguageModel(model.to(DTYPES[dtype]).to(device).eval(), tokenizer, task)
    check_head(lm, folder)
    return lm
