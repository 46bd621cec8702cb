"""Free text of several models: a vote, the first of a cascade that is sure enough, or the one that a gate chooses.

Sources: L. Chen, M. Zaharia and J. Zou, FrugalGPT, 2023 (arXiv:2305.05176), section 3; N. Gupta et al., Language Model
Cascades: Token-Level Uncertainty and Beyond, ICLR 2024 (arXiv:2404.10136), for the mean log-probability of an answer's
tokens as the confidence of a cascade ("Chow-Average"): their sum would fall with every token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.cascade import can_answer, choose_models, is_bounded
from posttrain.models.ensembles.members import Member, MemberTexts, embedder_flops, prompt_texts
from posttrain.models.ensembles.mixture_gate import MixtureGate
from posttrain.models.generator import Answer
from posttrain.models.task import Turns
from posttrain.store.errors import UserError
from posttrain.store.text_files import normalise_lines

Floats = npt.NDArray[np.float64]

AnswerScore = Callable[[Sequence[Answer]], npt.ArrayLike]
"""Scores answers to N held-out prompts: float [N] in [0, 1], higher is better."""


@dataclass(frozen=True)
class EnsembleTexts:
    """Free-text answers of an ensemble to N prompts.

    Attributes:
        answers: [N].
        answered_by: int64 [N], number of the model that answered; -1 where all did together.
        members: answers of the single models.
        gate_seconds: seconds of the gate's sentence model for all prompts, without loading it.
        gate_flops: float64 [N], what it computed for each prompt.
    """

    answers: list[Answer]
    answered_by: npt.NDArray[np.int64]
    members: MemberTexts
    gate_seconds: float = 0.0
    gate_flops: Floats | float = 0.0


@dataclass(frozen=True)
class PromptFeatures:
    """Embeddings of N prompts, float [N, D], and what they cost (`EnsembleTexts`)."""

    values: npt.NDArray[np.float32]
    seconds: float
    flops: Floats


def embed_prompts(embedder: str, prompts: Sequence[Turns]) -> PromptFeatures:
    """Embeds prompts by a sentence model, which is named as in `posttrain.models.embedder_source.find_embedder`."""
    from posttrain.models.embedder import Embedder

    model = Embedder.load(embedder)
    start = time.perf_counter()
    values = model.embed(prompt_texts(prompts))
    return PromptFeatures(values, time.perf_counter() - start, embedder_flops(model, prompts))


def answer_by_vote(members: Sequence[Member], weights: Sequence[float], prompts: Sequence[Turns]) -> EnsembleTexts:
    """Answers by the text with the most votes, compared as by `normalise_lines`; of equal ones the first model's.

    Args:
        members: M models.
        weights: M numbers, each model's votes.
        prompts: N conversations.
    """
    texts = MemberTexts.of_all(members, prompts)
    written = [[normalise_lines(answer.text) for answer in own] for own in texts.complete()]
    winners = []
    for proposed in zip(*written, strict=True):
        # Rounded, so that weights of 0.1 and 0.2 are as many votes as one of 0.3.
        votes = [
            round(sum(weight for text, weight in zip(proposed, weights, strict=True) if text == own), 9)
            for own in proposed
        ]
        winners.append(votes.index(max(votes)))
    return EnsembleTexts(texts.by(np.array(winners, np.int64)), np.full(len(prompts), -1, np.int64), texts)


def answer_in_turn(
    members: Sequence[Member], thresholds: Sequence[float], prompts: Sequence[Turns], *, all_models: bool = False
) -> EnsembleTexts:
    """Answers by a cascade.

    Args:
        members: M models, the cheapest first.
        thresholds: M - 1 confidences (`MemberTexts.confidence`) from which a model's answer is taken.
        prompts: N conversations.
        all_models: True to ask every model every prompt, as the cascade's curve needs; otherwise a model is asked only
            what the cheaper ones before it leave.
    """
    if all_models:
        texts = MemberTexts.of_all(members, prompts)
        chosen = choose_models(texts.confidence, thresholds)
        return EnsembleTexts(texts.by(chosen), chosen, texts)
    texts, rest = MemberTexts(members, prompts), np.arange(len(prompts))
    chosen = np.full(len(prompts), len(members) - 1, np.int64)
    for number, threshold in enumerate([*thresholds, 0.0]):
        if not can_answer(threshold):
            continue
        texts.ask(number, rest)
        sure = texts.confidence[number, rest] >= threshold
        chosen[rest[sure]] = number
        rest = rest[~sure]
    return EnsembleTexts(texts.by(chosen), chosen, texts)


def answer_by_gate(
    members: Sequence[Member],
    gate: MixtureGate,
    features: PromptFeatures,
    prompts: Sequence[Turns],
    *,
    all_models: bool = False,
) -> EnsembleTexts:
    """Answers each prompt by the model of the greatest weight; of equal ones the first.

    Args:
        members: M models.
        gate: their weights by the features of a prompt.
        features: of the prompts.
        prompts: N conversations.
        all_models: True to ask every model every prompt, to compare them.
    """
    chosen = gate(features.values).argmax(axis=1)
    if all_models:
        texts = MemberTexts.of_all(members, prompts)
    else:
        texts = MemberTexts(members, prompts)
        for number in range(len(members)):
            texts.ask(number, np.flatnonzero(chosen == number))
    return EnsembleTexts(texts.by(chosen), chosen, texts, features.seconds, features.flops)


def exact_match(answers: Sequence[str]) -> AnswerScore:
    """Returns the score that is 1 for an answer equal to the expected one as by `normalise_lines`, and else 0."""
    expected = [normalise_lines(answer) for answer in answers]
    return lambda written: [
        float(normalise_lines(answer.text) == right) for answer, right in zip(written, expected, strict=True)
    ]


def score_members(texts: MemberTexts, score: AnswerScore) -> Floats:
    """Scores the answers of models that were asked everything, float64 [M, N].

    Raises:
        UserError: a score is outside of 0 to 1.
    """
    scores = np.array([score(own) for own in texts.complete()], np.float64)
    if not is_bounded(scores):
        what = f"scores of {scores.min():g} to {scores.max():g}, and fitting needs scores from 0 to 1"
        raise UserError(what, where="suite", fix="name a suite with another scorer")
    return scores
