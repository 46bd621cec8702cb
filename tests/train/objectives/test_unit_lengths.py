"""Lengths of units come from the token set, without reading the units."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.train.config import TrainConfig
from posttrain.train.data.token_set import TokenSet, count_longest, longest_lengths
from posttrain.train.data.tokenise import tokenise
from posttrain.train.data.units import UnitView, map_sequences, read_to_last_token, split_units
from posttrain.train.objectives.base import ObjectiveInputs
from posttrain.train.objectives.build import build_objective


@pytest.fixture
def pairs(fresh: Callable[..., Any], records_of_shape: Any, tmp_path: Path) -> TokenSet:
    return tokenise(fresh(), records_of_shape("pair"), 1024, "pair", tmp_path)


def refuse(*_: Any) -> None:
    raise AssertionError("a unit was read")


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_lengths_of_an_objectives_units_need_no_read(
    pairs: TokenSet, fresh: Callable[..., Any], objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig.model_validate({"objective": objective, "batch_size": 4})
    units = build_objective(ObjectiveInputs(pairs, config, fresh())).units
    expected = count_longest(list(units))
    monkeypatch.setattr(TokenSet, "__getitem__", refuse)
    assert longest_lengths(units).tolist() == expected.tolist()


def test_changed_units_are_counted_once(pairs: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    units = map_sequences(split_units(pairs), lambda sequence: read_to_last_token(sequence.ids, None))
    assert longest_lengths(units).tolist() == (pairs.sequence_lengths + 1).tolist()
    monkeypatch.setattr(TokenSet, "__getitem__", refuse)
    assert longest_lengths(units).max() == pairs.longest.max() + 1


def test_lengths_of_units_without_a_token_set() -> None:
    view = UnitView(2, lambda index: [read_to_last_token([1] * (index + 1), None)], np.array([2, 3]))
    assert longest_lengths(view).tolist() == longest_lengths(list(view)).tolist() == [2, 3]
