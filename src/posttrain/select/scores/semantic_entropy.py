"""Semantic entropy: clusters sampled answers by meaning and takes the entropy over clusters.

L. Kuhn, Y. Gal and S. Farquhar, Semantic Uncertainty, ICLR 2023 (arXiv:2302.09664); S. Farquhar et al., Detecting
hallucinations in large language models using semantic entropy, Nature 630, 2024."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.special import logsumexp

from posttrain.models.task import TaskConfig, Turns
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel
from posttrain.select.scores.sampled_answers import normalise_answer

if TYPE_CHECKING:
    from posttrain.models.embedder import Embedder
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64

_VERDICTS = ("entailment", "neutral", "contradiction")

_ENTAILMENT_PROMPT = (
    "A question was answered twice.\n\nQuestion: {question}\n\nFirst answer: {first}\n\nSecond answer: {second}\n\n"
    "Read both as answers to the question. Does the first answer entail the second, contradict it, or neither? "
    "Reply with one word: entailment, contradiction or neutral."
)


def cluster_answers(count: int, same: Callable[[int, int], bool]) -> list[int]:
    """The group of each of ``count`` answers, numbered as they appear.

    An answer joins the first group whose first answer means the same (Kuhn et al., algorithm 1).

    Args:
        same: whether two answers, by their places, mean the same.
    """
    first: list[int] = []
    groups: list[int] = []
    for answer in range(count):
        found = next((group for group, other in enumerate(first) if same(other, answer)), len(first))
        if found == len(first):
            first.append(answer)
        groups.append(found)
    return groups


def semantic_entropy(groups: Sequence[int], log_probabilities: npt.ArrayLike) -> float:
    """Entropy over groups weighed by the answers' probabilities, in nats.

    A group has the sum of its answers' probabilities, and the groups' probabilities are normalised to sum to one
    (Farquhar et al., equations 4 and 5). Log-probabilities are per token, so that long answers are not held to be
    improbable (Kuhn et al., section 3.3).

    Args:
        groups: of S answers.
        log_probabilities: float [S], mean over each answer's tokens, in nats.

    Returns:
        Between 0, for one group, and the logarithm of the number of groups.
    """
    members, values = np.asarray(groups), np.asarray(log_probabilities, np.float64)
    sums = np.array([logsumexp(values[members == group]) for group in np.unique(members)])
    logs = sums - logsumexp(sums)
    return float(abs((np.exp(logs) * logs).sum()))


def discrete_semantic_entropy(groups: Sequence[int]) -> float:
    """Entropy of the groups' shares of the answers, in nats, which needs no probabilities (Farquhar et al. 2024).

    Args:
        groups: of S answers.
    """
    shares = np.unique(np.asarray(groups), return_counts=True)[1] / len(groups)
    return float(abs((shares * np.log(shares)).sum()))


def embedding_cluster_group(embedder: str, similarity: float) -> ScoreGroup:
    """``groups``: for each record's answers their groups, an answer being like the first one of its group by cosine.

    Args:
        embedder: a sentence model, as `find_embedder` takes it.
        similarity: the cosine from which two answers mean the same.
    """
    from posttrain.models.embedder import Embedder, embedder_key

    @cache
    def loaded() -> Embedder:
        return Embedder.load(embedder)

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        distinct = sorted({normalise_answer(answer) for one in records for answer in one.answers})
        vectors = dict(zip(distinct, loaded().embed(distinct), strict=True)) if distinct else {}

        def groups(answers: Sequence[str]) -> list[int]:
            own = [normalise_answer(answer) for answer in answers]

            def same(one: int, other: int) -> bool:
                return own[one] == own[other] or float(vectors[own[one]] @ vectors[own[other]]) >= similarity

            return cluster_answers(len(own), same)

        return _cluster_table([groups(one.answers) for one in records])

    return ScoreGroup(
        "embedding_groups", 1, {"embedder": embedder_key(embedder), "similarity": similarity}, score, _CHUNK
    )


def entailment_cluster_group(judge: ScoringModel | None = None) -> ScoreGroup:
    """``groups``: for each record's answers their groups, an answer and the first of its group entailing each other.

    Both directions are asked of a model as a choice of three words, as S. Farquhar et al. (Nature 630, 2024) do.

    Args:
        judge: is asked; the model that answered by default.
    """

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.language_model import LanguageModel
        from posttrain.models.likelihood import label_scores

        asked = lm if judge is None else judge.lm
        plain = LanguageModel(asked.model, asked.tokenizer, TaskConfig())
        own = [[normalise_answer(answer) for answer in one.answers] for one in records]
        pairs = [(row, *pair) for row, words in enumerate(own) for pair in permutations(sorted(set(words)), 2)]
        prompts = [_entailment_prompt(records[row].prompt, first, second) for row, first, second in pairs]
        found = label_scores(plain, prompts, _VERDICTS).log_probabilities.argmax(axis=1) if pairs else []
        entails = {pair for pair, verdict in zip(pairs, found, strict=True) if verdict == 0}

        def groups(row: int, words: Sequence[str]) -> list[int]:
            def same(one: int, other: int) -> bool:
                there, back = (row, words[one], words[other]), (row, words[other], words[one])
                return words[one] == words[other] or (there in entails and back in entails)

            return cluster_answers(len(words), same)

        return _cluster_table([groups(row, words) for row, words in enumerate(own)])

    return ScoreGroup("entailment_groups", 1, {"judge": judge.id if judge else None}, score, max(1, _CHUNK // 4))


def _entailment_prompt(prompt: Turns, first: str, second: str) -> Turns:
    question = "\n".join(turn["content"] for turn in prompt)
    return [{"role": "user", "content": _ENTAILMENT_PROMPT.format(question=question, first=first, second=second)}]


def _cluster_table(groups: list[list[int]]) -> pa.Table:
    return pa.table({"groups": pa.array(groups, pa.list_(pa.int64()))})
