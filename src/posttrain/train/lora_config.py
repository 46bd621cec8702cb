"""The config section ``train.lora``: ranks, ranks by module, ranks that share weights, and gates on ranks."""

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

RANDOM_SUBNETWORKS = 2
"""Random sub-networks of a supernet's step, beside the largest and the smallest."""


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), through peft."""

    rank: int = Field(16, ge=1, description="Rank of the update.")
    alpha: int = Field(32, ge=1, description="Scale of the update, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the update.")
    targets: list[str] | str = Field("all-linear", description="Names of the adapted modules.")
    ranks: dict[str, Annotated[int, Field(ge=0)]] = Field(
        {},
        description="Ranks of some modules, by a regular expression for the end of their names, such as "
        "`layers.[0-3].mlp.*: 4`; the first that matches counts; 0: no adapter.",
    )
    supernet: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] = Field(
        {},
        description="Ranks that share weights and are trained together by the sandwich rule (arXiv:1903.05134), by "
        "patterns of `ranks`, each with that one as the greatest: a lesser one uses the first rows and columns.",
    )
    gates: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the adapter's parameters that may stay: gates find the ranks by module while it is "
        "trained (arXiv:1712.01312); null: all stay.",
    )

    @field_validator("ranks")
    @classmethod
    def _are_expressions(cls, ranks: dict[str, int]) -> dict[str, int]:
        for pattern in ranks:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`{pattern}` is not a regular expression: {error}") from None
        return ranks

    @model_validator(mode="after")
    def _supernet_fits(self) -> Self:
        for pattern, ranks in self.supernet.items():
            if max(ranks, default=None) != self.ranks.get(pattern):
                raise ValueError(f"supernet: the greatest of `{pattern}` is not that of ranks")
        if self.supernet and self.gates is not None:
            raise ValueError("gates and supernet both find ranks: leave one out")
        return self

    @property
    def networks(self) -> int:
        """Forward and backward passes of a micro-batch, at most."""
        return 2 + RANDOM_SUBNETWORKS if any(len(set(ranks)) > 1 for ranks in self.supernet.values()) else 1

    def pattern_of(self, module: str) -> str | None:
        """Returns the first pattern of ``ranks`` that matches a module's name, as peft matches; None without one."""
        return next((pattern for pattern in self.ranks if re.match(rf"(.*\.)?({pattern})$", module)), None)
