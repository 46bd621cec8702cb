"""Objectives that a round cannot measure are refused before any work."""

from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.store.errors import UserError


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_objectives_without_answers_are_refused(small: Any, objective: str) -> None:
    with pytest.raises(UserError, match=f"train.objective: `{objective}` makes a model that judges"):
        load_config(small(train={"objective": objective}))


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_objectives_with_answers_are_accepted(small: Any, objective: str) -> None:
    assert load_config(small(train={"objective": objective})).train.objective == objective
