"""What a search may ask about one record: gains of swaps, losses, and which rewritings are allowed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.select.hard_cases.adversarial.objective import Objective
from posttrain.select.hard_cases.adversarial.passage import Passage
from posttrain.select.hard_cases.adversarial.vocabulary import Vocabulary

Similarity = Callable[[str, Sequence[str]], npt.NDArray[np.float64]]
"""A text and N others to their likeness in meaning, float64 [N], 1 for equal ones."""


@dataclass
class Budget:
    """Sequences that the model may still read."""

    limit: int
    spent: int = 0
    refused: bool = False

    def take(self, count: int) -> bool:
        """Count so many sequences; False, and nothing is counted any more, where fewer are left."""
        self.refused = self.refused or self.spent + count > self.limit
        if not self.refused:
            self.spent += count
        return not self.refused


@dataclass(frozen=True)
class Candidate:
    """Other words for a record.

    Attributes:
        own: their token ids, as many as the original's.
        similarity: to the original.
        swaps: tokens that differ from the original's.
    """

    own: tuple[int, ...]
    text: str
    similarity: float
    swaps: int


@dataclass(frozen=True)
class Problem:
    """One record under search.

    Attributes:
        similarity: compares texts.
        least_similarity: to the original, of what is allowed.
        most_swaps: tokens that may differ from the original's.
        generator: of this record alone.
    """

    lm: LanguageModel = field(repr=False)
    passage: Passage
    objective: Objective = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)
    similarity: Similarity
    least_similarity: float
    most_swaps: int
    budget: Budget
    generator: np.random.Generator

    @property
    def start(self) -> tuple[int, ...]:
        """The original's token ids."""
        return tuple(self.passage.own)

    def gradient(self, own: Sequence[int]) -> Tensor | None:
        """The loss's gradient at the own tokens' embeddings, float32 [T, D]; None where the budget is spent."""
        if not self.budget.take(len(self.objective.choices)):
            return None
        passage = self.passage
        _, found = self.objective.gradient([*passage.before, *own, *passage.after])
        return found[len(passage.before) : len(passage.before) + len(own)]

    def gains(self, own: Sequence[int]) -> Tensor | None:
        """What every swap of one token would add to the loss, to first order; None where the budget is spent.

        The gain of v in the place of w is (e_v - e_w) . g, with g the loss's gradient at that place (J. Ebrahimi et
        al., HotFlip, ACL 2018, arXiv:1712.06751, equation 10, over embeddings in place of one-hot vectors).

        Returns:
            float32 [T, V], -inf where a swap is not allowed.
        """
        gradient = self.gradient(own)
        if gradient is None:
            return None
        return first_order_gains(gradient, torch.tensor(own, device=gradient.device), self.vocabulary)

    def start_loss(self) -> float | None:
        """The original's loss; None where the budget is spent."""
        if not self.budget.take(1):
            return None
        return float(self.objective.losses([self.passage.prompt(self.passage.text)])[0])

    def losses(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64] | None:
        """Exact losses, float64 [B]; None where the budget is spent."""
        if not self.budget.take(len(candidates)):
            return None
        return self.objective.losses([self.passage.prompt(one.text) for one in candidates])

    def allowed(self, proposals: Sequence[Sequence[int]]) -> list[Candidate]:
        """The proposals that are text, differ in few tokens and mean the same, in their order, each once."""
        spelled: dict[tuple[int, ...], str] = {}
        for own in map(tuple, proposals):
            if own in spelled or not 0 < self.swaps(own) <= self.most_swaps:
                continue
            text = self.passage.rewritten(self.lm, own)
            if text is not None:
                spelled[own] = text
        if not spelled:
            return []
        likeness = self.similarity(self.passage.text, list(spelled.values())).tolist()
        return [
            Candidate(own, text, alike, self.swaps(own))
            for (own, text), alike in zip(spelled.items(), likeness, strict=True)
            if alike >= self.least_similarity
        ]

    def swaps(self, own: Sequence[int]) -> int:
        """Tokens that differ from the original's."""
        return sum(one != other for one, other in zip(own, self.passage.own, strict=True))


def first_order_gains(gradient: Tensor, own: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(e_v - e_w) . g for every token v in the place of each w of ``own``, -inf where that is not allowed.

    Args:
        gradient: float32 [T, D].
        own: int64 [T].

    Returns:
        float32 [T, V].
    """
    embeddings = vocabulary.embeddings
    gains = gradient @ embeddings.T - (gradient * embeddings[own]).sum(1, keepdim=True)
    return gains.masked_fill(~vocabulary.fits(own), -torch.inf)
