"""Registry of objectives, with their requirements on data and model. Loads no torch: the command line reads it.

Other packages add an objective with an `ObjectiveSpec` as an entry point of the group ``posttrain.objectives``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, SerializeAsAny

from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry
from posttrain.store.section import describe_alias
from posttrain.train.data.config import RecordShape
from posttrain.train.key_aliases import VALUE_ALIASES
from posttrain.train.objectives import config as settings
from posttrain.train.objectives.config import ObjectiveConfig

Output = Literal["log_probabilities", "reward", "classes", "logits"]
"""Output of the model's forward pass that the objective reads."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """The requirements of one objective, to check data and model before any work.

    Args:
        objective: its class, a `posttrain.train.objectives.base.Objective`, or the dotted path of one, which is
            imported on first use.
        shape: contents of a record.
        output: output that the model computes.
        config: its name and settings.
        summary: one line for help texts.
        reference: whether it needs the reference's log-probabilities.
        mismatched: whether it needs log-probabilities of prompts with other prompts' answers (see ``kl_estimate``).
        margins: whether it reads how much better each chosen answer is.
    """

    objective: type[Any] | str
    shape: RecordShape
    output: Output
    config: type[ObjectiveConfig]
    summary: str
    reference: bool = False
    mismatched: bool = False
    margins: bool = False

    @property
    def classifier(self) -> bool:
        """True if the model scores a text and answers none."""
        return self.output in ("reward", "classes")


def _pair(objective: str, config: type[ObjectiveConfig], summary: str, reference: bool) -> ObjectiveSpec:
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
        "one label per text",
    ),
    "distill": ObjectiveSpec(
        f"{_HERE}.distillation:DistillationObjective",
        "teacher",
        "logits",
        settings.DistillationConfig,
        "a teacher's next-token distributions or hidden states",
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


def read_objective(value: Any) -> ObjectiveConfig:
    """Reads an objective: its name, or a section with its name and settings.

    Raises:
        ValueError: there is no such objective, or it has no such setting.
    """
    if isinstance(value, ObjectiveConfig):
        return value
    values = {"name": value} if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        raise ValueError("an objective is its name, or a section with its name and settings")
    name = OBJECTIVES.check(values.get("name", "sft"))
    config = objective_spec(name).config
    own = [key for key in config.model_fields if key != "name"]
    for key in values:
        if key not in config.model_fields:
            raise ValueError(f"{name} has no `{key}`; it has {', '.join(own) or 'no settings'}")
    return config.model_validate({**values, "name": name})


def with_name(objective: Any, name: str) -> Any:
    """Returns the value of ``train.objective`` for an objective, with the settings that were given for it.

    Args:
        objective: the value so far, a name or a section; None where there is none.
        name: the objective's name or dotted path.
    """
    if isinstance(objective, Mapping) and objective.get("name", name) == name:
        return {**objective, "name": name}
    return name


AnyObjective = Annotated[
    settings.SftConfig
    | settings.DpoConfig
    | settings.RobustDpoConfig
    | settings.IpoConfig
    | settings.HingeConfig
    | settings.OrpoConfig
    | settings.SimpoConfig
    | settings.CpoConfig
    | settings.KtoConfig
    | settings.RewardConfig
    | settings.ClassificationConfig
    | settings.DistillationConfig
    | SerializeAsAny[ObjectiveConfig],
    BeforeValidator(read_objective),
]
"""The name and settings of an objective; the last is that of another package."""
