"""The config section ``train.recompute``."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|B|[KMG]i?B)")


class RecomputeConfig(Section):
    """Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): what the backward pass computes again.

    ``recompute: full`` is short for ``recompute: {mode: full}``.
    """

    mode: Literal["none", "full", "selective"] = Field(
        "none",
        description="Keep all activations, none but each layer's input, or as many as the budget allows.",
    )
    budget: str = Field(
        "50%",
        description="With selective: what activations may take, such as 4GiB, 800MB, or 50% of all of them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, values: Any) -> Any:
        return {"mode": values} if isinstance(values, str) else values

    @field_validator("budget")
    @classmethod
    def _is_amount(cls, budget: str) -> str:
        if not _AMOUNT.fullmatch(budget.strip()):
            raise ValueError("expected an amount with its unit, such as 4GiB or 50%")
        return budget

    def allowed(self, whole: int) -> int:
        """The budget in bytes, where all activations together take ``whole``."""
        found = _AMOUNT.fullmatch(self.budget.strip())
        assert found is not None, "it was checked"
        number, unit = float(found[1]), found[2]
        return int(whole * number / 100) if unit == "%" else int(number * _UNITS[unit])
