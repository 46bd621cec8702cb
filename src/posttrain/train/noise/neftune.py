"""NEFTune: noise on the embedded tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.train.noise.embedded import embeddings_changed
from posttrain.train.noise.rows import Rows


@contextmanager
def neftune(lm: LanguageModel, alpha: float) -> Iterator[None]:
    """Add uniform noise from -s to s to the embedded tokens while the model trains, with s = alpha / sqrt(L D).

    N. Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023, arXiv:2310.05914, algorithm 1. L is
    the number of tokens read of the sequence itself, whatever is packed or padded beside it, and D the width. Tokens
    that several sequences share get one noise, of the mean of their variances.

    Args:
        lm: the model; nothing is added in evaluation mode, or where no gradient is taken.
        alpha: the strength.
    """

    def add(embedded: Tensor, rows: Rows) -> Tensor:
        noise = torch.empty(embedded.shape, dtype=torch.float32, device=embedded.device).uniform_(-1, 1)
        scale = alpha * (rows.inverse_length / embedded.shape[-1]).sqrt()
        return embedded + noise.mul_(scale[..., None]).to(embedded.dtype)

    with embeddings_changed(lm, add):
        yield
