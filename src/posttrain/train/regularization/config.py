"""The config section ``train.noise``."""

from typing import Annotated

from pydantic import Field

from posttrain.store.section import Section

_Share = Annotated[float, Field(ge=0, lt=1)]


class NoiseConfig(Section):
    """Regularisation inside the model."""

    neftune: float = Field(
        0.0, ge=0, description="NEFTune's alpha (arXiv:2310.05914): uniform noise on embeddings; 5 to 15 are usual."
    )
    dropout: _Share | None = Field(
        None,
        description="Dropout (Srivastava et al. 2014) wherever the model has it: attention weights, what a block adds "
        "to the residual stream, embedded tokens; null: as the model's config has it.",
    )
