"""Built-in objectives keep the contract of objectives under different settings."""

from typing import Any

import pytest

from posttrain.testing.objectives import ObjectiveContract
from posttrain.train.objectives.registry import OBJECTIVES

pytestmark = pytest.mark.slow

SETTINGS: list[dict[str, Any]] = [
    *({"objective": name} for name in OBJECTIVES),
    {"objective": "sft", "sft": {"label_smoothing": 0.2}},
    {"objective": "orpo", "orpo": {"likelihood": "completion"}},
    {"objective": "simpo", "simpo": {"nll_weight": 0.5}},
    {
        "objective": "classification",
        "classification": {"label_weights": {"card": 0.1, "refund": 0.02, "top up": 0.03}},
    },
    {"objective": "distill", "distill": {"top_k": 5, "divergence": "reverse", "hard_weight": 0.3}},
    {
        "objective": "distill",
        "distill": {"temperature": 2.0, "hidden_weight": 0.5},
        "distill_hidden": {"layers": [(1, 1), (-1, -1)]},
    },
]


class TestBuiltInObjectives(ObjectiveContract):
    @pytest.fixture(params=SETTINGS, ids=lambda settings: settings["objective"])
    def train(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        settings: dict[str, Any] = request.param
        return settings
