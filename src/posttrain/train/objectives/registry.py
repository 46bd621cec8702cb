"""Registry of objectives, with their requirements on data and model. Loads no torch: the command line reads it.

Other packages add an objective with an `ObjectiveSpec` as an entry point of the group ``posttrain.objectives``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry
from posttrain.store.section import Section, describe_alias
from posttrain.train.data.config import RecordShape
from posttrain.train.key_aliases import VALUE_ALIASES
from posttrain.train.objectives import config as settings

Output = Literal["log_probabilities", "reward", "classes", "logits", "hidden"]
"""Output of the model's forward pass that the objective reads."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """The requirements of one objective, to check data and model before any work.

    Args:
        objective: its class, a `posttrain.train.objectives.base.Objective`, or the dotted path of one, which is
            imported on first use.
        shape: contents of a record.
        output: output that the model computes.
        config: section of its settings: ``train.NAME`` of a built-in objective, ``train.options`` of another.
        summary: one line for help texts.
        reference: whether it needs the reference's log-probabilities.
        mismatched: whether it needs log-probabilities of prompts with other prompts' answers (see ``kl_estimate``).
        margins: whether it reads how much better each chosen answer is.
    """

    objective: type[Any] | str
    shape: RecordShape
    output: Output
    config: type[Section]
    summary: str
    reference: bool = False
    mismatched: bool = False
    margins: bool = False


def _pair(objective: str, config: type[Section], summary: str, reference: bool) -> ObjectiveSpec:
    return ObjectiveSpec(objective, "pair", "log_probabilities", config, summary, reference=reference)


_HERE = "posttrain.train.objectives"

_BUILTIN = {
    "sft": ObjectiveSpec(
        f"{_HERE}.sft:SftObjective", "completion", "log_probabilities", settings.SftConfig, "supervised fine-tuning"
    ),
    "dpo": _pair(f"{_HERE}.dpo:DpoObjective", settings.DpoConfig, "direct preference optimisation", True),
    "robust_dpo": _pair(
        f"{_HERE}.dpo:RobustDpoObjective",
        settings.RobustDpoConfig,
        "DPO corrected for a known share of mistakes",
        True,
    ),
    "ipo": _pair(f"{_HERE}.dpo:IpoObjective", settings.IpoConfig, "identity preference optimisation", True),
    "hinge": _pair(f"{_HERE}.dpo:HingeObjective", settings.HingeConfig, "SLiC's hinge loss on DPO's rewards", True),
    "orpo": _pair(
        f"{_HERE}.reference_free:OrpoObjective", settings.OrpoConfig, "odds-ratio preference optimisation", False
    ),
    "simpo": _pair(
        f"{_HERE}.reference_free:SimpoObjective", settings.SimpoConfig, "simple preference optimisation", False
    ),
    "cpo": _pair(
        f"{_HERE}.reference_free:CpoObjective", settings.CpoConfig, "contrastive preference optimisation", False
    ),
    "kto": ObjectiveSpec(
        f"{_HERE}.kto:KtoObjective",
        "labelled",
        "log_probabilities",
        settings.KtoConfig,
        "Kahneman-Tversky optimisation, from thumbs up and down",
        reference=True,
        mismatched=True,
    ),
    "reward": ObjectiveSpec(
        f"{_HERE}.reward:RewardObjective", "pair", "reward", settings.RewardConfig, "a reward model", margins=True
    ),
    "classification": ObjectiveSpec(
        f"{_HERE}.classification:ClassificationObjective",
        "class",
        "classes",
        settings.ClassificationConfig,
        "one label a text",
    ),
    "distill": ObjectiveSpec(
        f"{_HERE}.distillation:LogitDistillation",
        "teacher",
        "logits",
        settings.DistillationConfig,
        "a teacher's next-token distributions",
    ),
    "distill_hidden": ObjectiveSpec(
        f"{_HERE}.distillation:HiddenDistillation",
        "teacher",
        "hidden",
        settings.HiddenConfig,
        "a teacher's hidden states",
    ),
}

OBJECTIVES: Registry[ObjectiveSpec] = Registry("objective", "posttrain.objectives", _BUILTIN, ObjectiveSpec)


def objective_spec(name: str, where: str = "train.objective") -> ObjectiveSpec:
    """Returns the objective of a name or a dotted path.

    Raises:
        UserError: there is none, with the most similar name; or it cannot be imported.
    """
    if name not in OBJECTIVES:
        alias = VALUE_ALIASES["train.objective"].get(name.lower())
        fix = describe_alias(alias) if alias else suggest(name, OBJECTIVES)
        raise UserError(f"no objective `{name}`", where=where, fix=fix)
    return OBJECTIVES.load(name, where)


def read_options(name: str, options: dict[str, Any]) -> Section | None:
    """Reads the settings of an objective that is not built in; None for a built-in one, which has a section.

    Raises:
        UserError: an option does not fit, or a built-in objective has options.
    """
    if name not in _BUILTIN:
        return objective_spec(name).config.read(options, "train.options")
    if options:
        raise UserError(f"`{name}` has a section of its own", where="train.options", fix=f"set keys of train.{name}")
    return None
