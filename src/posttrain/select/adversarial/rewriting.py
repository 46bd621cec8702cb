"""Finds the user's own words among a prompt's tokens, and the tokens that may replace them."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns


@dataclass(frozen=True)
class Passage:
    """The last user turn of a prompt, apart from all that the task and the chat template put around it.

    Attributes:
        turns: the record's prompt.
        position: index of the last user turn.
        text: its words.
        before, own, after: token ids of the whole prompt, in their order; ``own`` are those of the words.
        lead, tail: text of the own tokens before and after the words, such as a space.
    """

    turns: Turns
    position: int
    text: str
    before: list[int]
    own: list[int]
    after: list[int]
    lead: str
    tail: str

    def prompt(self, text: str) -> Turns:
        """Returns the record's prompt with other words."""
        return [{**turn, "content": text} if at == self.position else turn for at, turn in enumerate(self.turns)]

    def rewritten(self, lm: LanguageModel, own: Sequence[int]) -> str | None:
        """Returns the words that other tokens spell; None where the model would read those words as other tokens."""
        spelled = _decode(lm, own)
        if not spelled.startswith(self.lead) or not spelled.endswith(self.tail):
            return None
        text = spelled[len(self.lead) : len(spelled) - len(self.tail)]
        if not text or unicodedata.normalize("NFC", text) != text.strip():  # as it would be stored
            return None
        # Only text that a user can send: rendered by the template and split into tokens, it gives exactly these ids.
        return text if lm.prompt_ids(self.prompt(text)) == [*self.before, *own, *self.after] else None


def find_passage(lm: LanguageModel, prompt: Turns) -> Passage | None:
    """Returns the passage of a record's prompt; None without a user turn, or if its words cannot be separated."""
    positions = [at for at, turn in enumerate(prompt) if turn["role"] == "user" and turn["content"].strip()]
    if not positions:
        return None
    position = positions[-1]
    text = prompt[position]["content"].strip()
    # Tokens are the template's where the prompt with other words has them, too: no text begins or ends like x and y.
    ids, *others = (
        lm.prompt_ids([{**turn, "content": words} if at == position else turn for at, turn in enumerate(prompt)])
        for words in (text, "x", "y")
    )
    begin = min(_common_prefix(ids, other) for other in others)
    shortest = min(map(len, (ids, *others)))
    end = min(_common_prefix(ids[::-1], other[::-1]) for other in others)
    # Prefix and suffix must not overlap in the shortest prompt, where they would count a token twice.
    end = min(end, shortest - begin)
    own = ids[begin : len(ids) - end]
    lead, separator, tail = _decode(lm, own).partition(text)
    if not separator:
        return None
    passage = Passage(prompt, position, text, ids[:begin], own, ids[len(ids) - end :], lead, tail)
    return passage if passage.rewritten(lm, own) == text else None


def _decode(lm: LanguageModel, ids: Sequence[int]) -> str:
    return str(lm.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same


@dataclass(frozen=True)
class Vocabulary:
    """The V tokens of a model's embedding layer.

    Attributes:
        embeddings: float32 [V, D], the layer's output for each.
        allowed: bool [V]: printable text, no special token.
        form: int64 [V]: 2 if the token begins with a space, plus 1 if its text begins with a letter or digit.
    """

    embeddings: Tensor = field(repr=False)
    allowed: Tensor = field(repr=False)
    form: Tensor = field(repr=False)

    @classmethod
    @torch.no_grad()
    def from_language_model(cls, lm: LanguageModel) -> Self:
        """Reads the vocabulary of a model."""
        layer = lm.model.get_input_embeddings()
        # The layer's output and not its weights: some layers scale what they look up.
        embeddings = layer(torch.arange(layer.weight.shape[0], device=lm.device)).float()
        size = min(len(lm.tokenizer), len(embeddings))
        special = {*lm.tokenizer.all_special_ids, *lm.tokenizer.added_tokens_decoder}
        texts = lm.tokenizer.batch_decode(
            [[token] for token in range(size)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces = lm.tokenizer.convert_ids_to_tokens(list(range(size)))
        allowed = torch.zeros(len(embeddings), dtype=torch.bool)
        form = torch.zeros(len(embeddings), dtype=torch.int64)
        for token, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
            readable = bool(text.strip()) and text.isprintable() and "\ufffd" not in text
            allowed[token] = readable and token not in special
            spaced = text.startswith(" ") or str(piece).startswith("▁")  # SentencePiece's space
            form[token] = 2 * spaced + text.lstrip()[:1].isalnum()
        return cls(embeddings, allowed.to(lm.device), form.to(lm.device))

    def fits(self, own: Tensor) -> Tensor:
        """Marks, bool [T, V], the tokens that may replace each of ``own``, int64 [T]; never the token itself."""
        # Only a token of the same form, or words would fuse and fall apart.
        fit = self.allowed[None] & (self.form[None] == self.form[own][:, None])
        # Tokens that are not readable text, such as half of a character or a line's end, stay.
        fit = fit & self.allowed[own][:, None]
        fit[torch.arange(len(own), device=own.device), own] = False
        return fit
