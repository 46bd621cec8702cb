"""Semantic entropy: clusters sampled answers by meaning and takes the entropy over clusters.

L. Kuhn, Y. Gal and S. Farquhar, Semantic Uncertainty, ICLR 2023 (arXiv:2302.09664); S. Farquhar et al., Detecting
hallucinations in large language models using semantic entropy, Nature 630, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.embedder_source import embedder_key
from posttrain.models.task import TaskConfig, Turns
from posttrain.select.scores.context import ScoringBatch
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel
from posttrain.select.scores.sampled_answers import normalise_answer, sampled_table

if TYPE_CHECKING:
    from posttrain.models.embedder import Embedder
    from posttrain.models.language_model import LanguageModel

AnswerClusters = list[list[int]]
"""The cluster of each sampled answer, a list a record."""

_CHUNK = 64
_VERDICTS = ("entailment", "neutral", "contradiction")
_ENTAILMENT_PROMPT = (
    "A question was answered twice.\n\nQuestion: {question}\n\nFirst answer: {first}\n\nSecond answer: {second}\n\n"
    "Read both as answers to the question. Does the first answer entail the second, contradict it, or neither? "
    "Reply with one word: entailment, contradiction or neutral."
)


def score_semantic_entropy(batch: ScoringBatch) -> list[float]:
    """Scores records by the entropy over clusters of answers with similar embeddings."""
    return _weighted_entropies(batch, _embedding_clusters(batch))


def score_semantic_entropy_discrete(batch: ScoringBatch) -> list[float]:
    """Scores records by the same entropy, from the clusters' sizes alone."""
    return [discrete_semantic_entropy(clusters) for clusters in _embedding_clusters(batch)]


def score_entailment_entropy(batch: ScoringBatch) -> list[float]:
    """Scores records by the entropy over clusters of answers that entail each other."""
    return _weighted_entropies(batch, _entailment_clusters(batch))


def score_entailment_entropy_discrete(batch: ScoringBatch) -> list[float]:
    """Scores records by the same entropy, from the clusters' sizes alone."""
    return [discrete_semantic_entropy(clusters) for clusters in _entailment_clusters(batch)]


def _embedding_clusters(batch: ScoringBatch) -> AnswerClusters:
    config = batch.scoring.config
    group = embedding_cluster_group(config.embedder, config.similarity)
    return batch.share("embedding clusters", lambda: _clusters(batch, group))


def _entailment_clusters(batch: ScoringBatch) -> AnswerClusters:
    group = entailment_cluster_group(batch.scoring.judge)
    return batch.share("entailment clusters", lambda: _clusters(batch, group))


def _clusters(batch: ScoringBatch, group: ScoreGroup) -> AnswerClusters:
    answers = sampled_table(batch)["answers"].to_pylist()
    inputs = [ScoringInput(record.prompt, tuple(own)) for record, own in zip(batch.inputs, answers, strict=True)]
    clusters: AnswerClusters = batch.scoring.run(group, inputs)["groups"].to_pylist()
    return clusters


def _weighted_entropies(batch: ScoringBatch, clusters: AnswerClusters) -> list[float]:
    table = sampled_table(batch)
    sums, counts = table["log_probabilities"].to_pylist(), table["tokens"].to_pylist()
    means = [np.array(total) / np.maximum(1, count) for total, count in zip(sums, counts, strict=True)]
    return [semantic_entropy(own, logs) for own, logs in zip(clusters, means, strict=True)]


def cluster_answers(count: int, same: Callable[[int, int], bool]) -> list[int]:
    """Returns the cluster of each of ``count`` answers, numbered in order of appearance.

    An answer joins the first cluster whose first answer means the same (Kuhn et al., algorithm 1).

    Args:
        count: number of answers.
        same: returns whether two answers, by their indices, mean the same.
    """
    first: list[int] = []
    clusters: list[int] = []
    for answer in range(count):
        cluster = next((index for index, other in enumerate(first) if same(other, answer)), len(first))
        if cluster == len(first):
            first.append(answer)
        clusters.append(cluster)
    return clusters


def semantic_entropy(clusters: Sequence[int], log_probabilities: npt.ArrayLike) -> float:
    """Computes the entropy over clusters weighted by the answers' probabilities, in nats.

    A cluster has the sum of its answers' probabilities, and the clusters' probabilities are normalised to sum to one
    (Farquhar et al., equations 4 and 5).

    Args:
        clusters: clusters of S answers.
        log_probabilities: float [S], mean over each answer's tokens, in nats: a sum would count long answers as
            improbable (Kuhn et al., section 3.3).

    Returns:
        Between 0, for one cluster, and the logarithm of the number of clusters.
    """
    from scipy.special import logsumexp

    members, values = np.asarray(clusters), np.asarray(log_probabilities, np.float64)
    sums = np.array([logsumexp(values[members == cluster]) for cluster in np.unique(members)])
    logs = sums - logsumexp(sums)
    return float(abs((np.exp(logs) * logs).sum()))  # a negation would give one cluster -0.0


def discrete_semantic_entropy(clusters: Sequence[int]) -> float:
    """Computes the entropy of the clusters' shares of the answers, in nats (Farquhar et al. 2024).

    Args:
        clusters: clusters of S answers.
    """
    shares = np.unique(np.asarray(clusters), return_counts=True)[1] / len(clusters)
    return float(abs((shares * np.log(shares)).sum()))


def embedding_cluster_group(embedder: str, similarity: float) -> ScoreGroup:
    """Clusters each record's answers as ``groups``: an answer is similar to the first of its cluster by cosine.

    Args:
        embedder: a sentence model, as `find_embedder` takes it.
        similarity: the cosine from which two answers mean the same.
    """

    # Loaded on the first call: where all clusters are cached, no sentence model is.
    @cache
    def load() -> Embedder:
        from posttrain.models.embedder import Embedder

        return Embedder.load(embedder)

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        distinct = sorted({normalise_answer(answer) for record in records for answer in record.answers})
        vectors = dict(zip(distinct, load().embed(distinct), strict=True)) if distinct else {}

        def cluster(answers: Sequence[str]) -> list[int]:
            texts = [normalise_answer(answer) for answer in answers]

            def same(first: int, second: int) -> bool:
                cosine = float(vectors[texts[first]] @ vectors[texts[second]])
                return texts[first] == texts[second] or cosine >= similarity

            return cluster_answers(len(texts), same)

        return _cluster_table([cluster(record.answers) for record in records])

    return ScoreGroup(
        "embedding_groups", 1, {"embedder": embedder_key(embedder), "similarity": similarity}, score, _CHUNK
    )


def entailment_cluster_group(judge: ScoringModel | None = None) -> ScoreGroup:
    """Clusters each record's answers as ``groups``: an answer and the first of its cluster entail each other.

    A model chooses one of three words for each direction, as in S. Farquhar et al. (Nature 630, 2024).

    Args:
        judge: the model that chooses; the one that answered by default.
    """

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.language_model import LanguageModel
        from posttrain.models.likelihood import label_scores

        model = lm if judge is None else judge.lm
        # Without the task's system message and template, which belong to the question itself.
        plain = LanguageModel(model.model, model.tokenizer, TaskConfig())
        texts = [[normalise_answer(answer) for answer in record.answers] for record in records]
        # Of distinct answers only: equal ones entail each other without a query.
        pairs = [(row, *pair) for row, answers in enumerate(texts) for pair in permutations(sorted(set(answers)), 2)]
        prompts = [_entailment_prompt(records[row].prompt, first, second) for row, first, second in pairs]
        verdicts = label_scores(plain, prompts, _VERDICTS).log_probabilities.argmax(axis=1) if pairs else []
        entails = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict == 0}

        def cluster(row: int, answers: Sequence[str]) -> list[int]:
            def same(first: int, second: int) -> bool:
                forth, back = (row, answers[first], answers[second]), (row, answers[second], answers[first])
                return answers[first] == answers[second] or (forth in entails and back in entails)

            return cluster_answers(len(answers), same)

        return _cluster_table([cluster(row, answers) for row, answers in enumerate(texts)])

    return ScoreGroup("entailment_groups", 1, {"judge": judge.id if judge else None}, score, max(1, _CHUNK // 4))


def _entailment_prompt(prompt: Turns, first: str, second: str) -> Turns:
    question = "\n".join(turn["content"] for turn in prompt)
    return [{"role": "user", "content": _ENTAILMENT_PROMPT.format(question=question, first=first, second=second)}]


def _cluster_table(clusters: AnswerClusters) -> pa.Table:
    return pa.table({"groups": pa.array(clusters, pa.list_(pa.int64()))})
