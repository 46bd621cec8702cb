"""The config sections ``train.optimizer`` and ``train.surgery``; loads no torch."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.store.section import Section

_MomentDecay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimiser, which turns gradients into updates."""

    name: Literal["adamw", "adafactor", "muon", "adam8bit", "sgd"] = Field(
        "adamw",
        description="Muon steps the hidden matrices and adam8bit (torchao) all matrices; AdamW steps the rest of both. "
        "adafactor and sgd keep next to no state and none.",
    )
    betas: tuple[_MomentDecay, _MomentDecay] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay of the matrices; an L2 penalty with sgd.")
    offload: bool = Field(
        False, description="Keep masters and moments in the host's memory and step there; needs an accelerator."
    )


class SurgeryConfig(Section):
    """Combination of the gradients of several tasks, instead of their sum."""

    method: Literal["none", "pcgrad"] = Field(
        "none",
        description="Sum the gradients of all records, or project conflicts away (arXiv:2001.06782); each further task "
        "of a step takes four bytes a trained weight.",
    )
    by: str = Field("source", description="Column that names each record's task: `source`, or another of the data.")

    @property
    def task_column(self) -> str | None:
        """The column of the tasks; None without surgery."""
        return None if self.method == "none" else self.by
