"""Log-likelihoods of labels, answers and plain texts under a language model.

For texts a batch's shape depends on the length of its longest sequence alone, rounded up, and a batch that is not full
is filled up: so the same kernels compute a sequence, with the same result, whatever else is in its batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.batching import batches_by_tokens, pad
from posttrain.models.chat import TokenizedExample
from posttrain.models.label_tree import LabelTree, Prefill, score_tree
from posttrain.models.language_model import LanguageModel, has_full_attention, has_kv_cache_only
from posttrain.models.task import Turns
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar

_BATCH_TOKENS = 2048

# A CPU gains little by more, and padding costs it as much as tokens.
_WINDOW_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}

_LOGIT_ROWS = 256  # rows of logits at a time: each is as wide as the vocabulary, in float32 about half a megabyte


@dataclass(frozen=True)
class LabelScores:
    """The scores of N prompts over K labels.

    Attributes:
        log_probabilities: float32 [N, K], normalised over the labels.
        embeddings: float32 [N, D], or None.
    """

    log_probabilities: np.ndarray
    embeddings: np.ndarray | None


@torch.inference_mode()
def label_scores(
    lm: LanguageModel,
    prompts: Sequence[Turns],
    labels: Sequence[str],
    *,
    embeddings: bool = False,
    tolerance: float = 1e-2,
    exact: Sequence[int] | None = None,
    progress: str | None = None,
) -> LabelScores:
    """Computes the probability of every label as the answer to every prompt.

    P(label | prompt) is the product of its tokens' probabilities, stop token included, normalised over the labels.
    The prompts' shared prefix is computed once, prompts are batched by length, and the labels form a trie: a branch
    whose probability so far bounds it below the tolerance is skipped, which leaves few for a model that knows the
    task. If some layers see only a window or carry a state, every label is computed separately instead.

    Args:
        lm: the model.
        prompts: N conversations.
        labels: K distinct answers.
        embeddings: also return the mean of the last hidden states over each prompt's own tokens.
        tolerance: bound on the probability mass, per prompt, of labels that are not followed to their ends; each gets
            an equal part of its branch's bound. With 0 all are followed, in passes that depend on prompt and labels
            alone.
        exact: for each prompt a label to follow to its end, however improbable.
        progress: description of the progress bar.

    Raises:
        UserError: if two labels are the same tokens.
    """
    answers = _distinct_label_tokens(lm, labels)
    longest = max((len(lm.prompt_ids(prompt)) for prompt in prompts), default=0) + max(map(len, answers))
    if not has_full_attention(lm, longest):
        return _score_each(lm, prompts, labels, embeddings, progress)
    trie = LabelTree(answers)
    scores = np.zeros((len(prompts), len(labels)), np.float32)
    vectors = np.zeros((len(prompts), lm.model.config.get_text_config().hidden_size), np.float32)
    with progress_bar(progress or "scoring labels", len(prompts), "records") as advance:
        for batch in _prefill(lm, prompts):
            scores[batch.indices] = score_tree(lm, batch, trie, tolerance, exact)
            if embeddings:
                vectors[batch.indices] = _mean_states(batch)
            advance(len(batch.indices))
    return LabelScores(scores, vectors if embeddings else None)


def _score_each(
    lm: LanguageModel, prompts: Sequence[Turns], labels: Sequence[str], with_embeddings: bool, progress: str | None
) -> LabelScores:
    """Computes `label_scores` with a sequence for each prompt and label."""
    scores = np.zeros((len(prompts), len(labels)), np.float32)
    with progress_bar(progress or "scoring labels", len(prompts), "records") as advance:
        for row, prompt in enumerate(prompts):
            sums, _ = answer_log_likelihoods(lm, [prompt] * len(labels), labels)
            scores[row] = sums - np.logaddexp.reduce(sums)
            advance(1)
        return LabelScores(scores, prompt_embeddings(lm, prompts) if with_embeddings else None)


@torch.inference_mode()
def prompt_embeddings(lm: LanguageModel, prompts: Sequence[Turns], progress: str | None = None) -> np.ndarray:
    """Averages the last hidden states over each prompt's tokens behind the shared prefix, float32 [N, D]."""
    vectors = np.zeros((len(prompts), lm.model.config.get_text_config().hidden_size), np.float32)
    with progress_bar(progress or "embedding", len(prompts), "records") as advance:
        for batch in _prefill(lm, prompts):
            vectors[batch.indices] = _mean_states(batch)
            advance(len(batch.indices))
    return vectors


def answer_log_likelihoods(
    lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the log-likelihood of each answer after its prompt, stop token included.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of answer tokens, int64 [N].
    """
    encoded = [lm.encode(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return sequence_log_likelihoods(lm, encoded, context_length(lm))


def _distinct_label_tokens(lm: LanguageModel, labels: Sequence[str]) -> list[list[int]]:
    """Returns the labels' tokens; raises a UserError if two labels have the same."""
    seen: dict[tuple[int, ...], str] = {}
    for label in labels:
        tokens = tuple(lm.answer_ids(label))
        if tokens in seen:
            raise UserError(f"labels `{seen[tokens]}` and `{label}` are the same tokens", where="task.labels")
        seen[tokens] = label
    return [list(tokens) for tokens in seen]


def _new_cache(lm: LanguageModel) -> Any:
    """Returns an empty cache."""
    # Without the config it keeps all positions, even of layers with a window: the branches of a trie lie side by side
    # in it, so the newest columns are not the nearest tokens. Windows are left to the mask.
    from transformers import DynamicCache

    return DynamicCache() if has_kv_cache_only(lm) else DynamicCache(config=lm.model.config)


def _prefill(lm: LanguageModel, prompts: Sequence[Turns]) -> Iterator[Prefill]:
    """Reads all prompts, longest last, in batches of similar length, sharing the cache of the template's prefix."""
    ids = [lm.prompt_ids(prompt) for prompt in prompts]
    # With two more prompts that share nothing, the common prefix is the template's alone: which tokens belong to a
    # prompt must not depend on the other prompts, as embeddings of several calls are compared.
    others = [lm.prompt_ids([{"role": "user", "content": word}]) for word in ("x", "y")]
    shared = _shared_prefix([*ids, *others])
    cached = shared if len(prompts) > 1 else 0  # for one prompt, reading in two parts costs more than it saves
    prefix_cache = _new_cache(lm)
    if cached:
        lm.decoder(input_ids=torch.tensor([others[0][:cached]], device=lm.device), past_key_values=prefix_cache)
    rest = [tokens[cached:] for tokens in ids]
    for rows in batches_by_tokens([len(tokens) for tokens in rest], _BATCH_TOKENS):
        batch, lengths = pad([rest[row] for row in rows], lm)
        mask = torch.cat(
            [torch.ones(len(rows), cached, dtype=torch.long, device=lm.device), _padding_mask(lengths, batch.shape[1])],
            1,
        )
        cache = copy.deepcopy(prefix_cache)  # the forward pass appends to it in place
        if cached:
            cache.batch_repeat_interleave(len(rows))
        output = lm.decoder(
            input_ids=batch,
            attention_mask=mask,
            # Counted from the prefix on, as padding is on the right; transformers would count from the cache's end.
            position_ids=torch.arange(cached, cached + batch.shape[1], device=lm.device)[None].expand(len(rows), -1),
            past_key_values=cache,
            use_cache=True,
        )
        skipped = shared - cached
        yield Prefill(rows, output.last_hidden_state[:, skipped:], lengths - skipped, cache, mask)


def _mean_states(batch: Prefill) -> np.ndarray:
    own = _padding_mask(batch.lengths, batch.hidden.shape[1])[..., None].float()
    return ((batch.hidden.float() * own).sum(1) / own.sum(1)).cpu().numpy()


def _shared_prefix(ids: Sequence[list[int]]) -> int:
    """Counts the tokens that all prompts begin with; at least one token of each prompt stays outside."""
    low, high = min(ids), max(ids)  # in lexicographic order the extremes differ first
    shared = 0
    while shared < min(len(low), len(high)) - 1 and low[shared] == high[shared]:
        shared += 1
    return min(shared, min(len(tokens) for tokens in ids) - 1)


def _padding_mask(lengths: Tensor, width: int) -> Tensor:
    return (torch.arange(width, device=lengths.device)[None] < lengths[:, None]).long()


def text_log_likelihoods(lm: LanguageModel, texts: Sequence[str], window: int = 2048) -> tuple[np.ndarray, np.ndarray]:
    """Computes the log-likelihood of plain texts, without any chat template.

    A text longer than the window, or than the model's context, is split into windows that share one token, so that
    every token but a text's first is predicted once.

    Args:
        lm: the model.
        texts: N texts.
        window: most tokens of a forward pass.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of predicted tokens, int64 [N].
    """
    ids = [list(lm.tokenizer(text)["input_ids"]) for text in texts]
    return sequence_log_likelihoods(lm, [TokenizedExample(tokens, [True] * len(tokens)) for tokens in ids], window)


@torch.inference_mode()
def sequence_log_likelihoods(
    lm: LanguageModel, sequences: Sequence[TokenizedExample], window: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the log-likelihood of the supervised tokens of each sequence, except its first token.

    Args:
        lm: the model.
        sequences: N sequences.
        window: see `text_log_likelihoods`.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of tokens, int64 [N].
    """
    width = min(window, context_length(lm))
    sums, counts = np.zeros(len(sequences)), np.zeros(len(sequences), np.int64)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for row, sequence in enumerate(sequences):
        counts[row] = sum(sequence.supervised[1:])
        for start in range(0, len(sequence.ids) - 1, width - 1):
            part = len(sequence.ids[start : start + width])
            if any(sequence.supervised[start + 1 : start + part]):
                pieces.setdefault(min(_rounded_length(part), width), []).append((row, start))
    # Windows are added up in their order: floating-point sums of three depend on it.
    window_sums: dict[tuple[int, int], float] = {}
    with progress_bar("scoring texts", sum(map(len, pieces.values())), "windows") as advance:
        for length in sorted(pieces):
            for batch in _batches(pieces[length], _batch_size(lm, length)):
                for piece, value in _window_log_likelihoods(lm, sequences, batch, length):
                    window_sums[piece] = value
                advance(len(batch))
    for row, start in sorted(window_sums):
        sums[row] += window_sums[row, start]
    return sums, counts


def context_length(lm: LanguageModel) -> int:
    """Returns the model's maximum number of positions."""
    return int(lm.model.config.get_text_config().max_position_embeddings)


def _window_log_likelihoods(
    lm: LanguageModel, sequences: Sequence[TokenizedExample], batch: Sequence[tuple[int, int]], length: int
) -> Iterator[tuple[tuple[int, int], float]]:
    size = _batch_size(lm, length)
    # No mask: in a causal model the padding behind a sequence does not influence it.
    ids = torch.full((size, length), lm.tokenizer.pad_token_id or 0, dtype=torch.long)
    for index, (row, start) in enumerate(batch):
        part = sequences[row].ids[start : start + length]
        ids[index, : len(part)] = torch.tensor(part)
    ids = ids.to(lm.device)
    hidden = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
    for index, (row, start) in enumerate(batch):
        supervised = sequences[row].supervised[start : start + length]
        at = torch.tensor([i for i, on in enumerate(supervised) if on and i > 0], device=lm.device)
        yield (row, start), _log_likelihood(lm, hidden[index, at - 1], ids[index, at])


def _log_likelihood(lm: LanguageModel, hidden: Tensor, targets: Tensor) -> float:
    total = 0.0
    for start in range(0, len(targets), _LOGIT_ROWS):
        logits = lm.logits(hidden[start : start + _LOGIT_ROWS])
        chosen = logits.log_softmax(-1).gather(1, targets[start : start + _LOGIT_ROWS, None])
        total += float(chosen.double().sum())
    return total


def _batch_size(lm: LanguageModel, length: int) -> int:
    """Returns the number of sequences in a batch."""
    return max(1, _WINDOW_BATCH_TOKENS[lm.device.type] // length)


def _rounded_length(length: int) -> int:
    """Rounds a length up by at most a quarter (and to 16), to one of few shapes."""
    step = max(16, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _batches(pieces: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]


def instruction_following_difficulty(
    lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Divides each answer's perplexity after its prompt by that of the answer alone, float64 [N]; NaN if too long.

    Li et al., From Quantity to Quality, 2024 (arXiv:2308.12032), as the ratio of perplexities of the same authors'
    Superfiltering (2024, arXiv:2402.00530). The prompt is rendered by the model's chat template.
    """
    # The answer alone follows the token that begins a text, or ends one if there is none: its first token needs
    # something to be predicted from, so that both perplexities count the same tokens.
    beginning = lm.tokenizer.bos_token_id
    if beginning is None:
        beginning = min(lm.chat.stop_ids)
    with_prompt, without_prompt = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        before, ids = lm.prompt_ids(prompt), lm.answer_ids(answer)
        with_prompt.append(TokenizedExample(before + ids, [False] * len(before) + [True] * len(ids)))
        without_prompt.append(TokenizedExample([beginning, *ids], [False] + [True] * len(ids)))
    longest = context_length(lm)
    fits = np.array([len(example.ids) <= longest for example in with_prompt], dtype=bool)
    ratios = np.full(len(with_prompt), np.nan)
    with_prompt_sums, counts = sequence_log_likelihoods(
        lm, [example for example, fit in zip(with_prompt, fits, strict=True) if fit], longest
    )
    without_prompt_sums, _ = sequence_log_likelihoods(
        lm, [example for example, fit in zip(without_prompt, fits, strict=True) if fit], longest
    )
    ratios[fits] = np.exp((without_prompt_sums - with_prompt_sums) / counts)
    return ratios
