"""Each method yields allowed rewritings with a higher loss than the original, and is reproducible."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from posttrain.select.adversarial.attacks import gcg
from posttrain.select.adversarial.problem import AttackProblem, QueryBudget
from posttrain.select.adversarial.search import ATTACKS

Make = Callable[..., AttackProblem]


def same_first_letter(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
    """1 for texts with the same first letter, else 0."""
    return np.array([float(other[0] == text[0]) for other in others])


@pytest.mark.slow
@pytest.mark.parametrize("method", ATTACKS)
def test_the_rewritings_are_allowed(problem: Make, method: str) -> None:
    attack = problem("my card", swaps=2, similarity=same_first_letter)
    result = [candidate for step in ATTACKS[method](attack) for candidate in step]
    assert result
    for candidate in result:
        assert 1 <= candidate.swaps == attack.swaps(candidate.own) <= 2
        assert candidate.similarity == 1
        assert same_first_letter(attack.passage.text, [candidate.text])[0] == 1
        passage = attack.passage
        assert attack.lm.prompt_ids(passage.prompt(candidate.text)) == [*passage.before, *candidate.own, *passage.after]
        assert candidate.text.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("method", ATTACKS)
def test_equal_seeds_give_equal_rewritings(problem: Make, method: str) -> None:
    first, second = (list(ATTACKS[method](problem())) for _ in range(2))
    assert first == second
    assert first


@pytest.mark.parametrize("method", ATTACKS)
@pytest.mark.parametrize("limit", [0, 3, 30])
def test_the_budget_bounds_the_queries(problem: Make, method: str, limit: int) -> None:
    attack = problem(budget=limit)
    list(ATTACKS[method](attack))
    assert attack.budget.spent <= limit
    assert attack.budget.refused or limit > 3


@pytest.mark.parametrize("method", ATTACKS)
def test_without_similar_texts_nothing_is_yielded(problem: Make, method: str) -> None:
    assert list(ATTACKS[method](problem(similarity=lambda text, others: np.zeros(len(others))))) == []


@pytest.mark.slow
def test_gcg_raises_the_loss_each_step(problem: Make) -> None:
    attack = problem(swaps=3)
    steps = [candidate for [candidate] in gcg(attack)]
    losses = attack.losses(steps)
    start = attack.start_loss()
    assert losses is not None
    assert start is not None
    assert len(steps) > 1
    assert (np.diff([start, *losses]) > 0).all()


def test_a_budget_refuses_everything_after_its_first_refusal() -> None:
    budget = QueryBudget(10)
    assert budget.take(7)
    assert not budget.take(4)
    assert not budget.take(1)
    assert budget.spent == 7
