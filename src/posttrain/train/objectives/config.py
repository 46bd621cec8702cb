"""The settings of each objective. Defaults are TRL 1.16's where it has the objective, or their description says why."""

from typing import Literal

from pydantic import Field

from posttrain.store.section import Section

_BETA = "Scale of the log-ratios: a higher one holds the policy closer to the reference."


class SftConfig(Section):
    """Supervised fine-tuning."""

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


class DpoConfig(Section):
    """Direct preference optimisation (arXiv:2305.18290)."""

    beta: float = Field(0.1, gt=0, description=_BETA)
    label_smoothing: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Share of the preferences taken to be wrong; above 0 it is conservative DPO (Mitchell 2023).",
    )


class RobustDpoConfig(Section):
    """Robust DPO (arXiv:2403.00409)."""

    beta: float = Field(0.1, gt=0, description=_BETA)
    label_smoothing: float = Field(
        0.1, ge=0, lt=0.5, description="Share of the preferences that are flipped; TRL's default of 0 is plain DPO."
    )


class IpoConfig(Section):
    """Identity preference optimisation (arXiv:2310.12036)."""

    beta: float = Field(0.1, gt=0, description="The paper's tau: log-ratios a token are driven 1/(2 beta) apart.")


class HingeConfig(Section):
    """The hinge loss of SLiC on DPO's rewards (arXiv:2305.10425, arXiv:2309.06657)."""

    beta: float = Field(0.1, gt=0, description=_BETA)


class OrpoConfig(Section):
    """Odds-ratio preference optimisation (arXiv:2403.07691)."""

    beta: float = Field(0.1, ge=0, description="Weight of the odds-ratio term, the paper's lambda.")
    likelihood: Literal["text", "completion"] = Field(
        "text",
        description="Likelihood that is learned too: the chosen text with its prompt (as in TRL), or its answer only.",
    )


class SimpoConfig(Section):
    """Simple preference optimisation (arXiv:2405.14734)."""

    beta: float = Field(0.1, gt=0, description="Scale of the log-probabilities a token; the paper uses 2 to 2.5.")
    gamma: float = Field(0.5, ge=0, description="Reward margin that is aimed for; the paper uses 0.3 to 1.6.")
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description="Share of the preferences taken to be wrong.")
    nll_weight: float = Field(
        0.0, ge=0, description="Weight of the chosen answers' likelihood; the paper has none, TRL adds it by default."
    )


class CpoConfig(Section):
    """Contrastive preference optimisation (arXiv:2401.08417)."""

    beta: float = Field(0.1, gt=0, description="Scale of the log-probabilities.")
    label_smoothing: float = Field(0.0, ge=0, le=0.5, description="Share of the preferences taken to be wrong.")
    nll_weight: float = Field(1.0, ge=0, description="Weight of the chosen answers' likelihood.")


class KtoConfig(Section):
    """Kahneman-Tversky optimisation (arXiv:2402.01306)."""

    beta: float = Field(0.1, gt=0, description=_BETA)
    desirable_weight: float = Field(1.0, ge=0, description="Weight of a desirable answer.")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of an undesirable answer.")


class RewardConfig(Section):
    """A reward model after Bradley and Terry."""

    centring: float = Field(
        0.0, ge=0, description="Weight of (chosen + rejected)^2, which keeps rewards around 0; 0.01 is usual."
    )


class ClassificationConfig(Section):
    """Sequence classification."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the target spread over all labels.")
    label_weights: dict[str, float] = Field({}, description="Weight of each label's records; 1 if not named.")


class HiddenConfig(Section):
    """Distillation of hidden states."""

    distance: Literal["mse", "cosine"] = Field("mse", description="Mean square difference, or 1 less the cosine.")
    layers: list[tuple[int, int]] = Field(
        [(-1, -1)], min_length=1, description="Pairs of a student's and a teacher's layer; -1 is the last."
    )


class DistillationConfig(Section):
    """Distillation of next-token distributions."""

    divergence: Literal["forward", "reverse", "jensen_shannon"] = Field(
        "jensen_shannon",
        description="KL(teacher | student), which covers all that the teacher does; KL(student | teacher), which "
        "keeps to what it does most; or a blend (arXiv:2306.13649).",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="The teacher's share in jensen_shannon's mixture.")
    temperature: float = Field(1.0, gt=0, description="Divides both models' logits.")
    scale_by_temperature: bool = Field(
        False, description="Multiply the divergence by the squared temperature, as Hinton did; TRL does not."
    )
    hard_weight: float = Field(0.0, ge=0, le=1, description="Share of the data's own tokens in the loss.")
    top_k: int | None = Field(
        None, ge=1, description="Number of the teacher's most probable tokens to keep; null: all."
    )
    teacher: str | None = Field(None, description="Folder of any objective's teacher, relative to the config's.")
    hidden_weight: float = Field(
        0.0, ge=0, description="Weight of the hidden states' loss, which train.distill_hidden sets; 0: none."
    )
