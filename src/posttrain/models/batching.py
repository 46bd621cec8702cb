"""Batches of sequences of tokens of similar length, padded behind them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel


def batches_by_tokens(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Splits rows into batches of at most ``limit`` padded tokens, or of one row; the rows' lengths ascend."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if not batches or (len(batches[-1]) + 1) * lengths[row] > limit:
            batches.append([])
        batches[-1].append(row)
    return batches


def pad(rows: Sequence[Sequence[int]], lm: LanguageModel) -> tuple[Tensor, Tensor]:
    """Returns the ids with padding behind them, int64 [rows, tokens], and the rows' lengths, int64 [rows]."""
    lengths = torch.tensor([len(row) for row in rows], device=lm.device)
    padding = lm.tokenizer.pad_token_id or 0
    width = max(1, int(lengths.max()))
    padded = [list(row) + [padding] * (width - len(row)) for row in rows]
    return torch.tensor(padded, device=lm.device), lengths
