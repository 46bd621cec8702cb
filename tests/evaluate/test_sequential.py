"""The sequential test: exact factors, an error that is bounded whenever one looks, and decisions that come soon."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.evaluate.sequential import BLOCK_OUTCOMES, Blocks, log_e_values, make_blocks, nearest_null, run_test

Outcomes = tuple[np.ndarray, np.ndarray]


def draw(seed: int, n: int, share: float, canary: float, champion: float) -> Outcomes:
    generator = np.random.default_rng(seed)
    treatment = generator.random(n) < share
    return treatment, generator.random(n) < np.where(treatment, canary, champion)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_blocks_hold_every_outcome_of_a_stretch_in_the_order_of_arrival(share: float) -> None:
    treatment, good = draw(0, 1000, share, 0.7, 0.8)
    blocks = make_blocks(treatment, good, share)
    assert len(blocks.ends) > 10
    assert min(blocks.control.sum(axis=1).min(), blocks.treatment.sum(axis=1).min()) >= BLOCK_OUTCOMES
    for counts, arm in ((blocks.control, ~treatment), (blocks.treatment, treatment)):
        at = 0
        for bad, right in counts.astype(int):
            in_block = good[arm][at : at + bad + right]
            assert (in_block.sum(), (~in_block).sum()) == (right, bad)
            at += bad + right
        # What a block holds has arrived once it is known, and little more.
        arrived = np.cumsum(arm)[blocks.ends - 1] - np.cumsum(counts.sum(axis=1))
        assert arrived.min() >= 0
        assert arrived.max() <= 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=150), st.floats(0.1, 0.9), st.integers(0, 150))
def test_blocks_depend_on_arms_alone_and_on_nothing_later(
    outcomes: list[tuple[bool, bool]], share: float, end: int
) -> None:
    treatment, good = np.array(outcomes, bool).reshape(-1, 2).T
    whole, part = make_blocks(treatment, good, share), make_blocks(treatment[:end], good[:end], share)
    known = whole.ends <= end
    for name in ("control", "treatment", "ends"):
        np.testing.assert_array_equal(getattr(whole, name)[known], getattr(part, name))
    np.testing.assert_array_equal(make_blocks(treatment, ~good, share).ends, whole.ends)


def test_batches_of_one_arm_are_as_many_blocks_as_mixed_outcomes() -> None:
    treatment, good = np.arange(240) % 120 < 60, np.arange(240) % 3 > 0
    blocks = make_blocks(treatment, good, 0.5)
    assert blocks.control.sum(axis=1).tolist() == blocks.treatment.sum(axis=1).tolist() == [5.0] * 24
    assert blocks.ends.tolist() == [120] * 12 + [240] * 12


@pytest.mark.parametrize("shift", [0.0, -0.3, 0.05, 0.6])
def test_the_nearest_null_is_where_a_general_minimiser_has_it(shift: float) -> None:
    from scipy.optimize import minimize_scalar
    from scipy.special import rel_entr

    generator = np.random.default_rng(1)
    control, treatment = generator.uniform(0.01, 0.99, (2, 20))
    n_control, n_treatment = generator.integers(1, 60, (2, 20)).astype(float)

    def divergence(x: float, at: int) -> float:
        y = x + shift
        first = rel_entr(control[at], x) + rel_entr(1 - control[at], 1 - x)
        second = rel_entr(treatment[at], y) + rel_entr(1 - treatment[at], 1 - y)
        return float(n_control[at] * first + n_treatment[at] * second)

    bounds = (max(0.0, -shift), min(1.0, 1 - shift))
    expected = [
        minimize_scalar(divergence, bounds=bounds, args=(at,), method="bounded", options={"xatol": 1e-9}).x
        for at in range(20)
    ]
    np.testing.assert_allclose(nearest_null(control, treatment, n_control, n_treatment, shift), expected, atol=1e-5)


def test_without_a_shift_the_nearest_null_is_the_pooled_share() -> None:
    # Turner, Ly and Grünwald (2024), equation 2.
    pooled = nearest_null(np.array([0.8]), np.array([0.5]), np.array([30.0]), np.array([10.0]), 0.0)
    assert pooled == pytest.approx([(30 * 0.8 + 10 * 0.5) / 40])


@pytest.mark.parametrize(
    ("champion", "distance", "shift"),
    [(0.5, 0.0, 0.0), (0.8, 0.0, 0.1), (0.85, 0.1, -0.05), (0.2, 0.3, 0.0), (0.97, 0.0, -0.05)],
)
def test_the_mean_of_a_factor_is_at_most_one_under_the_null(champion: float, distance: float, shift: float) -> None:
    canary = min(champion + shift + distance, 1.0)
    champion = min(champion, canary - shift)
    # All outcomes of a second block, weighted by their probability; the first block sets the alternative.
    n_c, n_t = 7, 5
    binomials = [
        [np.prod([(n - i) / (i + 1) for i in range(k)]) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        for n, p in ((n_c, champion), (n_t, canary))
    ]
    for first in ((3, 4, 2, 3), (0, 7, 0, 5), (7, 0, 5, 0), (1, 6, 4, 1)):
        mean = 0.0
        for k_c in range(n_c + 1):
            for k_t in range(n_t + 1):
                blocks = Blocks(
                    np.array([first[:2], (n_c - k_c, k_c)], float),
                    np.array([first[2:], (n_t - k_t, k_t)], float),
                    np.array([12, 24]),
                )
                # One alternative at a time: the factor of the mixture depends on the first block's outcomes.
                values = log_e_values(blocks, shift, 0.05)
                mean += binomials[0][k_c] * binomials[1][k_t] * np.exp(values[1] - values[0])
        assert mean <= 1 + 1e-9


def test_a_bet_on_the_truth_grows_by_its_divergence() -> None:
    from scipy.special import rel_entr

    # After many outcomes the alternative is known: the growth a block is the divergence from the pooled share.
    n = 4000
    control, treatment = np.tile([20.0, 80.0], (n, 1)), np.tile([3.0, 7.0], (n, 1))
    values = log_e_values(Blocks(control, treatment, np.arange(1, n + 1) * 110), 0.0, 0.1)
    pooled = 87 / 110
    expected = 100 * (rel_entr(0.8, pooled) + rel_entr(0.2, 1 - pooled))
    expected += 10 * (rel_entr(0.7, pooled) + rel_entr(0.3, 1 - pooled))
    assert values[-1] - values[-2] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("canary", "champion", "share", "wrong"),
    [(0.8, 0.8, 0.5, "worse"), (0.75, 0.8, 0.1, "not_worse")],
)
def test_wrong_decisions_are_as_rare_as_promised(canary: float, champion: float, share: float, wrong: str) -> None:
    decisions = [
        run_test(
            *draw(seed, 2000, share, canary, champion), share=share, alpha=0.05, margin=0.05, interval=False
        ).decision
        for seed in range(200)
    ]
    # The 99.9% point of a binomial of 200 with 5%: 20.
    assert decisions.count(wrong) <= 20  # type: ignore[arg-type]


def draw_over_time(seed: int, n: int, champion: np.ndarray, loss: float, pace: np.ndarray) -> Outcomes:
    """Outcomes of shares that change over time, of a canary that reports ``pace`` times as often as the champion."""
    generator = np.random.default_rng(seed)
    treatment = generator.random(n) < pace / (1 + pace)
    return treatment, generator.random(n) < np.where(treatment, champion - loss, champion)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "wrong"), [(0.0, "worse"), (0.05, "not_worse")])
@pytest.mark.parametrize("change", ["falls", "rises", "waves"])
def test_shares_that_change_over_time_cause_no_wrong_decisions(loss: float, wrong: str, change: str) -> None:
    n = 3000
    time = np.linspace(0, 1, n)
    champion = {
        "falls": 0.9 - 0.25 * time,
        "rises": 0.65 + 0.25 * time,
        "waves": 0.8 + 0.12 * np.sin(20 * np.pi * time),
    }[change]
    pace = 0.5 * (1 + 0.8 * np.sin(20 * np.pi * time + 1))
    decisions = [
        run_test(
            *draw_over_time(seed, n, champion, loss, pace), share=0.5, alpha=0.05, margin=0.05, interval=False
        ).decision
        for seed in range(60)
    ]
    # The 99.9% point of a binomial of 60 with 5%: 9.
    assert decisions.count(wrong) <= 9  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_loss_is_found_and_an_equal_model_is_promoted() -> None:
    for seed in range(20):
        for canary, decision in ((0.70, "worse"), (0.85, "not_worse")):
            outcomes = draw(seed, 20_000, 0.1, canary, 0.8)
            assert run_test(*outcomes, share=0.1, alpha=0.05, margin=0.05, interval=False).decision == decision


@pytest.mark.slow
def test_the_interval_covers_the_difference_and_agrees_with_the_decision() -> None:
    missed = 0
    for seed in range(12):
        result = run_test(*draw(seed, 1500, 0.3, 0.74, 0.8), share=0.3, alpha=0.05, margin=0.05)
        missed += not result.low <= -0.06 <= result.high
        if result.decision == "worse":
            assert result.high < 0.003
        elif result.decision == "not_worse":
            assert result.low > -0.053
        else:
            assert result.low < -0.047
            assert result.high > -0.003
    # The 99.9% point of a binomial of 12 with 10%: 5.
    assert missed <= 5


def test_a_decision_depends_on_no_later_outcome() -> None:
    treatment, good = draw(3, 4000, 0.5, 0.4, 0.8)
    result = run_test(treatment, good, share=0.5, alpha=0.05, margin=0.05)
    assert result.decision == "worse"
    assert result.outcomes < 400
    changed = good.copy()
    changed[result.outcomes :] ^= True
    assert run_test(treatment, changed, share=0.5, alpha=0.05, margin=0.05) == result
    end = result.outcomes
    assert run_test(treatment[:end], good[:end], share=0.5, alpha=0.05, margin=0.05) == result
    assert run_test(treatment[: end - 1], good[: end - 1], share=0.5, alpha=0.05, margin=0.05).decision is None


def test_nothing_is_decided_before_the_minimum_of_each_arm() -> None:
    treatment, good = draw(3, 4000, 0.5, 0.2, 0.9)
    early = run_test(treatment, good, share=0.5, alpha=0.05, margin=0.05)
    late = run_test(treatment, good, share=0.5, alpha=0.05, margin=0.05, minimum=200)
    assert early.outcomes < 150
    reached = late.outcomes
    assert min(treatment[:reached].sum(), (~treatment)[:reached].sum()) >= 200
    assert reached < 450


@pytest.mark.parametrize("n", [0, 1, 9])
def test_few_outcomes_or_one_arm_decide_nothing(n: int) -> None:
    for treatment in (np.zeros(n, bool), np.ones(n, bool), np.arange(n) % 2 == 0):
        result = run_test(treatment, np.zeros(n, bool), share=0.5, alpha=0.05, margin=0.05)
        assert (result.decision, result.low, result.high, result.worse) == (None, -1.0, 1.0, 1.0)


@pytest.mark.parametrize("canary", [0.0, 1.0])
@pytest.mark.parametrize("champion", [0.0, 1.0])
def test_arms_that_are_always_good_or_bad_keep_the_numbers_finite(canary: float, champion: float) -> None:
    result = run_test(*draw(0, 4000, 0.5, canary, champion), share=0.5, alpha=0.05, margin=0.05)
    assert result.decision == ("worse" if canary < champion else "not_worse")
    assert -1 <= result.low <= canary - champion <= result.high <= 1


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="two arrays"):
        run_test(np.zeros(2, bool), np.zeros(3, bool), share=0.5, alpha=0.05, margin=0.05)
    for alpha, margin in ((0.0, 0.05), (0.05, 1.0)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            run_test(np.zeros(2, bool), np.zeros(2, bool), share=0.5, alpha=alpha, margin=margin)
