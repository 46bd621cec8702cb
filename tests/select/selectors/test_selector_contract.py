"""The contract of every selector."""

import inspect
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.select.selectors.registry import SELECTORS, select, selector_spec
from posttrain.store.errors import UserError
from posttrain.testing.selectors import SelectorContract
from posttrain.testing.selectors import score_columns as pool

every_strategy = pytest.mark.parametrize("strategy", sorted(SELECTORS))


class TestEverySelector(SelectorContract):
    @pytest.fixture(params=sorted(SELECTORS))
    def strategy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


@every_strategy
def test_rows_with_missing_values_are_allowed(strategy: str) -> None:
    scores = pool(30)
    del scores["probabilities"]
    scores |= {name: np.where(np.arange(30) % 2, 0.3, np.nan) for name in ("entropy", "least_confidence", "margin")}
    if strategy == "badge":  # it needs the probabilities themselves
        with pytest.raises(UserError, match="needs the score column `probabilities`"):
            select(strategy, scores, 10)
    else:
        assert len(set(select(strategy, scores, 20).tolist())) == 20


@pytest.mark.parametrize("strategy", ["entropy", "least_confidence", "margin"])
def test_ties_are_broken_by_row_order_for_every_seed(strategy: str) -> None:
    probabilities = np.array([[0.9, 0.1], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5]])
    for seed in range(4):
        assert select(strategy, {"probabilities": probabilities}, 4, seed).tolist() == [1, 3, 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["entropy", "least_confidence", "margin", "top", "mmr"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_order_of_the_rows_does_not_matter(strategy: str, seed: int) -> None:
    scores = pool(45, seed)
    order = np.random.default_rng(seed).permutation(45)
    shuffled = {name: values[order] for name, values in scores.items()}
    np.testing.assert_array_equal(select(strategy, scores, 10), order[select(strategy, shuffled, 10)])


def test_random_is_uniform_and_seeded() -> None:
    rows = {"probabilities": np.ones((10, 1))}
    counts = np.bincount(
        np.concatenate([select("random", rows, 3, seed) for seed in range(2000)]), minlength=10
    )  # Each count is binomial(2000, 0.3): five standard deviations are 102.
    assert np.abs(counts - 600).max() < 103


def test_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `entropy`"):
        select("entropi", pool(3), 1)


def test_missing_column_is_named() -> None:
    with pytest.raises(UserError, match="needs the score column `embeddings`"):
        select("diverse", {"probabilities": np.ones((3, 1))}, 1)
    with pytest.raises(UserError, match="`margin` needs the score column `probabilities`"):
        select("margin", {"embeddings": np.ones((3, 1))}, 1)


def test_wrong_calls_are_user_errors() -> None:
    with pytest.raises(UserError, match="differ in length"):
        select("entropy", {"entropy": np.ones(3), "margin": np.ones(4)}, 1)
    with pytest.raises(UserError, match="differ in length"):
        select("entropy", {"entropy": np.ones(3)}, 1, labelled=np.zeros(2, bool))
    with pytest.raises(UserError, match="cannot select -1"):
        select("entropy", {"entropy": np.ones(3)}, -1)
    with pytest.raises(UserError, match="no column"):
        select("entropy", {}, 1)
    with pytest.raises(UserError, match="radius"):
        select("diverse", pool(9), 2, radius=3)
    with pytest.raises(UserError, match="no uncertainty measure"):
        select("uncertain_diverse", pool(9), 2, by="doubt")


@every_strategy
def test_a_number_out_of_range_is_refused_in_one_line(strategy: str) -> None:
    """Each numeric option is applied or refused, without another exception."""
    options = inspect.signature(selector_spec(strategy).load()).parameters.values()
    for option, value in product(options, (0, -1, 0.5, float("nan"), "x", True)):
        if option.default is option.empty or not {"int", "float"} & set(re.findall(r"\w+", str(option.annotation))):
            continue
        message = ""
        try:
            chosen = select(strategy, pool(60), 7, **{option.name: value})
        except UserError as exception:
            message = str(exception)
        if message:
            assert f"strategy `{strategy}`" in message
        else:
            assert value in (0, 0.5)
            assert len(set(chosen.tolist())) == 7
