"""One record under attack: its loss and gradient, the allowed rewritings, and the query budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.embedder import Embedder
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import answer_log_likelihoods, label_scores
from posttrain.models.task import Turns
from posttrain.select.adversarial.rewriting import Passage, Vocabulary

TextSimilarity = Callable[[str, Sequence[str]], npt.NDArray[np.float64]]
"""Returns the similarity in meaning of a text and N others, float64 [N], 1 for equal ones."""


@dataclass
class QueryBudget:
    """Sequences that the model may still read."""

    limit: int
    spent: int = 0
    refused: bool = False

    def take(self, count: int) -> bool:
        """Counts sequences; returns False, and counts nothing any more, if that exceeds the limit."""
        # Once refused, always refused: otherwise a small request would still pass, and what a search tries last would
        # depend on the sizes of its requests.
        self.refused = self.refused or self.spent + count > self.limit
        if not self.refused:
            self.spent += count
        return not self.refused


@dataclass(frozen=True)
class Rewriting:
    """A rewriting of a record's words.

    Attributes:
        own: their token ids, as many as the original's.
        similarity: similarity to the original.
        swaps: number of tokens that differ from the original's.
    """

    own: tuple[int, ...]
    text: str
    similarity: float
    swaps: int


@dataclass(frozen=True)
class AnswerLoss:
    """Computes -ln of the right answer's probability, in nats; with rivals, of its share among all choices.

    P(choice | prompt) is the product of its tokens' probabilities, stop token included, and the share is
    P(right) / sum of P(choice).

    Attributes:
        choices: the right answer, and then its rivals; all different.
    """

    lm: LanguageModel
    choices: list[str]

    def losses(self, prompts: Sequence[Turns]) -> npt.NDArray[np.float64]:
        """Computes each prompt's loss, float64 [B], as the model is scored and served."""
        if len(self.choices) == 1:
            sums, _ = answer_log_likelihoods(self.lm, prompts, self.choices * len(prompts))
            loss: npt.NDArray[np.float64] = -sums
            return loss
        # A share moves only where the answer does; without rivals the loss would also rise where all answers become
        # less probable.
        scores = label_scores(self.lm, prompts, self.choices, tolerance=0)
        return -scores.log_probabilities[:, 0].astype(np.float64)

    def gradient(self, prompt: Sequence[int]) -> tuple[float, Tensor]:
        """Computes the loss of a prompt's tokens, and its gradient at their embeddings: float32 [T, D]."""
        with torch.no_grad():
            embedded = self.lm.model.get_input_embeddings()(torch.tensor([list(prompt)], device=self.lm.device))
        embedded.requires_grad_()
        loss = self.of_embedded(embedded)
        (gradient,) = torch.autograd.grad(loss, embedded)
        return float(loss.detach()), gradient[0].float()

    def of_embedded(self, prompt: Tensor) -> Tensor:
        """Computes the loss, a float32 scalar, of embedded prompt tokens [1, T, D]."""
        answers = [self.lm.answer_ids(choice) for choice in self.choices]
        width, length = max(map(len, answers)), prompt.shape[1]
        # What a causal model reads behind an answer does not reach back into it, so no mask is needed.
        filler = self.lm.tokenizer.pad_token_id or 0
        ids = torch.tensor([answer + [filler] * (width - len(answer)) for answer in answers], device=self.lm.device)
        counts = torch.tensor([[at < len(answer) for at in range(width)] for answer in answers], device=self.lm.device)
        behind = self.lm.model.get_input_embeddings()(ids)
        rows = torch.cat([prompt.expand(len(answers), -1, -1), behind.to(prompt.dtype)], dim=1)
        hidden = self.lm.decoder(inputs_embeds=rows, use_cache=False).last_hidden_state
        logits = self.lm.logits(hidden[:, length - 1 : length - 1 + width])
        chosen = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        sums = (chosen * counts).sum(1)
        return -sums[0] if len(answers) == 1 else -sums.log_softmax(0)[0]


@dataclass(frozen=True)
class AttackProblem:
    """A record to rewrite, and the bounds of its rewritings.

    Attributes:
        similarity: compares texts.
        min_similarity: least similarity to the original of an allowed rewriting.
        max_swaps: most tokens that may differ from the original's.
        generator: this record's own, so that its draws do not depend on the records tried before.
    """

    lm: LanguageModel = field(repr=False)
    passage: Passage
    objective: AnswerLoss = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)
    similarity: TextSimilarity
    min_similarity: float
    max_swaps: int
    budget: QueryBudget
    generator: np.random.Generator

    @property
    def start(self) -> tuple[int, ...]:
        """The original's token ids."""
        return tuple(self.passage.own)

    def gradient(self, own: Sequence[int]) -> Tensor | None:
        """Computes the loss's gradient at the own tokens' embeddings, float32 [T, D]; None if the budget is spent."""
        if not self.budget.take(len(self.objective.choices)):
            return None
        passage = self.passage
        _, gradient = self.objective.gradient([*passage.before, *own, *passage.after])
        return gradient[len(passage.before) : len(passage.before) + len(own)]

    def gains(self, own: Sequence[int]) -> Tensor | None:
        """Computes what every swap of one token adds to the loss, to first order; None if the budget is spent.

        The gain of v in place of w is (e_v - e_w) . g, with g the loss's gradient at that position (J. Ebrahimi et
        al., HotFlip, ACL 2018, arXiv:1712.06751, equation 10, over embeddings in place of one-hot vectors).

        Returns:
            float32 [T, V], -inf where a swap is not allowed.
        """
        gradient = self.gradient(own)
        if gradient is None:
            return None
        return first_order_gains(gradient, torch.tensor(own, device=gradient.device), self.vocabulary)

    def start_loss(self) -> float | None:
        """Computes the original's loss; None if the budget is spent."""
        if not self.budget.take(1):
            return None
        return float(self.objective.losses([self.passage.prompt(self.passage.text)])[0])

    def losses(self, candidates: Sequence[Rewriting]) -> npt.NDArray[np.float64] | None:
        """Computes exact losses, float64 [B]; None if the budget is spent."""
        if not self.budget.take(len(candidates)):
            return None
        return self.objective.losses([self.passage.prompt(candidate.text) for candidate in candidates])

    def allowed(self, proposals: Sequence[Sequence[int]]) -> list[Rewriting]:
        """Returns the proposals that are text, differ in few tokens and mean the same, in their order, each once."""
        spelled: dict[tuple[int, ...], str] = {}
        for own in map(tuple, proposals):
            if own in spelled or not 0 < self.swaps(own) <= self.max_swaps:
                continue
            text = self.passage.rewritten(self.lm, own)
            if text is not None:
                spelled[own] = text
        if not spelled:
            return []
        similarities = self.similarity(self.passage.text, list(spelled.values())).tolist()
        return [
            Rewriting(own, text, similarity, self.swaps(own))
            for (own, text), similarity in zip(spelled.items(), similarities, strict=True)
            if similarity >= self.min_similarity
        ]

    def swaps(self, own: Sequence[int]) -> int:
        """Counts the tokens that differ from the original's."""
        return sum(token != original for token, original in zip(own, self.passage.own, strict=True))


def first_order_gains(gradient: Tensor, own: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Computes (e_v - e_w) . g for every token v in place of each w of ``own``, -inf where that is not allowed.

    Args:
        gradient: float32 [T, D].
        own: int64 [T].

    Returns:
        float32 [T, V].
    """
    embeddings = vocabulary.embeddings
    gains = gradient @ embeddings.T - (gradient * embeddings[own]).sum(1, keepdim=True)
    return gains.masked_fill(~vocabulary.fits(own), -torch.inf)


def cosine_similarity(embedder: Embedder) -> TextSimilarity:
    """Returns a function that compares texts by the cosine of their embeddings."""

    # The original is compared again in every step of its attack.
    @lru_cache(maxsize=16)
    def embedded(text: str) -> npt.NDArray[np.float32]:
        embedding: npt.NDArray[np.float32] = embedder.embed([text])[0]
        return embedding

    def similarity(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
        # Embeddings have length one.
        return embedder.embed(others).astype(np.float64) @ embedded(text).astype(np.float64)

    return similarity
