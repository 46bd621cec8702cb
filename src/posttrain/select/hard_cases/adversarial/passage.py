"""Where the user's own words stand among a prompt's tokens, and what they may be rewritten to."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns


@dataclass(frozen=True)
class Passage:
    """The last user turn of a prompt, apart from all that the task and the chat template put around it.

    Attributes:
        turns: the record's prompt.
        place: which of them is the last user turn.
        text: its words.
        before, own, after: token ids of the whole prompt, in their order; ``own`` are those of the words.
        lead, tail: what the own tokens hold beside the words, such as a space before them.
    """

    turns: Turns
    place: int
    text: str
    before: list[int]
    own: list[int]
    after: list[int]
    lead: str
    tail: str

    def prompt(self, text: str) -> Turns:
        """The record's prompt with other words."""
        return [{**turn, "content": text} if at == self.place else turn for at, turn in enumerate(self.turns)]

    def rewritten(self, lm: LanguageModel, own: Sequence[int]) -> str | None:
        """The words that other tokens spell; None where the model would read those words as other tokens.

        What passes is text that a user can send: rendered by the template and split into tokens, it gives exactly
        ``before``, ``own`` and ``after``.
        """
        spelled = _spelled(lm, own)
        if not spelled.startswith(self.lead) or not spelled.endswith(self.tail):
            return None
        text = spelled[len(self.lead) : len(spelled) - len(self.tail)]
        if not text or unicodedata.normalize("NFC", text) != text.strip():  # as it would be stored
            return None
        return text if lm.prompt_ids(self.prompt(text)) == [*self.before, *own, *self.after] else None


def find_passage(lm: LanguageModel, prompt: Turns) -> Passage | None:
    """The passage of a record's prompt; None where it has no user turn, or its words cannot be told from the template.

    Tokens are the template's where the prompt with other words has them too.
    """
    places = [at for at, turn in enumerate(prompt) if turn["role"] == "user" and turn["content"].strip()]
    if not places:
        return None
    place = places[-1]
    text = prompt[place]["content"].strip()
    ids, *others = (
        lm.prompt_ids([{**turn, "content": words} if at == place else turn for at, turn in enumerate(prompt)])
        for words in (text, "x", "y")  # no text begins or ends with both
    )
    begin = min(_common(ids, other) for other in others)
    shortest = min(map(len, (ids, *others)))
    end = min(_common(ids[::-1], other[::-1]) for other in others)
    end = min(end, shortest - begin)
    own = ids[begin : len(ids) - end]
    lead, found, tail = _spelled(lm, own).partition(text)
    if not found:
        return None
    passage = Passage(prompt, place, text, ids[:begin], own, ids[len(ids) - end :], lead, tail)
    return passage if passage.rewritten(lm, own) == text else None


def _spelled(lm: LanguageModel, ids: Sequence[int]) -> str:
    return str(lm.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same
