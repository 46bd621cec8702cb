"""Renders conversations by chat templates as token ids, with a mask over the assistant's turns.

An example is the prompt's tokens and then the answer's, exactly as in serving: the model reads the rendered prompt and
generates from its end. Training on anything else would train other tokens than those that are generated. No
``{% generation %}`` marks are needed.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.models.task import Turns
from posttrain.models.template_check import TemplateAbilities, message_line, template_abilities
from posttrain.store.errors import UserError, shorten, to_line

_OPENED_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")


class RefusedTurns(UserError):
    """The template refuses a conversation, or does not show the model all of it.

    Attributes:
        prompt: the prompt of the record, where `LanguageModel` renders it.
    """

    prompt: Turns | None = None


@contextmanager
def naming_records(prompts: Sequence[Turns], where: Callable[[int], str]) -> Iterator[None]:
    """Names the record whose prompt the chat template refuses.

    Args:
        prompts: of N records, as `LanguageModel` renders them.
        where: returns the place of record 0 to N - 1, such as ``pool.jsonl:12``.
    """
    try:
        yield
    except RefusedTurns as error:
        if error.prompt not in prompts:
            raise
        raise UserError(error.what, where=where(prompts.index(error.prompt)), fix=error.fix) from None


@contextmanager
def keeping_prompt(prompt: Turns) -> Iterator[None]:
    """Notes the record's prompt in a refusal."""
    try:
        yield
    except RefusedTurns as error:
        error.prompt = prompt
        raise


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids and, for each, whether it is supervised (an assistant's turn and its stop token)."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """Encodes conversations by a tokenizer's chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        stop_ids: tokens that end an answer, from the model's generation config.
    """

    tokenizer: Any
    stop_ids: frozenset[int]

    def prompt_ids(self, turns: Turns) -> list[int]:
        """Returns the tokens of the conversation up to the start of the assistant's answer.

        Raises:
            UserError: the template refuses the turns, does not show the model all of them, or cannot be rendered.
        """
        return self._tokens(self._render(turns, answer=False))

    def conversation_text(self, turns: Turns) -> str:
        """Renders a conversation that ends with an answer; raises as `prompt_ids`."""
        return self._render(turns, answer=True)

    def answer_ids(self, answer: str) -> list[int]:
        """Returns the tokens of an answer and its stop token, as they follow any prompt."""
        # Cut out of a rendered conversation, since no API says what a template puts behind an answer.
        turns = [{"role": "user", "content": "x"}]
        prompt = self._render(turns, answer=False)
        whole = self._render([*turns, {"role": "assistant", "content": answer}], answer=True)
        # Some prompts end with text that no finished answer shows, such as an opened <think>.
        answer_text = whole.removeprefix(prompt) if whole.startswith(prompt) else answer
        answer_text = self._close_thought(answer_text, answer)
        # Tokenised behind the prompt: alone, SentencePiece would put a space before the answer's first token.
        before, through = self._tokens(prompt), self._tokens(prompt + answer_text)
        if through[: len(before)] != before:  # the tokenizer fuses the prompt's end with the answer's beginning
            return self._up_to_stop(self._tokens(answer_text))
        return self._up_to_stop(through[len(before) :])

    def encode(self, turns: Turns, answer: str) -> TokenizedExample:
        """Encodes a conversation and its answer as in serving: ``prompt_ids(turns) + answer_ids(answer)``.

        The answer is supervised, and so is every earlier assistant turn that appears in the prompt unchanged.
        """
        prompt, last = self.prompt_ids(turns), self.answer_ids(answer)
        supervised = [False] * len(prompt)
        for position, turn in enumerate(turns):
            if turn["role"] != "assistant" or all(earlier["role"] != "user" for earlier in turns[:position]):
                continue
            before, reply = self.prompt_ids(turns[:position]), self.answer_ids(turn["content"])
            end = len(before) + len(reply)
            # Some templates change earlier turns as the conversation grows, such as by dropping their reasoning: those
            # tokens are never generated in this form, so they are context only.
            if prompt[:end] == before + reply:
                supervised[len(before) : end] = [True] * len(reply)
        return TokenizedExample(prompt + last, supervised + [True] * len(last))

    def answer_text(self, generated: str) -> str:
        """Returns a generated answer as records hold it: with the thought that the prompt opened, if it has one."""
        text, close = generated.strip(), self._thought[1]
        if not close or close not in text:
            return text
        return text.removeprefix(close).lstrip() if text.startswith(close) else self._thought[0] + text

    @cached_property
    def _thought(self) -> tuple[str, str]:
        """The text by which every prompt opens a thought, such as ``<think>\\n``, and the mark that closes it."""
        opened = _OPENED_THOUGHT.search(self._render([{"role": "user", "content": "x"}], answer=False))
        return (opened[0], f"</{opened[1]}>") if opened else ("", "")

    def _close_thought(self, rendered: str, answer: str) -> str:
        """Returns a rendered answer as it follows a prompt that has opened a thought."""
        opening, close = self._thought
        mark = opening.strip()
        if mark and answer.lstrip().startswith(mark) and close not in answer:
            raise RefusedTurns(f"the answer opens a thought (`{mark}`) that never ends", fix=f"write `{close}`")
        if mark and rendered.lstrip().startswith(mark):
            # The prompt has the mark already.
            rendered = rendered.lstrip().removeprefix(mark).removeprefix(opening.removeprefix(mark))
        # An answer without a thought follows an empty one, as Qwen3's own template writes it.
        return rendered if close in rendered else f"\n{close}\n\n{rendered}"

    def _up_to_stop(self, ids: list[int]) -> list[int]:
        # Templates put more behind the stop token, such as a line break, which the model never generates.
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: position + 1]
        stop = self.tokenizer.eos_token_id
        return [*ids, min(self.stop_ids) if stop is None else stop]

    def _tokens(self, text: str) -> list[int]:
        # The template writes its special tokens itself; a second beginning-of-text token would be put before it.
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except TypeError:
            # Half of a surrogate pair, which Python's text can hold and UTF-8 cannot.
            what = "the model's chat template writes text that is not Unicode"
            raise UserError(what, where="model", fix="correct it") from None

    @cached_property
    def _abilities(self) -> TemplateAbilities:
        try:
            template, variables = self.tokenizer.get_chat_template(), json.dumps(self.tokenizer.special_tokens_map)
            if not isinstance(template, str):
                raise ValueError(f"it is not text: {template!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"the model's chat template cannot be used: {message_line(error)}", where="model") from None
        return template_abilities(template, variables)

    def _render(self, turns: Turns, *, answer: bool) -> str:
        from jinja2 import TemplateError

        # First, as it renders the template in a process that can be ended.
        abilities = self._abilities
        roles = [turn["role"] for turn in turns]
        if "system" in roles and not abilities.system:
            raise RefusedTurns(
                "the model's chat template drops system messages",
                where="model",
                fix="correct it, or remove task.system and the records' system messages",
            )
        if "tool" in roles and not abilities.tool:
            what = "the model's chat template drops the turns of tools"
            raise RefusedTurns(what, where="model", fix="correct it, or leave such records out")
        if len(roles) - roles.count("system") > (2 if answer else 1) and not abilities.earlier_turns:
            what = "the model's chat template drops all turns but the last"
            raise RefusedTurns(what, where="model", fix="correct it")
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not answer))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            # Its own `raise_exception` is not a fault; the sandbox, a missing name and the like are.
            refuses = type(error) is TemplateError
            what = "refuses the turns" if refuses else f"fails with {type(error).__name__} on the turns"
            shown = f"({', '.join(roles)}) that end in `{shorten(to_line(turns[-1]['content'][:200]), 40)}`"
            raise RefusedTurns(f"the model's chat template {what} {shown}: {message_line(error)}") from None
