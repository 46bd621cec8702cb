"""Training from scratch: a model with random weights, of which only config and tokenizer are read."""

from pathlib import Path
from typing import Any

import torch

from posttrain.models.language_model import DTYPES, LanguageModel, check_head
from posttrain.models.loading import load_config, load_generation_config, load_tokenizer, model_file_errors
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.shape import trained_config


def check_from_scratch(config: TrainConfig) -> None:
    """Raises a UserError where the config asks for weights that training from scratch throws away."""
    name, needed = "", ""
    if config.method == "lora":
        name, needed = "train.method=lora", "train.method=full"
    elif config.start == "champion":
        name, needed = "train.start=champion", "train.start=base"
    elif config.spec.classifier:
        name, needed = f"train.objective={config.objective.name}", "a language model first"
    if name:
        raise UserError(
            f"{name} starts from trained weights, and training from scratch has none",
            where="train.from_scratch",
            fix=f"take {needed}, or false here",
        )


def random_model(folder: Path, task: TaskConfig, config: TrainConfig, seed: int) -> LanguageModel:
    """Creates the model that a folder's config describes, with the random weights of its family.

    Args:
        folder: holds ``config.json`` and a tokenizer; weights that lie there are not read.
        task: task of the model.
        config: its shape and dtype.
        seed: seed of the weights; the same seed gives the same weights whatever was drawn before.

    Raises:
        UserError: the folder describes no causal language model, or the model cannot have the shape.
    """
    from transformers import AutoModelForCausalLM

    what = "describes no causal language model"
    tokenizer, described = load_tokenizer(str(folder), what), load_config(str(folder), what)
    described = trained_config(described, config)
    # Torch's own generator stays as it was.
    with model_file_errors(what, str(folder)), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        # Drawn in float32 and rounded at the end: one seed means the same model in every dtype.
        model = factory.from_config(described, dtype=torch.float32, trust_remote_code=False)
    if generation := load_generation_config(str(folder)):
        model.generation_config = generation
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = LanguageModel(model.to(DTYPES[config.dtype]).to(device).eval(), tokenizer, task)
    check_head(lm, folder)
    return lm
