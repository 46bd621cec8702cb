"""ORPO, SimPO and CPO against the papers' formulas, written out in NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.train.objectives.config import CpoConfig, OrpoConfig, SimpoConfig
from posttrain.train.objectives.loss import SequenceLogProbs, mean_metrics
from posttrain.train.objectives.reference_free import cpo, orpo, simpo

Array = np.ndarray
# Rows: log-probability a token of the chosen and the rejected answers, and of the prompts; then token counts.
pair_batches = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        arrays(np.float64, (3, n), elements=st.floats(-8, -0.01)),
        arrays(np.int64, (3, n), elements=st.integers(1, 40)),
    )
)


def sequences(means: Array, counts: Array) -> SequenceLogProbs:
    return SequenceLogProbs(torch.from_numpy(means * counts), torch.from_numpy(counts))


@given(pair_batches, st.floats(0, 2))
def test_orpo_matches_the_papers_formula(batch: tuple[Array, Array], beta: float) -> None:
    from scipy.special import log_expit, logit

    logps, counts = batch
    texts = SequenceLogProbs(torch.from_numpy((logps * counts)[[0, 2]].sum(0)), torch.from_numpy(counts[[0, 2]].sum(0)))
    chosen, rejected = sequences(logps[0], counts[0]), sequences(logps[1], counts[1])
    result = orpo(chosen, rejected, OrpoConfig(beta=beta), likelihood=texts)
    # TRL: one mean over all tokens of the chosen texts, and one over the pairs.
    nll = -(logps * counts)[[0, 2]].sum() / counts[[0, 2]].sum()
    ratio = log_expit(logit(np.exp(logps[0])) - logit(np.exp(logps[1]))).mean()
    assert result.sum.item() / result.count == pytest.approx(nll - beta * ratio, rel=1e-8)
    assert mean_metrics(result.metrics)["nll"] == pytest.approx(nll)


@given(pair_batches, st.floats(0.05, 3), st.floats(0, 2), st.floats(0, 0.5), st.sampled_from([0.0, 0.7]))
def test_simpo_matches_the_papers_formula(
    batch: tuple[Array, Array], beta: float, gamma: float, smoothing: float, nll_weight: float
) -> None:
    from scipy.special import log_expit

    logps, counts = batch
    config = SimpoConfig(beta=beta, gamma=gamma, label_smoothing=smoothing, nll_weight=nll_weight)
    result = simpo(sequences(logps[0], counts[0]), sequences(logps[1], counts[1]), config)
    logits = beta * logps[0] - beta * logps[1] - gamma
    preferred = -(1 - smoothing) * log_expit(logits) - smoothing * log_expit(-logits)
    nll = -(logps * counts)[0].sum() / counts[0].sum()
    assert result.sum.item() / result.count == pytest.approx(preferred.mean() + nll_weight * nll, rel=1e-9)


@given(pair_batches, st.floats(0.01, 1), st.floats(0, 0.5), st.floats(0, 2))
def test_cpo_matches_the_papers_formula(
    batch: tuple[Array, Array], beta: float, smoothing: float, nll_weight: float
) -> None:
    from scipy.special import log_expit

    logps, counts = batch
    config = CpoConfig(beta=beta, label_smoothing=smoothing, nll_weight=nll_weight)
    result = cpo(sequences(logps[0], counts[0]), sequences(logps[1], counts[1]), config)
    sums = logps * counts
    logits = beta * (sums[0] - sums[1])
    preferred = -(1 - smoothing) * log_expit(logits) - smoothing * log_expit(-logits)
    nll = -sums[0].sum() / counts[0].sum()
    assert result.sum.item() / result.count == pytest.approx(preferred.mean() + nll_weight * nll, rel=1e-9)


def pair(
    chosen: float, rejected: float, chosen_count: int = 2, rejected_count: int = 4
) -> tuple[SequenceLogProbs, SequenceLogProbs]:
    """One pair from log-probabilities of whole answers, in float32."""
    return tuple(  # type: ignore[return-value]
        SequenceLogProbs(torch.tensor([value], requires_grad=True), torch.tensor([count]))
        for value, count in ((chosen, chosen_count), (rejected, rejected_count))
    )


def test_reference_free_losses_of_an_example() -> None:
    # A token has probability 1/2 in the chosen answer and 1/4 in the rejected: odds 1 and 1/3.
    chosen, rejected = pair(2 * math.log(0.5), 4 * math.log(0.25))
    result = orpo(chosen, rejected, OrpoConfig())
    assert result.sum.item() == pytest.approx(math.log(2) + 0.1 * math.log(1 + 1 / 3))
    assert mean_metrics(result.metrics) == pytest.approx(
        {
            "rewards/chosen": 0.1 * math.log(0.5),
            "rewards/rejected": 0.1 * math.log(0.25),
            "rewards/margins": 0.1 * math.log(2),
            "rewards/accuracies": 1,
            "logps/chosen": math.log(0.5),
            "logps/rejected": math.log(0.25),
            "log_odds": math.log(3),
            "nll": math.log(2),
        }
    )
    logits = 2 * math.log(2) - 1
    result = simpo(chosen, rejected, SimpoConfig(beta=2, gamma=1))
    assert result.sum.item() == pytest.approx(math.log(1 + math.exp(-logits)))
    assert mean_metrics(result.metrics)["logps/rejected"] == pytest.approx(math.log(0.25))
    assert "nll" not in result.metrics
    logits = 0.1 * (2 * math.log(0.5) - 4 * math.log(0.25))
    result = cpo(chosen, rejected, CpoConfig())
    assert result.sum.item() == pytest.approx(math.log(1 + math.exp(-logits)) + math.log(2))
    assert mean_metrics(result.metrics)["logps/rejected"] == pytest.approx(4 * math.log(0.25))


def test_likelihood_is_a_mean_over_the_steps_tokens() -> None:
    # Two pairs of 1 and 9 chosen tokens: 5 a pair. Their parts add up to the token mean, not a mean of means.
    answers = SequenceLogProbs(torch.tensor([-4.0, -9.0]), torch.tensor([1, 9]))
    config = CpoConfig(beta=1e-9)
    parts = [cpo(answers[rows], answers[rows], config, tokens_per_pair=5.0) for rows in (slice(0, 1), slice(1, 2))]
    expected = math.log(2) + 13 / 10
    assert sum(entry.sum.item() for entry in parts) / 2 == pytest.approx(expected)
    assert cpo(answers, answers, config).sum.item() / 2 == pytest.approx(expected)


@given(pair_batches)
def test_length_normalised_objectives_ignore_length(batch: tuple[Array, Array]) -> None:
    logps, counts = batch
    for function, config in ((simpo, SimpoConfig()), (orpo, OrpoConfig())):
        single = function(sequences(logps[0], counts[0]), sequences(logps[1], counts[1]), config)
        doubled = function(sequences(logps[0], 2 * counts[0]), sequences(logps[1], 2 * counts[1]), config)
        assert single.sum.item() == pytest.approx(doubled.sum.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("chosen", "rejected"), [(0.0, 0.0), (0.0, -3.0), (-3.0, 0.0), (-1e-30, -1e-30), (-900.0, -1.0)]
)
def test_odds_of_certain_and_impossible_answers_stay_finite(chosen: float, rejected: float) -> None:
    answers = pair(chosen, rejected)
    result = orpo(*answers, OrpoConfig())
    result.sum.backward()
    assert math.isfinite(result.sum.item())
    for answer in answers:
        assert answer.sums.grad is not None
        assert answer.sums.grad.isfinite().all()


@pytest.mark.parametrize("logp", [-1e-3, -1e-5, -0.5, -3.0, -30.0])
def test_log_odds_keep_their_precision_in_float32(logp: float) -> None:
    result = orpo(*pair(logp, math.log(0.5), 1, 1), OrpoConfig())
    exact = np.float64(np.float32(logp))
    assert mean_metrics(result.metrics)["log_odds"] == pytest.approx(exact - np.log(-np.expm1(exact)), rel=1e-5)


def test_a_likelihood_of_other_texts_is_refused() -> None:
    chosen, rejected = pair(-1.0, -2.0)
    with pytest.raises(ValueError, match="2 texts do not go with 1 pairs"):
        orpo(chosen, rejected, OrpoConfig(), likelihood=SequenceLogProbs.join([chosen, rejected]))
    with pytest.raises(ValueError, match="do not go with"):
        simpo(chosen, SequenceLogProbs.join([chosen, rejected]), SimpoConfig())
