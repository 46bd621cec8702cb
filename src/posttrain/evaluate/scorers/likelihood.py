"""Scorers of log-likelihoods: the most probable label of a closed set, perplexity, and preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import Examples, Scorer, ScorerOutput
from posttrain.store.errors import UserError
from posttrain.store.text_files import normalise_text

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.language_model import LanguageModel


def label_indices(examples: Examples, labels: Sequence[str], where: str) -> list[int]:
    """Returns the index of each example's answer among the labels.

    Raises:
        UserError: a record has no answer, or one outside the labels; names the first.
    """
    position = {normalise_text(label): index for index, label in enumerate(labels)}
    answers = examples.answers(where)
    for answer, location in zip(answers, examples.locations, strict=True):
        if normalise_text(answer) not in position:
            raise UserError(f"{location}: label `{answer}` is not in task.labels", where=where)
    return [position[normalise_text(answer)] for answer in answers]


def score_label_likelihood(
    lm: LanguageModel | Ensemble, examples: Examples, suite: SuiteConfig, where: str
) -> ScorerOutput:
    """Scores a record 1 where its expected label is the most probable, else 0; every answer is valid.

    Raises:
        UserError: if the task has no label set, or a record's answer is outside it.
    """
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.likelihood import label_scores

    labels = lm.task.label_set
    if not labels:
        raise UserError("scorer label_likelihood needs a label set", where=where, fix="set `task.labels`")
    # Before the model is asked: a label that is misspelt in one record costs no pass over all others.
    truth = np.array(label_indices(examples, labels, where))
    # `exact` has the true label scored without pruning: its log-likelihood is a metric.
    exact, report = truth.tolist(), None
    if isinstance(lm, Ensemble):
        together = lm.label_scores(examples.prompts, exact, all_models=True)
        log_probabilities, report = together.log_probabilities, lm.describe(together, truth)
    else:
        scores = label_scores(lm, examples.prompts, labels, exact=exact).log_probabilities
        log_probabilities = scores.astype(np.float64)
    best = log_probabilities.argmax(axis=1)
    rows = np.arange(len(truth))
    return ScorerOutput(
        predicted=[labels[index] for index in best],
        score=(best == truth).astype(np.float64),
        valid=np.ones(len(truth), bool),
        # Float32 log-probabilities of a sure model can be rounded to a little above 0.
        confidence=np.minimum(np.exp(log_probabilities[rows, best]), 1.0),
        log_likelihood=log_probabilities[rows, truth],
        tokens=np.zeros(len(truth), np.int64),
        labels=log_probabilities.astype(np.float32),
        ensemble=report,
    )


LABEL_LIKELIHOOD = Scorer(
    score_label_likelihood,
    main="accuracy",
    paired="accuracy",
    metrics=frozenset({"accuracy", "macro_f1", "invalid_rate", "log_likelihood", "log_likelihood_sum", "ece"}),
    needs_labels=True,
    ensembles=True,
)


def score_perplexity(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores each expected answer, stop token included, or each plain text, by its log-likelihood in nats."""
    from posttrain.models.likelihood import answer_log_likelihoods, text_log_likelihoods

    answers = examples.answers(where)
    sums, counts = np.zeros(len(answers)), np.zeros(len(answers), np.int64)
    chats = [row for row, prompt in enumerate(examples.prompts) if prompt]
    texts = [row for row, prompt in enumerate(examples.prompts) if not prompt]
    if chats:
        prompts = [examples.prompts[row] for row in chats]
        sums[chats], counts[chats] = answer_log_likelihoods(lm, prompts, [answers[row] for row in chats])
    if texts:
        sums[texts], counts[texts] = text_log_likelihoods(lm, [answers[row] for row in texts])
    return ScorerOutput(
        predicted=[""] * len(answers),  # nothing is generated
        score=sums,
        valid=np.ones(len(answers), bool),
        # Per token: the probability of a whole text is next to 0 for any model.
        confidence=np.exp(sums / np.maximum(counts, 1)),
        log_likelihood=sums,
        tokens=counts,
    )


PERPLEXITY = Scorer(
    score_perplexity,
    main="perplexity",
    paired="log_likelihood",
    metrics=frozenset({"perplexity", "log_likelihood", "log_likelihood_sum", "tokens"}),
    plain_text=True,
)


def preference_pairs(examples: Examples, where: str) -> tuple[list[str], list[str]]:
    """Returns the better and the worse answer of each pair.

    Raises:
        UserError: a record is not a preference pair; names the first.
    """
    chosen, rejected = examples.answers(where), []
    for answer, location in zip(examples.rejected, examples.locations, strict=True):
        if answer is None:
            fix = "give each record `chosen` and `rejected`"
            raise UserError(f"{location} has no rejected answer", where=where, fix=fix)
        rejected.append(answer)
    return chosen, rejected


def score_preference(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> ScorerOutput:
    """Scores a pair 1 where the model prefers the chosen answer to the rejected one, 0.5 where both are equal, else 0.

    The preferred answer has the higher mean log-probability a token, stop token included: the reward of Y. Meng et al.,
    SimPO, NeurIPS 2024, equation 3. Sums would prefer short answers, whatever they say.

    Raises:
        UserError: a record is not a preference pair; names the first.
    """
    from posttrain.models.likelihood import answer_log_likelihoods

    chosen, rejected = preference_pairs(examples, where)
    sums, counts = answer_log_likelihoods(lm, [*examples.prompts, *examples.prompts], [*chosen, *rejected])
    means = sums / np.maximum(counts, 1)
    n = len(chosen)
    margins = means[:n] - means[n:]
    return ScorerOutput(
        predicted=[
            better if margin > 0 else worse for better, worse, margin in zip(chosen, rejected, margins, strict=True)
        ],
        score=(1 + np.sign(margins)) / 2,
        valid=np.ones(n, bool),
        confidence=np.full(n, np.nan),
        log_likelihood=sums[:n],
        tokens=counts[:n],
        metrics={"preference_margin": float(margins.mean())},
    )


PREFERENCE = Scorer(
    score_preference,
    main="preference_accuracy",
    paired="preference_accuracy",
    metrics=frozenset({"preference_accuracy", "preference_margin"}),
)
