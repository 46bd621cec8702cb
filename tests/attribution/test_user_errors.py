from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from posttrain.attribution import (
    CentroidUtility,
    Values,
    banzhaf,
    beta_shapley,
    beta_weights,
    data_oob,
    group_utility,
    leave_one_out,
    semivalue,
    shapley,
    sum_by_group,
    tmc_shapley,
)
from posttrain.store.errors import UserError


def refuse(rows: np.ndarray) -> float:
    raise AssertionError("mistakes are refused before any work")


FEATURES, LABELS = np.zeros((4, 1)), [0, 0, 1, 1]
SAMPLED = (tmc_shapley, beta_shapley, banzhaf)
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: shapley(refuse, 21), "exact values take 1 to 20 players, not 21; sample with"),
    (lambda: shapley(refuse, 0), "players must be at least 1"),
    (lambda: semivalue(refuse, [0.5, 0.6]), "weights must be at least 0 and sum to 1"),
    (lambda: semivalue(refuse, [1.5, -0.5]), "weights must be at least 0 and sum to 1"),
    (lambda: semivalue(refuse, np.full(30, 1 / 30)), "not 30"),
    (lambda: tmc_shapley(refuse, 3, permutations=0), "permutations must be at least 1, and is 0"),
    (lambda: beta_shapley(refuse, 3, permutations=-1), "permutations must be at least 1"),
    (lambda: banzhaf(refuse, 3, samples=0), "samples must be at least 1"),
    (lambda: data_oob(FEATURES, LABELS, bags=0), "bags must be at least 1"),
    (lambda: tmc_shapley(refuse, 3, tolerance=-0.1), "tolerance must not be negative"),
    (lambda: tmc_shapley(refuse, 3, tolerance=np.nan), "tolerance must not be negative"),
    (lambda: tmc_shapley(refuse, 3, patience=0), "patience must be at least 1"),
    (lambda: beta_shapley(refuse, 3, alpha=0), "alpha and beta must be positive"),
    (lambda: beta_weights(3, 1, -1), "alpha and beta must be positive"),
    (lambda: leave_one_out(refuse, 3, block_size=0), "block_size must be at least 1"),
    (lambda: data_oob(FEATURES, LABELS, seed=-1), "seed must not be negative"),
    *[
        (lambda method=method: method(refuse, 3, standard_error=0), "standard_error must be positive")
        for method in SAMPLED
    ],
    *[(lambda method=method: method(refuse, 3, reduction="sum"), "no reduction `sum`") for method in SAMPLED],
    *[(lambda method=method: method(refuse, 3, seed=-1), "seed must not be negative") for method in SAMPLED],
    *[(lambda method=method: method(refuse, 3, workers=0), "0 workers cannot work") for method in SAMPLED],
    *[(lambda method=method: method(refuse, 3, block_size=0), "block_size must be at least 1") for method in SAMPLED],
    *[(lambda method=method: method(refuse), "has no number of players") for method in SAMPLED],
    (lambda: group_utility(refuse, [0, 2]), "group 1 has no row"),
    (lambda: group_utility(refuse, [0.5, 1]), "groups must be a whole number"),  # type: ignore[list-item]
    (lambda: group_utility(refuse, [-1, 0]), "groups must be a whole number"),
    (lambda: sum_by_group(Values(np.ones(3), np.ones(3), 1), [0, 1]), "2 groups of 3 values"),
]


@pytest.mark.parametrize("case", range(len(CALLS)))
def test_mistakes_are_refused_in_one_line(case: int) -> None:
    call, message = CALLS[case]
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_number_of_players_must_match_the_utility() -> None:
    utility = CentroidUtility([[0.0], [1.0]], [0, 1], [[0.0], [1.0]], [0, 1])
    for method in (shapley, leave_one_out, tmc_shapley, beta_shapley, banzhaf):
        with pytest.raises(UserError, match="the utility has 2 players, not 3"):
            method(utility, 3)
    with pytest.raises(UserError, match="the utility has 2 players, not 3"):
        group_utility(utility, [0, 0, 1])


@pytest.mark.parametrize("method", [shapley, leave_one_out, tmc_shapley, beta_shapley, banzhaf])
def test_a_folder_needs_a_key(method: Callable[..., Values], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no `key`"):
        method(refuse, 3, folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [shapley, leave_one_out, tmc_shapley, beta_shapley, banzhaf])
def test_a_score_must_be_a_number(method: Callable[..., Values]) -> None:
    with pytest.raises(UserError, match="the utility scored nan"):
        method(lambda rows: np.nan if len(rows) > 1 else 0.0, 4)
