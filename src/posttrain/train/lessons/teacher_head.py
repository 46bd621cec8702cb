"""A teacher's output head by itself: all that has to stay of it once its hidden states are kept."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError

_FILE = "head.safetensors"


class _HeadAlone(nn.Module):
    """What `LanguageModel.logits` needs of a model."""

    generation_config = None

    def __init__(self, config: Any, head: nn.Linear) -> None:
        super().__init__()
        self.config, self.head = config, head

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def save_head(lm: LanguageModel, folder: Path) -> None:
    """Write the weights of a model's head.

    Raises:
        UserError: it is no linear layer.
    """
    from safetensors.torch import save_file

    head = lm.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        what = f"a head of type {type(head).__name__} cannot be kept"
        raise UserError(what, where="train.distill.top_k", fix="keep the most probable tokens: 64 say")
    save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, folder / _FILE)


def load_head(folder: Path, teacher: Path, like: LanguageModel) -> LanguageModel:
    """A model that can do nothing but ``logits``.

    Args:
        folder: where ``save_head`` wrote.
        teacher: the whole model's folder.
        like: the student, whose tokenizer it shares.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = load_file(folder / _FILE, device=str(like.device))
    words, width = weights["weight"].shape
    with torch.device("meta"):
        head = nn.Linear(width, words, bias="bias" in weights)
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(False)
    config = AutoConfig.from_pretrained(teacher, trust_remote_code=False)
    return LanguageModel(_HeadAlone(config, head), like.tokenizer, like.task)
