"""Which of several answers to one prompt mean the same: by their embeddings, or as a model judges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import pyarrow as pa

from posttrain.models.task import TaskConfig, Turns
from posttrain.select.scores.agreement import normalised
from posttrain.select.scores.group import Asked, Group, ScoringModel
from posttrain.select.scores.semantic import group_answers

if TYPE_CHECKING:
    from posttrain.models.embedder import Embedder
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 64
_VERDICTS = ("entailment", "neutral", "contradiction")
_QUESTION = (
    "A question was answered twice.\n\nQuestion: {question}\n\nFirst answer: {first}\n\nSecond answer: {second}\n\n"
    "Read both as answers to the question. Does the first answer entail the second, contradict it, or neither? "
    "Reply with one word: entailment, contradiction or neutral."
)


def embedding_groups(embedder: str, similarity: float) -> Group:
    """``groups``: for each record's answers their groups, an answer being like the first one of its group by cosine.

    Args:
        embedder: a sentence model, as `find_embedder` takes it.
        similarity: the cosine from which two answers mean the same.
    """
    from posttrain.models.embedder import Embedder, embedder_key

    @cache
    def loaded() -> Embedder:
        return Embedder.load(embedder)

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        distinct = sorted({normalised(answer) for one in records for answer in one.answers})
        vectors = dict(zip(distinct, loaded().embed(distinct), strict=True)) if distinct else {}

        def groups(answers: Sequence[str]) -> list[int]:
            own = [normalised(answer) for answer in answers]

            def same(one: int, other: int) -> bool:
                return own[one] == own[other] or float(vectors[own[one]] @ vectors[own[other]]) >= similarity

            return group_answers(len(own), same)

        return _table([groups(one.answers) for one in records])

    return Group("embedding_groups", 1, {"embedder": embedder_key(embedder), "similarity": similarity}, score, _AT_ONCE)


def entailment_groups(judge: ScoringModel | None = None) -> Group:
    """``groups``: for each record's answers their groups, an answer and the first of its group entailing each other.

    Both directions are asked of a model as a choice of three words, as S. Farquhar et al. (Nature 630, 2024) do.

    Args:
        judge: is asked; the model that answered by default.
    """

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.language_model import LanguageModel
        from posttrain.models.likelihood import label_scores

        asked = lm if judge is None else judge.lm
        plain = LanguageModel(asked.model, asked.tokenizer, TaskConfig())
        own = [[normalised(answer) for answer in one.answers] for one in records]
        pairs = [(row, *pair) for row, words in enumerate(own) for pair in permutations(sorted(set(words)), 2)]
        prompts = [_question(records[row].prompt, first, second) for row, first, second in pairs]
        found = label_scores(plain, prompts, _VERDICTS).log_probabilities.argmax(axis=1) if pairs else []
        entails = {pair for pair, verdict in zip(pairs, found, strict=True) if verdict == 0}

        def groups(row: int, words: Sequence[str]) -> list[int]:
            def same(one: int, other: int) -> bool:
                there, back = (row, words[one], words[other]), (row, words[other], words[one])
                return words[one] == words[other] or (there in entails and back in entails)

            return group_answers(len(words), same)

        return _table([groups(row, words) for row, words in enumerate(own)])

    return Group("entailment_groups", 1, {"judge": judge.id if judge else None}, score, max(1, _AT_ONCE // 4))


def _question(prompt: Turns, first: str, second: str) -> Turns:
    question = "\n".join(turn["content"] for turn in prompt)
    return [{"role": "user", "content": _QUESTION.format(question=question, first=first, second=second)}]


def _table(groups: list[list[int]]) -> pa.Table:
    return pa.table({"groups": pa.array(groups, pa.list_(pa.int64()))})
