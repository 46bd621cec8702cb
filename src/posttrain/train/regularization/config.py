"""The config section ``train.noise``."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.store.section import Section

_Share = Annotated[float, Field(ge=0, lt=1)]


class AdversarialConfig(Section):
    """Training on perturbed embeddings."""

    method: Literal["none", "fgm", "pgd"] = Field(
        "none",
        description="One step along the gradient (arXiv:1605.07725), or several (arXiv:1706.06083); each costs another "
        "forward and backward pass.",
    )
    epsilon: float = Field(
        0.015, gt=0, description="Largest norm of the perturbation, as a share of the norm of what is perturbed."
    )
    steps: int = Field(3, ge=1, description="Steps of pgd, each of half epsilon.")


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
    adversarial: AdversarialConfig = Field(AdversarialConfig(), description="Training on perturbed embeddings.")
