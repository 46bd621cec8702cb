from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adam"}, r"^test: `name`: .*'adamw', 'adafactor', 'muon', 'adam8bit' or 'sgd'"),
        ({"betas": [0.9, 1.0]}, r"^test: `betas.1`: .*less than 1"),
        ({"weight_decay": -0.1}, r"^test: `weight_decay`: .*greater than or equal to 0"),
        ({"weight_dekay": 0.1}, r"^test: unknown key `weight_dekay`; did you mean `weight_decay`"),
    ],
)
def test_a_wrong_optimizer_value_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        OptimizerConfig.read(values, "test")
    assert "\n" not in str(caught.value)
