"""What each method yields: allowed rewritings, better than where it began, the same each time."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from posttrain.select.adversarial.attacks import gcg, hotflip
from posttrain.select.adversarial.problem import AttackProblem, QueryBudget, Rewriting
from posttrain.select.adversarial.search import ATTACKS

Make = Callable[..., AttackProblem]


def same_beginning(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
    """1 for texts with the same first letter, else 0."""
    return np.array([float(other[0] == text[0]) for other in others])


@pytest.mark.parametrize("method", ATTACKS)
def test_what_is_yielded_is_allowed(problem: Make, method: str) -> None:
    item = problem(swaps=2, similarity=same_beginning)
    result = [candidate for step in ATTACKS[method](item) for candidate in step]
    assert result
    for candidate in result:
        assert 1 <= candidate.swaps == item.swaps(candidate.own) <= 2
        assert candidate.similarity == 1
        assert same_beginning(item.passage.text, [candidate.text])[0] == 1
        passage = item.passage
        assert item.lm.prompt_ids(passage.prompt(candidate.text)) == [*passage.before, *candidate.own, *passage.after]
        assert candidate.text.isprintable()


@pytest.mark.parametrize("method", ATTACKS)
def test_the_same_seed_finds_the_same(problem: Make, method: str) -> None:
    first, second = (list(ATTACKS[method](problem())) for _ in range(2))
    assert first == second
    assert first


@pytest.mark.parametrize("method", ATTACKS)
@pytest.mark.parametrize("limit", [0, 3, 30])
def test_no_more_is_read_than_the_budget(problem: Make, method: str, limit: int) -> None:
    item = problem(budget=limit)
    list(ATTACKS[method](item))
    assert item.budget.spent <= limit
    assert item.budget.refused or limit > 3


@pytest.mark.parametrize("method", ATTACKS)
def test_where_nothing_is_alike_nothing_is_found(problem: Make, method: str) -> None:
    assert list(ATTACKS[method](problem(similarity=lambda text, others: np.zeros(len(others))))) == []


def test_hotflip_takes_the_best_of_all_swaps(problem: Make) -> None:
    item = problem(swaps=1, similarity=same_beginning)
    [[result]] = hotflip(item)
    gains = item.gains(item.start)
    assert gains is not None
    best: tuple[float, Rewriting] | None = None
    for position in range(len(item.start)):
        for token in range(gains.shape[1]):
            own = (*item.start[:position], token, *item.start[position + 1 :])
            gain = float(gains[position, token])
            if gain > 0 and (best is None or gain > best[0]) and (allowed := item.allowed([own])):
                best = gain, allowed[0]
    assert best is not None
    assert result == best[1]


def test_hotflip_swaps_one_more_token_a_step(problem: Make) -> None:
    item = problem(swaps=4)
    assert [candidate.swaps for [candidate] in hotflip(item)] == [1, 2, 3, 4]


def test_gcg_never_falls_behind_where_it_began(problem: Make) -> None:
    item = problem(swaps=3)
    steps = [candidate for [candidate] in gcg(item)]
    losses = item.losses(steps)
    start = item.start_loss()
    assert losses is not None
    assert start is not None
    assert len(steps) > 1
    assert (np.diff([start, *losses]) > 0).all()


def test_a_budget_counts_nothing_more_once_it_refused() -> None:
    budget = QueryBudget(10)
    assert budget.take(7)
    assert not budget.take(4)
    assert not budget.take(1)
    assert budget.spent == 7
