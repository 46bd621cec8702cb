"""The config sections ``train.optimizer`` and ``train.ema``; loads no torch."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section

_MomentDecay = Annotated[float, Field(ge=0, lt=1)]


class MuonConfig(Section):
    """Settings of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

    rate_scale: float = Field(1.0, gt=0, description="Rate of the matrices, as a multiple of that of all others.")
    adjust: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Scale by shape: updates as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), or Jordan's.",
    )
    iterations: int = Field(5, ge=1, lt=100, description="Newton–Schulz iterations.")


class AdafactorConfig(Section):
    """Settings of Adafactor (Shazeer & Stern 2018, arXiv:1804.04235)."""

    beta2_decay: float = Field(-0.8, le=0, description="Exponent by which the second moment's memory grows.")
    clip_threshold: float = Field(1.0, ge=1, description="Largest root mean square of an update.")


class OptimizerConfig(Section):
    """The optimiser, which turns gradients into updates."""

    name: Literal["adamw", "adafactor", "muon", "adam8bit", "sgd"] = Field(
        "adamw",
        description="Muon steps the hidden matrices and adam8bit (torchao) all matrices; AdamW steps the rest of both.",
    )
    betas: tuple[_MomentDecay, _MomentDecay] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay of the matrices; an L2 penalty with sgd.")
    decay_embeddings: bool = Field(False, description="Decay embeddings too, and heads that are tied to them.")
    decay_norms: bool = Field(False, description="Decay norms too.")
    decay_biases: bool = Field(False, description="Decay biases too.")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="Rate of a layer as a multiple of that above it; 1 is the same rate for all."
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of sgd and muon.")
    nesterov: bool = Field(True, description="Nesterov's look-ahead in sgd and muon.")
    muon: MuonConfig = Field(MuonConfig(), description="Muon's settings, with name muon.")
    adafactor: AdafactorConfig = Field(AdafactorConfig(), description="Adafactor's settings, with name adafactor.")
    offload: bool = Field(
        False, description="Keep masters and moments in the host's memory and step there; needs an accelerator."
    )


class SurgeryConfig(Section):
    """Combination of the gradients of several tasks, instead of their sum."""

    method: Literal["none", "pcgrad", "cagrad", "mgda"] = Field(
        "none",
        description="Sum the gradients of all records, project conflicts away (arXiv:2001.06782), step for the task "
        "that gains least, near the mean (arXiv:2110.14048), or take the shortest convex combination "
        "(arXiv:1810.04650); each further task of a step takes four bytes a trained weight.",
    )
    by: str = Field("source", description="Column that names each record's task: `source`, or another of the data.")
    weights: Literal["sizes", "equal"] = Field(
        "sizes",
        description="pcgrad, cagrad: weigh tasks by their part of the step, as training without surgery does, or "
        "equally, as in the papers.",
    )
    c: float = Field(0.5, ge=0, lt=1, description="cagrad: largest distance from the mean gradient, by its norm.")

    @property
    def task_column(self) -> str | None:
        """The column of the tasks; None without surgery."""
        return None if self.method == "none" else self.by


class EmaConfig(Section):
    """The moving average of the weights (Polyak & Juditsky 1992); it takes four bytes a trained weight."""

    decay: float | None = Field(
        None, ge=0, lt=1, description="Share of the average that a step keeps; null: no average. 0.999 is usual."
    )
    start: int = Field(0, ge=0, description="Steps before the average begins.")
    every: int = Field(1, ge=1, description="Steps from one update of the average to the next.")
    save: bool = Field(True, description="Save the averaged weights as the model, not the last ones.")

    def check(self, steps: int) -> None:
        """Raises a UserError if an average that is to be saved would not begin in a training of ``steps`` steps."""
        if self.decay is not None and self.save and self.start + self.every > steps:
            raise UserError(
                f"the average would first be updated after {self.start + self.every} steps, and training has {steps}",
                where="train.ema.start",
                fix="begin earlier, train longer, or set train.ema.save=false",
            )
