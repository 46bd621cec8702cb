"""The settings of each objective. Defaults are TRL 1.16's where it has the objective, or their description says why."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.store.section import Section

TEACHER_KEY = "train.objective.teacher"

_NAME = "Name of the objective."
_BETA = "Scale of the log-ratios: a higher one holds the policy closer to the reference."
_NLL = "Weight of the chosen answers' likelihood; SimPO's paper has none, TRL adds it by default."
_WRONG = "Share of the preferences taken to be wrong; above 0 it is conservative DPO (Mitchell 2023)."


class ObjectiveConfig(Section):
    """The name and the settings of an objective; each has a subclass with its own.

    ``objective: dpo`` is short for ``objective: {name: dpo}``.
    """

    name: str = Field(description=_NAME)


class SftConfig(ObjectiveConfig):
    """Supervised fine-tuning."""

    name: Literal["sft"] = Field("sft", description=_NAME)
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of each target spread over the whole vocabulary (arXiv:1512.00567)."
    )
    focal: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Exponent of the focal loss (arXiv:1708.02002): an answer of probability p counts (1 - p)^focal; "
        "0: all answers count alike.",
    )


class DpoConfig(ObjectiveConfig):
    """Direct preference optimisation (arXiv:2305.18290)."""

    name: Literal["dpo"] = Field("dpo", description=_NAME)
    beta: float = Field(0.1, gt=0, description=_BETA)
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description=_WRONG)


class RobustDpoConfig(ObjectiveConfig):
    """Robust DPO (arXiv:2403.00409)."""

    name: Literal["robust_dpo"] = Field("robust_dpo", description=_NAME)
    beta: float = Field(0.1, gt=0, description=_BETA)
    label_smoothing: float = Field(
        0.1, ge=0, lt=0.5, description="Share of the preferences that are flipped; TRL's default of 0 is plain DPO."
    )


class IpoConfig(ObjectiveConfig):
    """Identity preference optimisation (arXiv:2310.12036)."""

    name: Literal["ipo"] = Field("ipo", description=_NAME)
    beta: float = Field(0.1, gt=0, description="The paper's tau: log-ratios per token are driven 1/(2 beta) apart.")


class HingeConfig(ObjectiveConfig):
    """The hinge loss of SLiC on DPO's rewards (arXiv:2305.10425, arXiv:2309.06657)."""

    name: Literal["hinge"] = Field("hinge", description=_NAME)
    beta: float = Field(0.1, gt=0, description=_BETA)


class OrpoConfig(ObjectiveConfig):
    """Odds-ratio preference optimisation (arXiv:2403.07691)."""

    name: Literal["orpo"] = Field("orpo", description=_NAME)
    beta: float = Field(0.1, ge=0, description="Weight of the odds-ratio term, the paper's lambda.")
    likelihood: Literal["text", "completion"] = Field(
        "text",
        description="Likelihood that is learned too: the chosen text with its prompt (as in TRL), or its answer only.",
    )


class SimpoConfig(ObjectiveConfig):
    """Simple preference optimisation (arXiv:2405.14734)."""

    name: Literal["simpo"] = Field("simpo", description=_NAME)
    beta: float = Field(0.1, gt=0, description="Scale of the log-probabilities per token; the paper uses 2 to 2.5.")
    gamma: float = Field(0.5, ge=0, description="Reward margin that is aimed for; the paper uses 0.3 to 1.6.")
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description=_WRONG)
    nll_weight: float = Field(0.0, ge=0, description=_NLL)


class CpoConfig(ObjectiveConfig):
    """Contrastive preference optimisation (arXiv:2401.08417)."""

    name: Literal["cpo"] = Field("cpo", description=_NAME)
    beta: float = Field(0.1, gt=0, description="Scale of the log-probabilities.")
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description=_WRONG)
    nll_weight: float = Field(1.0, ge=0, description=_NLL)


class KtoConfig(ObjectiveConfig):
    """Kahneman-Tversky optimisation (arXiv:2402.01306)."""

    name: Literal["kto"] = Field("kto", description=_NAME)
    beta: float = Field(0.1, gt=0, description=_BETA)
    desirable_weight: float = Field(1.0, ge=0, description="Weight of a desirable answer.")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of an undesirable answer.")


class RewardConfig(ObjectiveConfig):
    """A reward model after Bradley and Terry."""

    name: Literal["reward"] = Field("reward", description=_NAME)
    centring: float = Field(
        0.0, ge=0, description="Weight of (chosen + rejected)^2, which keeps rewards around 0; 0.01 is usual."
    )


class ClassificationConfig(ObjectiveConfig):
    """Sequence classification."""

    name: Literal["classification"] = Field("classification", description=_NAME)
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the target spread over all labels.")


class DistillationConfig(ObjectiveConfig):
    """Distillation of a teacher's next-token distributions, its hidden states, or both."""

    name: Literal["distill"] = Field("distill", description=_NAME)
    teacher: str | None = Field(None, description="Folder of the teacher, relative to the config's.")
    divergence: Literal["forward", "reverse", "jensen_shannon", "none"] = Field(
        "jensen_shannon",
        description="KL(teacher | student), which covers all that the teacher does; KL(student | teacher), which "
        "keeps to what it does most; a blend (arXiv:2306.13649); or hidden states alone.",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="The teacher's share in jensen_shannon's mixture.")
    temperature: float = Field(1.0, gt=0, description="Divides both models' logits.")
    hard_weight: float = Field(0.0, ge=0, le=1, description="Share of the data's own tokens in the loss.")
    top_k: int | None = Field(
        None, ge=1, description="Number of the teacher's most probable tokens to keep; null: all."
    )
    hidden_weight: float = Field(
        0.0, ge=0, description="Weight of the hidden states' loss beside the divergence; 0: none."
    )
    distance: Literal["mse", "cosine"] = Field(
        "mse", description="Hidden states' mean square difference, or 1 less the cosine."
    )
    layers: list[tuple[int, int]] = Field(
        [(-1, -1)],
        min_length=1,
        description="Pairs of a student's and a teacher's layer whose hidden states are compared; -1 is the last.",
    )

    def teacher_folder(self, root: Path) -> Path:
        """Returns the folder of the teacher, which is relative to ``root``.

        Raises:
            UserError: none is named, or there is no model where it should be.
        """
        from posttrain.models.sources import check_model_folder

        fix = "name a model's folder"
        if self.teacher is None:
            raise UserError("distillation needs a teacher", where=TEACHER_KEY, fix=fix)
        folder = locate_path(root, self.teacher).resolve()
        if not folder.is_dir():
            raise UserError(f"no folder `{self.teacher}`", where=TEACHER_KEY, fix=fix)
        check_model_folder(folder)
        return folder
