"""Samples replies from a model on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.generation.prompts import requested_lines
from posttrain.models.generator import Answer, LocalGenerator, Request, Sampling
from posttrain.models.language_model import LanguageModel
from posttrain.models.reply_cache import Turns
from posttrain.store.hashing import digest

_TOP_P = 0.95  # share of the probability that is drawn from: the paper's


@dataclass(frozen=True)
class LocalModel:
    """Implements `posttrain.models.reply_cache.Generate` by nucleus sampling.

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

    def __call__(self, prompts: Sequence[Turns]) -> list[str | None]:
        plain = [[dict(turn) for turn in prompt] for prompt in prompts]
        # The seeds depend on the call's prompts, so that a resumed synthesis draws the same replies, and a prompt that
        # is repeated gets another one.
        call = digest([self.seed, plain])
        requests = [
            Request(
                prompt,
                Sampling(
                    self.max_tokens,
                    self.temperature,
                    _TOP_P,
                    seed=int(digest([call, number])[:15], 16),
                    lines=requested_lines(prompt),
                ),
            )
            for number, prompt in enumerate(plain)
        ]
        answers = LocalGenerator(self.lm).generate(requests)
        return [self._read(answer, request.sampling) for answer, request in zip(answers, requests, strict=True)]

    def _read(self, answer: Answer, sampling: Sampling) -> str | None:
        if sampling.lines is None or answer.finished:
            return answer.text or None if answer.finished else None
        lines = str(self.lm.tokenizer.decode(answer.ids, skip_special_tokens=True)).splitlines(keepends=True)
        return "".join(line for line in lines if line.endswith("\n") and line.strip()).strip() or None
