"""The config section ``train.initialization``."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

InitMethod = Literal["normal", "xavier", "kaiming", "depth_scaled", "ds_init", "zeros"]


class InitRuleConfig(Section):
    """The initialisation of some parameters."""

    match: str = Field(description="Regular expression that is searched in a parameter's name.")
    method: InitMethod = Field(description="Their initialisation.")
    gain: float = Field(1.0, gt=0, description="Multiplies the method's standard deviation.")
    std: float | None = Field(
        None, gt=0, description="Standard deviation of normal and depth_scaled; null: that of the section."
    )

    @field_validator("match")
    @classmethod
    def _is_pattern(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return match


class ShapeConfig(Section):
    """The shape of a transformer that is trained from scratch; null: as the model to start from has it."""

    layers: int | None = Field(None, ge=1, description="Decoder layers.")
    hidden: int | None = Field(None, ge=1, description="Width of the hidden states.")
    heads: int | None = Field(None, ge=1, description="Query heads.")
    kv_heads: int | None = Field(None, ge=1, description="Key and value heads, which divide the query heads.")
    inner: int | None = Field(None, ge=1, description="Width inside a feed-forward block.")

    @property
    def is_set(self) -> bool:
        """True if the shape differs from that of the model to start from."""
        return any(value is not None for value in self.model_dump().values())


class InitializationConfig(Section):
    """Training from scratch: only config and tokenizer of the model to start from are read."""

    method: Literal["none", "normal", "xavier", "kaiming", "depth_scaled", "ds_init"] = Field(
        "none",
        description="Keep the trained weights, or draw matrices as N(0, std); Glorot & Bengio 2010; "
        "arXiv:1502.01852; GPT-2, normal and 1/sqrt(2 layers) as large where a block ends; or arXiv:1908.11365.",
    )
    gain: float = Field(1.0, gt=0, description="Multiplies the standard deviation of the matrices.")
    std: float = Field(0.02, gt=0, description="Standard deviation of normal and depth_scaled, and of embeddings.")
    rules: list[InitRuleConfig] = Field(
        [], description="Initialisation of other parameters; the first rule that matches a name counts."
    )

    shape: ShapeConfig = Field(ShapeConfig(), description="Another shape than that of the model to start from.")

    @model_validator(mode="after")
    def _rules_are_used(self) -> Self:
        if self.rules and self.method == "none":
            raise ValueError("rules are for training from scratch: set a method too")
        if self.shape.is_set and self.method == "none":
            raise ValueError("a shape is for training from scratch: set a method too, or prune a trained model")
        return self
