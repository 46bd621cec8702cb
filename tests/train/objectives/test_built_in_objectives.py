"""Built-in objectives keep the contract of objectives under different settings."""

from typing import Any

import pytest

from posttrain.testing.objectives import ObjectiveContract
from posttrain.train.objectives.registry import OBJECTIVES

pytestmark = pytest.mark.slow

OBJECTIVE_SETTINGS: list[dict[str, Any]] = [
    *({"name": name} for name in OBJECTIVES),
    {"name": "sft", "label_smoothing": 0.2},
    {"name": "orpo", "likelihood": "completion"},
    {"name": "simpo", "nll_weight": 0.5},
    {"name": "classification", "label_smoothing": 0.1},
    {"name": "distill", "top_k": 5, "divergence": "reverse", "hard_weight": 0.3},
    {"name": "distill", "divergence": "none"},
    {"name": "distill", "temperature": 2.0, "hidden_weight": 0.5, "layers": [(1, 1), (-1, -1)]},
]


class TestBuiltInObjectives(ObjectiveContract):
    @pytest.fixture(params=OBJECTIVE_SETTINGS, ids=lambda settings: settings["name"])
    def train(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"objective": request.param}
