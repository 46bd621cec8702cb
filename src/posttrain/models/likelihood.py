"""Likelihoods of answers: over a closed label set through a trie, and of given answers."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.models.label_trie import Edge, LabelTrie
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns
from posttrain.store.progress import task

_BATCH_TOKENS = 2048
_WAVE_ROWS = 96


@dataclass(frozen=True)
class LabelScores:
    """log_probabilities: float32 [N, K], normalised over the labels; embeddings: float32 [N, D] or None."""

    log_probabilities: np.ndarray
    embeddings: np.ndarray | None


@dataclass(frozen=True)
class _Prompts:
    """A batch of prompts that the model has read: hidden states, and the key-value cache to go on from."""

    indices: list[int]
    hidden: Tensor  # [B, T, D], T without the shared prefix
    lengths: Tensor  # [B], without the shared prefix
    cache: object
    mask: Tensor  # [B, prefix + T]


@torch.inference_mode()
def label_scores(
    lm: LanguageModel,
    prompts: Sequence[Turns],
    labels: Sequence[str],
    *,
    embeddings: bool = False,
    tolerance: float = 1e-4,
    progress: str | None = None,
) -> LabelScores:
    """Probability of every label as the answer to every prompt.

    P(label | prompt) is the product of its tokens' probabilities, stop token included, normalised over the labels.
    The prompts' shared beginning is read once, prompts are batched by length, and the labels are walked as a trie:
    a branch whose probability so far bounds it below the tolerance is not walked, which leaves few for a model that
    knows the task.

    Args:
        lm: the model.
        prompts: N conversations.
        labels: K distinct answers.
        embeddings: also return the mean of the last hidden states over each prompt's own tokens.
        tolerance: bound on the probability mass, per prompt, of labels that are not walked to the end.
        progress: what to call the work while it runs.
    """
    trie = LabelTrie([lm.answer_ids(label) for label in labels])
    scores = np.zeros((len(prompts), len(labels)), np.float32)
    vectors = np.zeros((len(prompts), lm.model.config.get_text_config().hidden_size), np.float32)
    with task(progress or "scoring labels", len(prompts), "records") as advance:
        for batch in _read(lm, prompts):
            scores[batch.indices] = _walk(lm, batch, trie, tolerance)
            if embeddings:
                vectors[batch.indices] = _mean_states(batch)
            advance(len(batch.indices))
    return LabelScores(scores, vectors if embeddings else None)


@torch.inference_mode()
def embeddings(lm: LanguageModel, prompts: Sequence[Turns], progress: str | None = None) -> np.ndarray:
    """Mean of the last hidden states over each prompt's own tokens: float32 [N, D]."""
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


def _read(lm: LanguageModel, prompts: Sequence[Turns]):  # type: ignore[no-untyped-def]
    """Read all prompts, longest last, in batches of similar length, sharing the cache of their common beginning."""
    from transformers import DynamicCache

    ids = [lm.prompt_ids(prompt) for prompt in prompts]
    shared = _shared_prefix(ids)
    prefix_cache = DynamicCache(config=lm.model.config)
    if shared:
        lm.decoder(input_ids=torch.tensor([ids[0][:shared]], device=lm.device), past_key_values=prefix_cache)
    own = [tokens[shared:] for tokens in ids]
    order = sorted(range(len(own)), key=lambda index: (len(own[index]), index))
    for rows in _by_tokens(order, [len(tokens) for tokens in own]):
        batch, lengths = _pad([own[row] for row in rows], lm)
        mask = torch.cat([torch.ones(len(rows), shared, dtype=torch.long, device=lm.device), _mask(lengths, batch.shape[1])], 1)
        cache = copy.deepcopy(prefix_cache)
        if shared:
            cache.batch_repeat_interleave(len(rows))
        output = lm.decoder(
            input_ids=batch,
            attention_mask=mask,
            position_ids=torch.arange(shared, shared + batch.shape[1], device=lm.device)[None].expand(len(rows), -1),
            past_key_values=cache,
            use_cache=True,
        )
        yield _Prompts(rows, output.last_hidden_state, lengths, cache, mask)


def _walk(lm: LanguageModel, batch: _Prompts, trie: LabelTrie, tolerance: float) -> np.ndarray:
    """Log-probabilities [B, K] of the labels, walking the trie edge by edge, most probable first."""
    count = len(batch.indices)
    done = np.full((count, trie.labels), -np.inf)  # labels walked to their end
    last = lm.logits(batch.hidden[torch.arange(count), batch.lengths - 1]).log_softmax(-1)
    first = last[:, [edge.tokens[0] for edge in trie.root]].double().cpu().numpy()
    # Open edges by prompt: the log-probability up to and including the edge's first token bounds all labels below it.
    open_edges = [{edge.index: first[row, position] for position, edge in enumerate(trie.root)} for row in range(count)]
    share = math.log(tolerance / trie.labels)
    while True:
        rows: list[tuple[int, Edge, float]] = []
        for row in range(count):
            if not open_edges[row]:
                continue
            known = np.logaddexp.reduce(done[row])
            best = max(open_edges[row].values())
            # Nothing is known yet: follow what may hold a hundredth of the best; afterwards, all that may still matter.
            floor = known + share if known > -np.inf else best - math.log(100)
            for index in [index for index, bound in open_edges[row].items() if bound >= floor]:
                rows.append((row, trie.edges[index], open_edges[row].pop(index)))
        if not rows:
            break
        rows.sort(key=lambda item: len(item[1].path))
        for start in range(0, len(rows), _WAVE_ROWS):
            wave = rows[start : start + _WAVE_ROWS]
            for (row, edge, _), (log_probability, children) in zip(wave, _follow(lm, batch, wave), strict=True):
                if edge.label is not None:
                    done[row, edge.label] = log_probability
                for child, bound in children.items():
                    open_edges[row][child] = bound
    for row in range(count):
        for index, bound in open_edges[row].items():
            below = trie.edges[index].labels_below
            done[row, below] = bound - math.log(len(below))
    return (done - np.logaddexp.reduce(done, axis=1, keepdims=True)).astype(np.float32)


def _follow(
    lm: LanguageModel, batch: _Prompts, wave: list[tuple[int, Edge, float]]
) -> list[tuple[float, dict[int, float]]]:
    """Read each row's path through the trie after its prompt.

    Returns:
        For each row the log-probability up to the end of its edge, and the bounds of the edges that follow it.
    """
    results: list[tuple[float, dict[int, float]]] = [(bound, {}) for _, _, bound in wave]
    # An edge of one token that ends a label is known already: its bound is exact.
    need = [position for position, (_, edge, _) in enumerate(wave) if len(edge.tokens) > 1 or edge.children]
    if not need:
        return results
    paths = [wave[position][1].path if wave[position][1].children else wave[position][1].path[:-1] for position in need]
    prompt_rows = torch.tensor([wave[position][0] for position in need], device=lm.device)
    ids, lengths = _pad(paths, lm)
    cache = copy.copy(batch.cache)
    cache.layers = [copy.copy(layer) for layer in batch.cache.layers]  # type: ignore[attr-defined]
    cache.batch_select_indices(prompt_rows)  # type: ignore[attr-defined]
    shared = batch.mask.shape[1] - batch.hidden.shape[1]
    positions = (shared + batch.lengths[prompt_rows])[:, None] + torch.arange(ids.shape[1], device=lm.device)
    mask = torch.cat([batch.mask[prompt_rows], _mask(lengths, ids.shape[1])], 1)
    hidden = lm.decoder(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state
    # Only the states that predict this edge's tokens, or the first tokens of the next edges, go through the head.
    spots = [(i, t) for i, position in enumerate(need) for t in range(wave[position][1].start, len(paths[i]))]
    states = hidden[[i for i, _ in spots], [t for _, t in spots]]
    log_probabilities = lm.logits(states).log_softmax(-1)
    at = {spot: number for number, spot in enumerate(spots)}
    numbers: list[int] = []
    tokens: list[int] = []
    for i, position in enumerate(need):
        edge = wave[position][1]
        for t in range(edge.start, len(edge.path) - 1):
            numbers.append(at[i, t])
            tokens.append(edge.path[t + 1])
        for child in edge.children:
            numbers.append(at[i, len(edge.path) - 1])
            tokens.append(child.tokens[0])
    picked = iter(log_probabilities[numbers, tokens].double().cpu().tolist())
    for position in need:
        _, edge, bound = wave[position]
        for _ in range(edge.start, len(edge.path) - 1):
            bound += next(picked)
        results[position] = (bound, {child.index: bound + next(picked) for child in edge.children})
    return results


def _mean_states(batch: _Prompts) -> np.ndarray:
    own = _mask(batch.lengths, batch.hidden.shape[1])[..., None].float()
    return ((batch.hidden.float() * own).sum(1) / own.sum(1)).cpu().numpy()


def _shared_prefix(ids: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with; at least one token of each prompt stays its own."""
    if not ids:
        return 0
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
