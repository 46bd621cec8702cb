"""Shapes of models that a loop's config asks for and no candidate can have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"prune": {"layers": 3}}}, "train.prune.layers: 3 cannot be kept; the model has 2"),
        (
            {"tune": {"space": {"train.prune.layers": [1, 3]}, "held_out": "20%", "budget": "2 trials"}},
            "tune.space: 3 cannot be kept, as with train.prune.layers = 3; the model has 2",
        ),
        (
            {"train": {"prune": {"layers": 1}}, "merge": {"models": ["champion"]}},
            "merge.models: a candidate of another size has no weights that an earlier model's could be merged with",
        ),
    ],
)
def test_a_loop_names_impossible_shapes_before_any_round(
    small: Any, open_loop: Callable[[Path], Any], changes: dict[str, Any], message: str
) -> None:
    loop = open_loop(small(**changes))
    with pytest.raises(UserError) as error:
        loop.run()
    assert message in str(error.value)
    assert not loop.metadata.runs()
