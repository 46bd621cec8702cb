"""The contract of every merge method."""

from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.merge.methods.registry import METHODS
from posttrain.testing.merge_methods import MergeMethodContract

# With other options than its defaults, each branch of a method once.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("slerp", {"linear_above": 1.0, "t": 0.3}),
    ("nuslerp", {"nuslerp_flatten": False, "weight": [3.0, 1.0]}),
    ("ties", {"election": "count", "normalize": False, "density": [0.0, 1.0, 0.4]}),
    ("linear", {"normalize": False, "weight": [1.0, -0.5, 0.0]}),
    ("task_arithmetic", {"normalize": True, "scale": 2.0}),
    ("fisher", {"weight": [1.0, 0.0, 2.0], "floor": 0.1}),
    ("regmean", {"weight": [1.0, 0.0, 2.0], "alpha": 0.0}),
    ("by_importance", {"weight": [0.0, 2.0, 1.0], "heads": "choose"}),
]


def identity_options(name: str) -> dict[str, Any]:
    """Returns options with which a method merges identical models to that model."""
    options = METHODS[name].options
    neutral = {"density": 1.0, "normalize": True}
    return {option: value for option, value in neutral.items() if option in options}


class TestEveryMethod(MergeMethodContract):
    @pytest.fixture(params=list(METHODS))
    def method(self, request: pytest.FixtureRequest) -> str:
        name = str(request.param)
        self.identity_options = identity_options(name)
        return name


class TestEveryVariant(MergeMethodContract):
    # The defaults are tested above.
    identity_options = None

    @pytest.fixture(params=VARIANTS, ids=str)
    def variant(self, request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
        return request.param  # type: ignore[no-any-return]

    @pytest.fixture
    def method(self, variant: tuple[str, dict[str, Any]]) -> str:
        return variant[0]

    @pytest.fixture
    def options(self, variant: tuple[str, dict[str, Any]]) -> Mapping[str, Any]:
        return variant[1]
