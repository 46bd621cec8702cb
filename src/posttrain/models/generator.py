"""Generates answers, greedy or sampled: the interface `Generator`, and `LocalGenerator` for a model in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from posttrain.models.batching import batches_by_tokens
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns
from posttrain.store.progress import progress_bar

FinishReason = Literal["stop", "length", "lines"]

_BATCH_TOKENS = 4096

# A step of a model this small is hundreds of operations of microseconds: threads wait longer for each other than they
# work, many times longer where the cores are busy with something else.
_SMALL_MODEL_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen.

    Attributes:
        max_new_tokens: length limit; the task's if None.
        temperature: divides the logits; 0 takes the most probable token each time.
        top_p: share of the probability that is drawn from (nucleus sampling, A. Holtzman et al. 2020,
            arXiv:1904.09751).
        seed: fixes the draws: an answer depends on it and on the prompt, and not on the other requests.
        lines: an answer ends with so many lines of text; None for any number.
        log_probabilities: return those of the tokens.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    lines: int | None = None
    log_probabilities: bool = False


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A prompt to answer: a conversation, or its token ids."""

    prompt: Turns | Sequence[int]
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Answer:
    """A generated answer; two are equal if text and ``finish`` are.

    Attributes:
        text: without the stop token and white space around it.
        finish: why it ended: a stop token, the length limit, or the number of lines.
        ids: its tokens, the stop token included.
        log_probabilities: of each token by the model, at temperature 1 and without truncation, in nats; None where they
            were not requested.
    """

    text: str
    finish: FinishReason = "stop"
    ids: tuple[int, ...] = field(default=(), compare=False)
    log_probabilities: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        """Whether the model ended it with a stop token."""
        return self.finish == "stop"

    @property
    def mean_log_probability(self) -> float | None:
        """The mean of its tokens' log-probabilities; None where they were not requested."""
        return None if self.log_probabilities is None else float(np.mean(self.log_probabilities))


class Generator(Protocol):
    """Answers requests."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns an answer to each request, in their order."""
        ...


def greedy_answers(
    lm: LanguageModel, prompts: Sequence[Turns], max_new_tokens: int | None = None, *, log_probabilities: bool = False
) -> list[Answer]:
    """Answers every prompt greedily; see `Sampling` for the arguments."""
    sampling = Sampling(max_new_tokens, log_probabilities=log_probabilities)
    return LocalGenerator(lm).generate([Request(prompt, sampling) for prompt in prompts])


@dataclass(frozen=True)
class LocalGenerator:
    """Generates by a model in this process, in batches of prompts of similar length."""

    lm: LanguageModel

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns an answer to each request, in their order."""
        prompts = [self._prompt_ids(request.prompt) for request in requests]
        limits = [request.sampling.max_new_tokens or self.lm.task.max_new_tokens for request in requests]
        answers: list[Answer | None] = [None] * len(requests)
        with progress_bar("answering", len(requests), "records") as advance, _limit_threads(self.lm, requests):
            longest = max(limits, default=0)
            for rows in batches_by_tokens([len(prompt) + longest for prompt in prompts], _BATCH_TOKENS):
                own = [requests[row].sampling for row in rows]
                batch = self._answer([prompts[row] for row in rows], own, [limits[row] for row in rows])
                for row, answer in zip(rows, batch, strict=True):
                    answers[row] = answer
                advance(len(rows))
        return [answer for answer in answers if answer is not None]

    def _prompt_ids(self, prompt: Turns | Sequence[int]) -> list[int]:
        if prompt and isinstance(prompt[0], int):
            return list(cast(Sequence[int], prompt))
        return self.lm.prompt_ids(cast(Turns, prompt))

    def _answer(self, prompts: list[list[int]], samplings: Sequence[Sampling], limits: Sequence[int]) -> list[Answer]:
        lm, width = self.lm, max(map(len, prompts))
        padding = lm.tokenizer.pad_token_id or 0
        # Padded on the left: generation continues after the last token of every row.
        ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts], device=lm.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=lm.device)
        choice, lines = _TokenChoice(samplings), _LineLimit(lm, width, [sampling.lines for sampling in samplings])
        output = lm.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(limits),
            eos_token_id=sorted(lm.chat.stop_ids),
            pad_token_id=padding,
            # Some models' generation configs ask for sampling, or for penalties that would count the padding too.
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            logits_processor=[choice] if choice.is_needed else None,
            stopping_criteria=[lines] if lines.is_needed else None,
        )
        logs = choice.log_probabilities()
        return [
            self._read(row[: lines.ends.get(number, limit)], sampling, logs[number], number in lines.ends)
            for number, (row, limit, sampling) in enumerate(
                zip(output[:, width:].tolist(), limits, samplings, strict=True)
            )
        ]

    def _read(self, ids: list[int], sampling: Sampling, logs: list[float], has_lines: bool) -> Answer:
        """Reads the answer of a row, which other rows of its batch may have made longer than it is."""
        stop = next((at for at, token in enumerate(ids) if token in self.lm.chat.stop_ids), None)
        text = self.lm.tokenizer.decode(ids[:stop], skip_special_tokens=True)
        ids = ids if stop is None else ids[: stop + 1]
        finish: FinishReason = "stop" if stop is not None else "lines" if has_lines else "length"
        return Answer(
            self.lm.chat.answer_text(text),
            finish,
            tuple(ids),
            tuple(logs[: len(ids)]) if sampling.log_probabilities else None,
        )


class _TokenChoice:
    """Leaves each row of logits the token that its sampling draws alone, and records log-probabilities."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self._drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature]
        self._recorded = any(sampling.log_probabilities for sampling in samplings)
        self._temperature = torch.tensor([[samplings[row].temperature] for row in self._drawn])
        self._top_p = torch.tensor([[samplings[row].top_p] for row in self._drawn])
        # One uniform number per token and row, from the row's own generator: the same on every device and in any batch.
        self._generators = [np.random.default_rng(samplings[row].seed) for row in self._drawn]
        self._count, self._steps = len(samplings), list[Tensor]()

    @property
    def is_needed(self) -> bool:
        """Whether the most probable token each time is not all that is requested."""
        return self._recorded or bool(self._drawn)

    def __call__(self, _: Tensor, logits: Tensor) -> Tensor:
        chosen = logits.argmax(-1)
        scores = logits
        if self._drawn:
            chosen[self._drawn] = self._draw(logits[self._drawn])
            scores = torch.full_like(logits, -torch.inf).scatter(1, chosen[:, None], 0)
        if self._recorded:
            self._steps.append(logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1))
        return scores

    def _draw(self, logits: Tensor) -> Tensor:
        """Draws a token of each row from the nucleus of its softmax, by the inverse of the distribution function."""
        scaled = logits.float() / self._temperature.to(logits.device)
        p, tokens = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = p.cumsum(-1) - p
        p = p.where(before < self._top_p.to(p.device), 0)  # the first always stays
        reached = p.cumsum(-1)
        luck = torch.tensor([[generator.random()] for generator in self._generators], dtype=p.dtype, device=p.device)
        index = (reached <= luck * reached[:, -1:]).sum(-1, keepdim=True)
        # Rounding can put the draw behind the last token of the nucleus.
        drawn: Tensor = tokens.gather(1, index.minimum((p > 0).sum(-1, keepdim=True) - 1))[:, 0]
        return drawn

    def log_probabilities(self) -> list[list[float]]:
        """Returns those of every step by row, wider than an answer that ends before its batch does; else empty."""
        return torch.stack(self._steps, 1).double().tolist() if self._steps else [[] for _ in range(self._count)]


class _LineLimit:
    """A stopping criterion: ends a row once it has its number of lines; ``ends`` are the lengths of such rows."""

    def __init__(self, lm: LanguageModel, start: int, limits: Sequence[int | None]) -> None:
        self._lm, self._start, self._limits = lm, start, limits
        self.ends: dict[int, int] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a row has a number of lines."""
        return any(limit is not None for limit in self._limits)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        rows = input_ids[:, self._start :].tolist()
        for number, (row, limit) in enumerate(zip(rows, self._limits, strict=True)):
            if limit is not None and number not in self.ends and self._has_lines(row, limit):
                self.ends[number] = len(row)
        return torch.tensor([number in self.ends for number in range(len(rows))], device=input_ids.device)

    def _has_lines(self, row: list[int], limit: int) -> bool:
        if "\n" not in self._lm.tokenizer.decode(row[-1:]):
            return False
        text = self._lm.tokenizer.decode(row, skip_special_tokens=True)
        return sum(bool(line.strip()) for line in text.splitlines()) >= limit


@contextmanager
def _limit_threads(lm: LanguageModel, requests: Sequence[Request]) -> Iterator[None]:
    """Samples from a small model on the CPU with one thread."""
    before = torch.get_num_threads()
    small = sum(parameter.numel() for parameter in lm.model.parameters()) < _SMALL_MODEL_PARAMETERS
    if small and lm.device.type == "cpu" and any(request.sampling.temperature for request in requests):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
