"""A step is one batch, however it is cut into micro-batches."""

from typing import Any

import pytest
import torch

from posttrain.train.objectives.registry import OBJECTIVES

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OBJECTIVES),
    ("sft", {"sft": {"label_smoothing": 0.2}}),
    ("orpo", {"orpo": {"likelihood": "completion"}}),
    ("simpo", {"simpo": {"nll_weight": 0.5}}),
    ("kto", {"kto": {"desirable_weight": 1.5, "undesirable_weight": 0.5}}),
    ("reward", {"reward": {"centring": 0.1}}),
    ("classification", {"classification": {"label_weights": {"card": 0.1, "refund": 0.02, "top up": 0.03}}}),
    ("distill", {"distill": {"top_k": 5, "divergence": "reverse", "hard_weight": 0.3}}),
    ("distill", {"distill": {"temperature": 2.0, "hidden": {"layers": [(1, 1), (-1, -1)], "weight": 0.5}}}),
    ("distill_hidden", {"distill_hidden": {"distance": "cosine", "layers": [(0, 0), (2, 3)]}}),
]
CUTS = [
    [[row] for row in range(8)],
    [[0, 1], [2, 3], [4, 5], [6, 7]],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 1, 2], [3], [4, 5, 6, 7]],
]


@pytest.mark.parametrize(("objective", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_cut_step_is_the_whole_one(school: Any, objective: str, settings: dict[str, Any]) -> None:
    taken = school(objective, settings)
    loss, whole, metrics = taken.gradients([list(range(8))])
    assert whole
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    assert largest > 1e-6, "there is something to compare"
    for cut in CUTS:
        found, gradients, measured = taken.gradients(cut)
        assert found == pytest.approx(loss, rel=1e-5)
        assert gradients.keys() == whole.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient / largest, whole[name] / largest, atol=2e-5, rtol=0, msg=name)
        assert measured == pytest.approx(metrics, rel=1e-4, abs=1e-6)
