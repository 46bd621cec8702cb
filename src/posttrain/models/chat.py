"""Chat templates: conversations as token ids, with a mask over what the assistant says.

The prompt is tokenised by itself and the answer by itself, which is exactly what happens when a model is served:
it reads the rendered prompt and goes on from its last token. Training on anything else would train other tokens
than those that are generated. No ``{% generation %}`` marks are needed.
"""

from dataclasses import dataclass
from typing import Any

from posttrain.models.task import Turns
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it is supervised (the assistant's words and their stop token)."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class Chat:
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
        if not whole.startswith(prompt):
            return self._up_to_stop(self._tokens(answer))
        return self._up_to_stop(self._tokens(whole[len(prompt) :]))

    def encode(self, turns: Turns, answer: str) -> Encoded:
        """A conversation and its answer; every assistant turn is supervised.

        Where the template changes earlier turns as the conversation grows (some drop earlier reasoning), only the
        last answer is supervised, after the prompt as it is served.
        """
        conversation = [*turns, {"role": "assistant", "content": answer}]
        ids: list[int] = []
        supervised: list[bool] = []
        text = ""
        for position, turn in enumerate(conversation):
            if turn["role"] != "assistant":
                continue
            before = self._render(conversation[:position], answer=False)
            after = self._render(conversation[: position + 1], answer=True)
            if not (before.startswith(text) and after.startswith(before)):
                prompt, last = self.prompt_ids(turns), self.answer_ids(answer)
                return Encoded(prompt + last, [False] * len(prompt) + [True] * len(last))
            between = self._tokens(before[len(text) :])
            spoken = self._tokens(after[len(before) :])
            said = self._up_to_stop(spoken)
            rest = spoken[len(said) :]
            last_turn = position == len(conversation) - 1
            ids += between + said + ([] if last_turn else rest)
            supervised += [False] * len(between) + [True] * len(said) + ([] if last_turn else [False] * len(rest))
            text = after
        return Encoded(ids, supervised)

    def _up_to_stop(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: position + 1]
        return [*ids, self.tokenizer.eos_token_id]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, turns: Turns, *, answer: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not answer))
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise UserError(f"the model's chat template refuses the turns ({roles}): {error}") from None
