"""Generates answers greedily, batched by prompt length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns
from posttrain.store.progress import progress_bar

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Generation:
    """A generated answer; two are equal if text and ``finished`` are.

    Attributes:
        text: without the stop token.
        finished: False if it was cut off before a stop token.
        tokens: number of its tokens, the stop token included.
        log_probability: mean of its tokens' log-probabilities, in nats; None where it was not asked for.
    """

    text: str
    finished: bool
    tokens: int = field(default=0, compare=False)
    log_probability: float | None = field(default=None, compare=False)


@torch.inference_mode()
def generate(
    lm: LanguageModel,
    prompts: Sequence[Turns],
    max_new_tokens: int | None = None,
    *,
    log_probabilities: bool = False,
) -> list[Generation]:
    """Answers every prompt greedily.

    Args:
        lm: the model.
        prompts: N conversations.
        max_new_tokens: length limit of an answer; the task's by default.
        log_probabilities: True to record each answer's mean log-probability.
    """
    limit = max_new_tokens or lm.task.max_new_tokens
    ids = [lm.prompt_ids(prompt) for prompt in prompts]
    answers: list[Generation | None] = [None] * len(ids)
    with progress_bar("answering", len(ids), "records") as advance:
        for rows in answer_batches([len(prompt) for prompt in ids], limit):
            batch = _answer(lm, [ids[row] for row in rows], limit, log_probabilities)
            for row, answer in zip(rows, batch, strict=True):
                answers[row] = answer
            advance(len(rows))
    return [answer for answer in answers if answer is not None]


def answer_batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yields the rows of each batch, prompts of similar length together.

    Args:
        lengths: tokens of each prompt.
        limit: most tokens of an answer.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    while order:
        # The prompts' lengths ascend, so the last of a batch decides the width of all its rows.
        size = 1
        while size < len(order) and (size + 1) * (lengths[order[size]] + limit) <= _BATCH_TOKENS:
            size += 1
        yield order[:size]
        order = order[size:]


def pad_left(lm: LanguageModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts on the left, so that each ends where its answer begins; returns ids and mask, int64 [B, L]."""
    width = max(len(prompt) for prompt in prompts)
    padding = lm.tokenizer.pad_token_id or 0
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts], device=lm.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=lm.device)
    return ids, mask


def read_answer(lm: LanguageModel, tokens: Sequence[int]) -> Generation:
    """Returns the text of generated tokens up to the first stop token."""
    end = next((position for position, token in enumerate(tokens) if token in lm.chat.stop_ids), None)
    text = lm.tokenizer.decode(tokens[:end], skip_special_tokens=True)
    return Generation(text.strip(), end is not None, len(tokens) if end is None else end + 1)


def _answer(
    lm: LanguageModel, prompts: list[list[int]], limit: int, log_probabilities: bool = False
) -> list[Generation]:
    ids, mask = pad_left(lm, prompts)
    steps: list[Tensor] = []

    def record(_: Tensor, logits: Tensor) -> Tensor:
        # Decoding is greedy: the token that is written is the most probable one.
        steps.append(logits.max(-1).values - logits.logsumexp(-1))
        return logits

    width, padding = ids.shape[1], lm.tokenizer.pad_token_id or 0
    stops = sorted(lm.chat.stop_ids)
    output = lm.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=limit,
        eos_token_id=stops,
        pad_token_id=padding,
        # Some models' generation configs ask for sampling, or for penalties that would count the padding too.
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        logits_processor=[record] if log_probabilities else None,
    )
    answers = [read_answer(lm, row) for row in output[:, width:].tolist()]
    if not log_probabilities:
        return answers
    logs = torch.stack(steps, 1).double()  # wider than an answer that ends before the batch does
    means = [float(row[: answer.tokens].mean()) for row, answer in zip(logs, answers, strict=True)]
    return [replace(answer, log_probability=mean) for answer, mean in zip(answers, means, strict=True)]
