from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adam"}, r"^test: `name`: .*'adamw', 'adafactor', 'muon', 'adam8bit' or 'sgd'"),
        ({"betas": [0.9, 1.0]}, r"^test: `betas.1`: .*less than 1"),
        ({"layer_decay": 1.1}, r"^test: `layer_decay`: .*less than or equal to 1"),
        ({"weight_decay": -0.1}, r"^test: `weight_decay`: .*greater than or equal to 0"),
        ({"muon": {"rate": 2}}, r"^test: unknown key `muon.rate`; did you mean `muon.rate_scale`"),
        ({"muon": {"iterations": 100}}, r"^test: `muon.iterations`: .*less than 100"),
    ],
)
def test_a_wrong_optimizer_value_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        OptimizerConfig.read(values, "test")
    assert "\n" not in str(caught.value)
