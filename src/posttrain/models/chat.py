"""Chat templates: conversations as token ids, with a mask over what the assistant says.

An example is the prompt's tokens and then the answer's, which is exactly what happens when a model is served: it reads
the rendered prompt and generates from its end. Training on anything else would train other tokens than those that
are generated. No ``{% generation %}`` marks are needed.
"""

from dataclasses import dataclass
from typing import Any

from posttrain.models.task import Turns
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids and, for each, whether it is supervised (the assistant's words and their stop token)."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        stop_ids: tokens that end an answer, from the model's generation config.
    """

    tokenizer: Any
    stop_ids: frozenset[int]

    def prompt_ids(self, turns: Turns) -> list[int]:
        """The conversation up to where the assistant starts to answer."""
        return self._tokens(self._render(turns, answer=False))

    def answer_ids(self, answer: str) -> list[int]:
        """An answer and its stop token, as they follow any prompt."""
        turns = [{"role": "user", "content": "x"}]
        prompt = self._render(turns, answer=False)
        whole = self._render([*turns, {"role": "assistant", "content": answer}], answer=True)
        # Some prompts end with words that no finished answer shows, such as an opened <think>.
        spoken = whole.removeprefix(prompt) if whole.startswith(prompt) else answer
        before, through = self._tokens(prompt), self._tokens(prompt + spoken)
        if through[: len(before)] != before:  # the tokenizer fuses the prompt's end with the answer's beginning
            return self._up_to_stop(self._tokens(spoken))
        return self._up_to_stop(through[len(before) :])

    def encode(self, turns: Turns, answer: str) -> TokenizedExample:
        """A conversation and its answer: ``prompt_ids(turns) + answer_ids(answer)``, as they are served.

        The answer is supervised, and so is every earlier assistant turn that stands in the prompt with its stop token,
        after what its own prompt was. Where the template changes earlier turns as the conversation grows (some drop
        earlier reasoning), those turns are only read.
        """
        prompt, last = self.prompt_ids(turns), self.answer_ids(answer)
        supervised = [False] * len(prompt)
        for position, turn in enumerate(turns):
            if turn["role"] != "assistant" or all(earlier["role"] != "user" for earlier in turns[:position]):
                continue
            before, answered = self.prompt_ids(turns[:position]), self.answer_ids(turn["content"])
            end = len(before) + len(answered)
            if prompt[:end] == before + answered:
                supervised[len(before) : end] = [True] * len(answered)
        return TokenizedExample(prompt + last, supervised + [True] * len(last))

    def _up_to_stop(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: position + 1]
        stop = self.tokenizer.eos_token_id
        return [*ids, min(self.stop_ids) if stop is None else stop]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, turns: Turns, *, answer: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not answer))
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise UserError(f"the model's chat template refuses the turns ({roles}): {error}") from None
