"""Likelihoods of answers: over a closed label set through a trie, and of given answers."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.label_trie import LabelTrie
from posttrain.models.label_walk import Read, walk
from posttrain.models.language_model import LanguageModel
from posttrain.models.layers import only_attention, sees_all
from posttrain.models.task import Turns
from posttrain.store.errors import UserError
from posttrain.store.progress import task

_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class LabelScores:
    """log_probabilities: float32 [N, K], normalised over the labels; embeddings: float32 [N, D] or None."""

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
    """Probability of every label as the answer to every prompt.

    P(label | prompt) is the product of its tokens' probabilities, stop token included, normalised over the labels.
    The prompts' shared beginning is read once, prompts are batched by length, and the labels are walked as a trie:
    a branch whose probability so far bounds it below the tolerance is not walked, which leaves few for a model that
    knows the task. Where some layers see only a window or carry a state, every label is read for itself instead.

    Args:
        lm: the model.
        prompts: N conversations.
        labels: K distinct answers.
        embeddings: also return the mean of the last hidden states over each prompt's own tokens.
        tolerance: bound on the probability mass, per prompt, of labels that are not walked to the end; they share
            what they may have. With 0 all are walked, in passes that hang on prompt and labels alone.
        exact: for each prompt a label that is walked to its end, however improbable.
        progress: what to call the work while it runs.

    Raises:
        UserError: if two labels are the same tokens.
    """
    answers = _distinct(lm, labels)
    longest = max((len(lm.prompt_ids(prompt)) for prompt in prompts), default=0) + max(map(len, answers))
    if not sees_all(lm, longest):
        return _score_each(lm, prompts, labels, embeddings, progress)
    trie = LabelTrie(answers)
    scores = np.zeros((len(prompts), len(labels)), np.float32)
    vectors = np.zeros((len(prompts), lm.model.config.get_text_config().hidden_size), np.float32)
    with task(progress or "scoring labels", len(prompts), "records") as advance:
        for batch in _read(lm, prompts):
            scores[batch.indices] = walk(lm, batch, trie, tolerance, exact)
            if embeddings:
                vectors[batch.indices] = _mean_states(batch)
            advance(len(batch.indices))
    return LabelScores(scores, vectors if embeddings else None)


def _score_each(
    lm: LanguageModel, prompts: Sequence[Turns], labels: Sequence[str], with_embeddings: bool, progress: str | None
) -> LabelScores:
    """What ``label_scores`` returns, each label after each prompt read as an answer of its own."""
    scores = np.zeros((len(prompts), len(labels)), np.float32)
    with task(progress or "scoring labels", len(prompts), "records") as advance:
        for row, prompt in enumerate(prompts):
            sums, _ = answer_log_likelihoods(lm, [prompt] * len(labels), labels)
            scores[row] = sums - np.logaddexp.reduce(sums)
            advance(1)
        return LabelScores(scores, embeddings(lm, prompts) if with_embeddings else None)


@torch.inference_mode()
def embeddings(lm: LanguageModel, prompts: Sequence[Turns], progress: str | None = None) -> np.ndarray:
    """Mean of the last hidden states over each prompt's own tokens, after the template's beginning: float32 [N, D]."""
    vectors = np.zeros((len(prompts), lm.model.config.get_text_config().hidden_size), np.float32)
    with task(progress or "embedding", len(prompts), "records") as advance:
        for batch in _read(lm, prompts):
            vectors[batch.indices] = _mean_states(batch)
            advance(len(batch.indices))
    return vectors


@torch.inference_mode()
def answer_log_likelihoods(
    lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood of each answer after its prompt, stop token included.

    Returns:
        Sums of log-probabilities, float64 [N], in nats; numbers of answer tokens, int64 [N].
    """
    encoded = [lm.encode(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index].ids))
    sums, counts = np.zeros(len(encoded)), np.zeros(len(encoded), np.int64)
    with task("scoring answers", len(encoded), "records") as advance:
        for rows in _by_tokens(order, [len(example.ids) for example in encoded]):
            ids, lengths = _pad([encoded[row].ids for row in rows], lm)
            mask = _mask(lengths, ids.shape[1])
            hidden = lm.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            for position, row in enumerate(rows):
                example = encoded[row]
                # The first token has nothing before it to be predicted from.
                at = torch.tensor([i for i, on in enumerate(example.supervised) if on and i > 0], device=ids.device)
                log_probabilities = lm.logits(hidden[position, at - 1]).log_softmax(-1)
                chosen = log_probabilities.gather(1, ids[position, at, None])
                sums[row], counts[row] = float(chosen.double().sum()), len(at)
            advance(len(rows))
    return sums, counts


def _distinct(lm: LanguageModel, labels: Sequence[str]) -> list[list[int]]:
    """The labels' tokens, or a UserError if the model cannot tell two of them apart."""
    seen: dict[tuple[int, ...], str] = {}
    for label in labels:
        tokens = tuple(lm.answer_ids(label))
        if tokens in seen:
            raise UserError(f"labels `{seen[tokens]}` and `{label}` are the same tokens", where="task.labels")
        seen[tokens] = label
    return [list(tokens) for tokens in seen]


def _new_cache(lm: LanguageModel) -> Any:
    """An empty cache; windows are left to the mask, as the branches of a trie stand side by side in it."""
    from transformers import DynamicCache

    return DynamicCache() if only_attention(lm) else DynamicCache(config=lm.model.config)


def _read(lm: LanguageModel, prompts: Sequence[Turns]) -> Iterator[Read]:
    """Read all prompts, longest last, in batches of similar length, sharing the cache of the template's beginning."""
    ids = [lm.prompt_ids(prompt) for prompt in prompts]
    # With two prompts that share nothing, only what the template puts first is taken out: what counts as a prompt's own
    # tokens must not depend on the prompts beside it, as embeddings of several calls are compared.
    others = [lm.prompt_ids([{"role": "user", "content": word}]) for word in ("x", "y")]
    shared = _shared_prefix([*ids, *others])
    cached = shared if len(prompts) > 1 else 0  # for one prompt, reading in two parts costs more than it saves
    prefix_cache = _new_cache(lm)
    if cached:
        lm.decoder(input_ids=torch.tensor([others[0][:cached]], device=lm.device), past_key_values=prefix_cache)
    rest = [tokens[cached:] for tokens in ids]
    order = sorted(range(len(rest)), key=lambda index: (len(rest[index]), index))
    for rows in _by_tokens(order, [len(tokens) for tokens in rest]):
        batch, lengths = _pad([rest[row] for row in rows], lm)
        mask = torch.cat(
            [torch.ones(len(rows), cached, dtype=torch.long, device=lm.device), _mask(lengths, batch.shape[1])], 1
        )
        cache = copy.deepcopy(prefix_cache)
        if cached:
            cache.batch_repeat_interleave(len(rows))
        output = lm.decoder(
            input_ids=batch,
            attention_mask=mask,
            position_ids=torch.arange(cached, cached + batch.shape[1], device=lm.device)[None].expand(len(rows), -1),
            past_key_values=cache,
            use_cache=True,
        )
        skipped = shared - cached
        yield Read(rows, output.last_hidden_state[:, skipped:], lengths - skipped, cache, mask)


def _mean_states(batch: Read) -> np.ndarray:
    own = _mask(batch.lengths, batch.hidden.shape[1])[..., None].float()
    return ((batch.hidden.float() * own).sum(1) / own.sum(1)).cpu().numpy()


def _shared_prefix(ids: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with; at least one token of each prompt stays its own."""
    low, high = min(ids), max(ids)  # in lexicographic order the extremes differ first
    shared = 0
    while shared < min(len(low), len(high)) - 1 and low[shared] == high[shared]:
        shared += 1
    return min(shared, min(len(tokens) for tokens in ids) - 1)


def _by_tokens(order: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Split rows, ascending in length, into batches of at most _BATCH_TOKENS padded tokens."""
    batches: list[list[int]] = []
    for row in order:
        if not batches or (len(batches[-1]) + 1) * lengths[row] > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _pad(rows: Sequence[Sequence[int]], lm: LanguageModel) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], device=lm.device)
    filler = lm.tokenizer.pad_token_id or 0
    width = max(1, int(lengths.max()))
    padded = [list(row) + [filler] * (width - len(row)) for row in rows]
    return torch.tensor(padded, device=lm.device), lengths


def _mask(lengths: Tensor, width: int) -> Tensor:
    return (torch.arange(width, device=lengths.device)[None] < lengths[:, None]).long()
