"""Samples replies from a model on this machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from posttrain.data.generation.prompts import requested_lines
from posttrain.models.language_model import LanguageModel
from posttrain.models.reply_cache import Turns
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

_BATCH_TOKENS = 8192
_TOP_P = 0.95  # share of the probability that is drawn from: the paper's
# A step of a model this small is hundreds of operations of microseconds: threads wait longer for each other than they
# work, many times longer where the cores are busy with something else.
_SMALL_MODEL_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class LocalModel:
    """Implements `posttrain.models.reply_cache.Generate` by nucleus sampling (Holtzman et al. 2020,
    arXiv:1904.09751).

    Replies depend on the seed and on the prompts of the call. A reply to a prompt for lines ends with the last line,
    and a truncated one keeps its whole lines; any other truncated reply is None.

    Attributes:
        max_tokens: length of the longest reply.
        temperature: 0 for the likeliest token each time.
    """

    lm: LanguageModel
    max_tokens: int = 256
    temperature: float = 0.7
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """JSON values that replies depend on, besides the model and the prompt."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Turns]) -> list[str | None]:
        ids = [self.lm.prompt_ids([dict(turn) for turn in prompt]) for prompt in prompts]
        # Prompts of similar length share a batch, so little of it is padding; ties keep their order for determinism.
        order = sorted(range(len(ids)), key=lambda at: (len(ids[at]), at))
        replies: list[str | None] = [None] * len(ids)
        with progress_bar("answering", len(ids), "replies") as advance, _limit_threads(self.lm):
            while order:
                size = 1
                while size < len(order) and (size + 1) * (len(ids[order[size]]) + self.max_tokens) <= _BATCH_TOKENS:
                    size += 1
                rows, order = order[:size], order[size:]
                line_counts = [requested_lines(prompts[row]) for row in rows]
                for row, reply in zip(rows, self._sample([ids[row] for row in rows], line_counts), strict=True):
                    replies[row] = reply
                advance(len(rows))
        return replies

    def _sample(self, prompts: list[list[int]], line_counts: list[int | None]) -> list[str | None]:
        lm = self.lm
        width = max(map(len, prompts))
        filler = lm.tokenizer.pad_token_id or 0
        # Left padding: generation continues after the last token of every row.
        ids = torch.tensor([[filler] * (width - len(prompt)) + prompt for prompt in prompts], device=lm.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=lm.device)
        sampling = {"do_sample": True, "temperature": self.temperature, "top_p": _TOP_P, "top_k": 0}
        devices = [lm.device] if lm.device.type == "cuda" else []
        # The caller's random state must not depend on whether replies were cached.
        with torch.random.fork_rng(devices):
            # The seed depends on the batch's prompts, so a resumed synthesis draws the same replies.
            torch.manual_seed(int(digest([self.seed, prompts])[:15], 16))
            output = lm.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.max_tokens,
                eos_token_id=sorted(lm.chat.stop_ids),
                pad_token_id=filler,
                stopping_criteria=[_StopAfterLines(lm, width, line_counts)],
                **(sampling if self.temperature else {"do_sample": False}),
            )
        return [self._read(row, count) for row, count in zip(output[:, width:].tolist(), line_counts, strict=True)]

    def _read(self, row: list[int], line_count: int | None) -> str | None:
        end = next((at for at, token in enumerate(row) if token in self.lm.chat.stop_ids), None)
        text = str(self.lm.tokenizer.decode(row[:end], skip_special_tokens=True))
        if line_count is not None:
            lines = text.splitlines(keepends=True)
            whole = lines if end is not None else [line for line in lines if line.endswith("\n")]
            return "".join(line for line in whole if line.strip()).strip() or None
        return text.strip() if end is not None else None


class _StopAfterLines(StoppingCriteria):
    """Ends a row once it has the requested number of lines."""

    def __init__(self, lm: LanguageModel, start: int, line_counts: list[int | None]) -> None:
        self._lm, self._start, self._line_counts = lm, start, line_counts

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        decode = self._lm.tokenizer.decode
        over = [
            count is not None
            and "\n" in decode(row[-1:])
            and sum(bool(line.strip()) for line in decode(row, skip_special_tokens=True).splitlines()) >= count
            for row, count in zip(input_ids[:, self._start :].tolist(), self._line_counts, strict=True)
        ]
        return torch.tensor(over, device=input_ids.device)


@contextmanager
def _limit_threads(lm: LanguageModel) -> Iterator[None]:
    """Runs a small model on the CPU with one thread."""
    before = torch.get_num_threads()
    few = (
        lm.device.type == "cpu"
        and sum(parameter.numel() for parameter in lm.model.parameters()) < _SMALL_MODEL_PARAMETERS
    )
    torch.set_num_threads(1 if few else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
