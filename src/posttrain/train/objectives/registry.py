"""The objectives by name: what each needs, so that data and model can be checked before any work. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section
from posttrain.train.data.config import Shape
from posttrain.train.objectives import config as settings

Output = Literal["log_probabilities", "reward", "classes", "logits", "hidden"]
"""What the model's forward pass gives the objective."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """One objective.

    Args:
        shape: what a record must hold.
        output: what the model must compute.
        config: its settings.
        summary: one line for help texts.
        reference: whether it needs the reference's log-probabilities.
        mismatched: whether it needs log-probabilities of prompts with other prompts' answers (see ``kl_estimate``).
    """

    shape: Shape
    output: Output
    config: type[Section]
    summary: str
    reference: bool = False
    mismatched: bool = False


def _pair(config: type[Section], summary: str, reference: bool) -> ObjectiveSpec:
    return ObjectiveSpec("pair", "log_probabilities", config, summary, reference=reference)


OBJECTIVES: dict[str, ObjectiveSpec] = {
    "sft": ObjectiveSpec("completion", "log_probabilities", settings.SftConfig, "supervised fine-tuning"),
    "dpo": _pair(settings.DpoConfig, "direct preference optimisation", True),
    "cdpo": _pair(settings.CdpoConfig, "conservative DPO, for preferences with mistakes", True),
    "robust_dpo": _pair(settings.RobustDpoConfig, "DPO corrected for a known share of mistakes", True),
    "ipo": _pair(settings.IpoConfig, "identity preference optimisation", True),
    "hinge": _pair(settings.HingeConfig, "SLiC's hinge loss on DPO's rewards", True),
    "orpo": _pair(settings.OrpoConfig, "odds-ratio preference optimisation", False),
    "simpo": _pair(settings.SimpoConfig, "simple preference optimisation", False),
    "cpo": _pair(settings.CpoConfig, "contrastive preference optimisation", False),
    "kto": ObjectiveSpec(
        "labelled",
        "log_probabilities",
        settings.KtoConfig,
        "Kahneman-Tversky optimisation, from thumbs up and down",
        reference=True,
        mismatched=True,
    ),
    "reward": ObjectiveSpec("pair", "reward", settings.RewardConfig, "a reward model"),
    "classification": ObjectiveSpec("class", "classes", settings.ClassificationConfig, "one label a text"),
    "distill": ObjectiveSpec("teacher", "logits", settings.DistillationConfig, "a teacher's next-token distributions"),
    "distill_hidden": ObjectiveSpec("teacher", "hidden", settings.HiddenConfig, "a teacher's hidden states"),
}


def objective_spec(name: str, where: str | None = "train.objective") -> ObjectiveSpec:
    """The objective of that name.

    Raises:
        UserError: there is none, with the nearest name.
    """
    if name not in OBJECTIVES:
        raise UserError(f"no objective `{name}`", where=where, fix=suggest(name, OBJECTIVES))
    return OBJECTIVES[name]
