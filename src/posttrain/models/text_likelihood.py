"""Likelihoods of given token sequences and plain texts.

A batch's shape depends on the length of its longest sequence alone, rounded up, and a batch that is not full is filled
up: so a sequence meets the same kernels, and gets the same number, whatever stands beside it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.store.progress import task

# A processor gains little by more; what fills up a batch costs it as much as what is asked for.
_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
_LOGIT_ROWS = 256  # a vocabulary of numbers each


def text_log_likelihoods(lm: LanguageModel, texts: Sequence[str], window: int = 2048) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood of plain texts, without any chat template.

    A text longer than the window, or than the model's context, is read in windows that share one token, so
    every token but a text's first is predicted once.

    Args:
        lm: the model.
        texts: N texts.
        window: longest stretch that the model reads at once, in tokens.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of predicted tokens, int64 [N].
    """
    ids = [list(lm.tokenizer(text)["input_ids"]) for text in texts]
    return log_likelihoods(lm, [Encoded(one, [True] * len(one)) for one in ids], window)


@torch.inference_mode()
def log_likelihoods(
    lm: LanguageModel, sequences: Sequence[Encoded], window: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood of the supervised tokens of each sequence, but for a first one: nothing predicts it.

    Args:
        lm: the model.
        sequences: N sequences.
        window: as `text_log_likelihoods` takes it.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of tokens, int64 [N].
    """
    width = min(window, context(lm))
    sums, counts = np.zeros(len(sequences)), np.zeros(len(sequences), np.int64)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for row, sequence in enumerate(sequences):
        counts[row] = sum(sequence.supervised[1:])
        for start in range(0, len(sequence.ids) - 1, width - 1):
            part = len(sequence.ids[start : start + width])
            if any(sequence.supervised[start + 1 : start + part]):
                pieces.setdefault(min(_rounded(part), width), []).append((row, start))
    # Windows are added up in their order, so that a sum of three is always the same.
    found: dict[tuple[int, int], float] = {}
    with task("scoring texts", sum(map(len, pieces.values())), "windows") as advance:
        for length in sorted(pieces):
            for batch in _batches(pieces[length], _size(lm, length)):
                for piece, value in _read(lm, sequences, batch, length):
                    found[piece] = value
                advance(len(batch))
    for row, start in sorted(found):
        sums[row] += found[row, start]
    return sums, counts


def context(lm: LanguageModel) -> int:
    """The most tokens that the model reads at once."""
    return int(lm.model.config.get_text_config().max_position_embeddings)


def _read(
    lm: LanguageModel, sequences: Sequence[Encoded], batch: Sequence[tuple[int, int]], length: int
) -> Iterator[tuple[tuple[int, int], float]]:
    size = _size(lm, length)
    # What a causal model reads behind a sequence does not reach back into it, so no mask is needed.
    ids = torch.full((size, length), lm.tokenizer.pad_token_id or 0, dtype=torch.long)
    for place, (row, start) in enumerate(batch):
        part = sequences[row].ids[start : start + length]
        ids[place, : len(part)] = torch.tensor(part)
    ids = ids.to(lm.device)
    hidden = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
    for place, (row, start) in enumerate(batch):
        learned = sequences[row].supervised[start : start + length]
        at = torch.tensor([i for i, on in enumerate(learned) if on and i > 0], device=lm.device)
        yield (row, start), _log_likelihood(lm, hidden[place, at - 1], ids[place, at])


def _log_likelihood(lm: LanguageModel, hidden: Tensor, targets: Tensor) -> float:
    total = 0.0
    for start in range(0, len(targets), _LOGIT_ROWS):
        logits = lm.logits(hidden[start : start + _LOGIT_ROWS])
        chosen = logits.log_softmax(-1).gather(1, targets[start : start + _LOGIT_ROWS, None])
        total += float(chosen.double().sum())
    return total


def _size(lm: LanguageModel, length: int) -> int:
    """Sequences of a batch."""
    return max(1, _BATCH_TOKENS[lm.device.type] // length)


def _rounded(length: int) -> int:
    """``length`` or up to a quarter more, one of few."""
    step = max(16, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _batches(pieces: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]
