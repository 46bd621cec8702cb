"""The config section ``train``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.models.precision import ComputePrecision
from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.data.config import DIFFICULTY_KEY, LoaderConfig, PhaseConfig, curriculum_difficulty
from posttrain.train.lora_config import LoraConfig
from posttrain.train.monitor.config import ProfileConfig, SinksConfig
from posttrain.train.objectives.config import DistillationConfig, SftConfig
from posttrain.train.objectives.registry import OBJECTIVES, AnyObjective, ObjectiveSpec, objective_spec
from posttrain.train.optim.config import OptimizerConfig, SurgeryConfig
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.regularization.config import NoiseConfig

OPERATIONAL_SECTIONS = frozenset({"checkpoint", "loader", "profile", "sinks"})
"""Parts of the config that do not decide what a training ends with."""

_RESUMABLE = (
    *("learning_rate", "schedule", "clip", "optimizer", "noise", "lora.dropout"),
    *(
        f"objective.{name}"
        for name in (
            *("label_smoothing", "focal", "beta", "gamma", "nll_weight", "desirable_weight", "undesirable_weight"),
            *("centring", "divergence", "temperature", "hard_weight"),
        )
    ),
)
"""Keys and sections whose values the next step reads again: no weight, moment or batch has their shape."""

_NOT_RESUMABLE = ("optimizer.name", "optimizer.offload")


class PruneConfig(Section):
    """Removes the least important parts of the initial model before it is trained; see `posttrain.models.pruning`."""

    layers: int | None = Field(None, ge=1, description="Decoder layers to keep; null: all.")
    heads: int | None = Field(
        None, ge=1, description="Query heads to keep in each layer, whole groups of those that share keys; null: all."
    )
    inner: int | None = Field(
        None, ge=1, description="Channels to keep in each feed-forward block (`intermediate_size`); null: all."
    )
    records: int = Field(128, ge=1, description="Training records, a random sample, that importance is measured on.")

    @property
    def is_set(self) -> bool:
        """True if the initial model is pruned."""
        return (self.layers, self.heads, self.inner) != (None, None, None)


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


class EvaluationConfig(Section):
    """Evaluates the model on held-out records while it trains, without a change to any step."""

    data: float | str | None = Field(
        None,
        description="Held-out records: a file or its URL, `hub:OWNER/NAME:SPLIT`, a dataset version, whose validation "
        "split counts, or the share of the training records to hold out; null: none.",
    )
    every: int | None = Field(
        None, ge=1, description="Optimiser steps between evaluations, the last step having one too; null: each epoch."
    )
    metrics: list[str] = Field(
        [],
        description="Scorers of the model's answers, such as exact_match, beside the loss; the first of them decides "
        "which evaluation is best, without any the loss.",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="Evaluations in a row without a better one that end the training; the result then has the weights "
        "of the best. null: all steps are trained, and the last weights are the result.",
    )

    @field_validator("data", mode="before")
    @classmethod
    def _percent_is_a_share(cls, data: Any) -> Any:
        # As in `tune.held_out`.
        is_percent = isinstance(data, str) and data.endswith("%") and data[:-1].replace(".", "", 1).isdigit()
        return float(data[:-1]) / 100 if is_percent else data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.data, float) and not 0 < self.data < 1:
            raise ValueError(f"{self.data:g} is not a share of the records, above 0 and below 1, nor a file")
        if self.data is None and self != EvaluationConfig.model_construct():
            raise ValueError("there are no held-out records to evaluate on: set `data`")
        return self


class TrainConfig(Section):
    """Settings of a training."""

    objective: AnyObjective = Field(
        SftConfig(),
        description=f"Training objective: {', '.join(OBJECTIVES)}, or the dotted path of your own, `my_module:NAME`; "
        "alone, or as `name` with its settings.",
    )
    method: Literal["full", "lora"] = Field("full", description="Train all weights, or a LoRA adapter.")
    start: Literal["base", "champion"] = Field("base", description="The weights that a round starts from.")
    epochs: int = Field(6, ge=1, description="Passes over the training set.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimiser steps, in as many passes as they take; null: `epochs` decides."
    )
    stop_loss: float | None = Field(
        None, gt=0, description="Ends the training after an epoch with a lower mean loss; null: never."
    )
    shuffle: bool = Field(True, description="Shuffle each pass, or keep the records' order.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    batch_size: int = Field(16, ge=1, description="Examples per optimiser step.")
    phases: list[PhaseConfig] = Field(
        [], description="Parts of the training one after the other, each with its data, length and rate."
    )
    weight: str | None = Field(
        None, description="Column with each record's weight in the loss, 0 or more; null: all count alike."
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Tokens in memory at once; auto: as many as fit and still make it faster."
    )
    max_length: int = Field(
        1024, ge=8, description="Longer examples are cut at the start of their prompt, in tokens; or see `too_long`."
    )
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="Cut examples longer than max_length, or leave them out; both are counted and listed."
    )
    precision: Literal["auto", "bfloat16", "float16", "autocast", "float32"] = Field(
        "auto",
        description="bfloat16 or float16 weights with float32 masters, float32 under bfloat16 autocast, or float32; "
        "auto: the workspace's `precision`, or the faster one of bfloat16 and float32 on the machine that starts the "
        "training. What was trained is saved in bfloat16.",
    )
    compile: bool = Field(
        False, description="Compile the model's layers: a minute at the start, then faster; needs a C++ compiler."
    )
    recompute: str = Field(
        "none",
        pattern=r"^(none|full|(100|[1-9]?\d)%)$",
        description="Layers whose activations the backward pass computes again, to save memory: none, full, or a share "
        "of them such as 50%.",
    )
    clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; null: any.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning-rate schedule.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="The optimiser.")
    surgery: SurgeryConfig = Field(SurgeryConfig(), description="Conflicts between the gradients of several tasks.")
    noise: NoiseConfig = Field(NoiseConfig(), description="Regularisation inside the model.")
    from_scratch: bool = Field(
        False, description="Train random weights: only config and tokenizer of the model are read."
    )
    shape: ShapeConfig = Field(ShapeConfig(), description="Another shape for a model that is trained from scratch.")
    prune: PruneConfig = Field(PruneConfig(), description="Removes parts of the initial model before it is trained.")
    loader: LoaderConfig = Field(LoaderConfig(), description="Loading of examples.")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="Checkpoints, from which a killed training resumes."
    )
    watch: Literal["strict", "normal", "off"] = Field(
        "normal",
        description="What the monitor does about NaN, exploding gradients, divergence and batches without a supervised "
        "token: stop the training, repair it (skip the batch, roll back, lower the rate), or nothing.",
    )
    evaluate: EvaluationConfig = Field(EvaluationConfig(), description="Evaluation during the training.")
    profile: ProfileConfig = Field(ProfileConfig(), description="Profile of a few steps.")
    sinks: SinksConfig = Field(SinksConfig(), description="Trackers that also receive the metrics of each step.")
    lora: LoraConfig = Field(LoraConfig(), description="LoRA's settings, with method lora.")

    @field_validator("watch", mode="before")
    @classmethod
    def _off_is_a_word(cls, watch: Any) -> Any:
        return "off" if watch is False else watch  # as YAML reads `off`

    @model_validator(mode="after")
    def _steps_have_tasks(self) -> Self:
        if self.surgery.method != "none" and self.batch_size == 1:
            raise ValueError("surgery compares the tasks of a step: give a step a batch_size of 2 or more")
        return self

    @model_validator(mode="after")
    def _weights_are_pruned(self) -> Self:
        if self.prune.is_set and self.from_scratch:
            raise ValueError("prune keeps trained weights, and training from scratch (from_scratch) has none")
        if self.shape.is_set and not self.from_scratch:
            raise ValueError("a shape is for training from scratch: set from_scratch too, or prune a trained model")
        return self

    @model_validator(mode="after")
    def _length_is_one(self) -> Self:
        if self.max_steps is not None and self.phases:
            raise ValueError("phases have steps of their own: leave out max_steps")
        return self

    @property
    def is_extendable(self) -> bool:
        """True if no step depends on their number: a longer training then begins with the same steps."""
        warmup = self.schedule.warmup
        steady = self.schedule.name == "constant" and (warmup == 0 or warmup >= 1)
        return steady and not self.phases and (self.method != "lora" or self.lora.gates is None)

    @property
    def spec(self) -> ObjectiveSpec:
        """What the objective needs of data and model."""
        return objective_spec(self.objective.name)

    @property
    def recompute_share(self) -> float:
        """The share of layers that the backward pass computes again."""
        percent = {"none": "0", "full": "100"}.get(self.recompute, self.recompute.rstrip("%"))
        return int(percent) / 100

    @property
    def changes_shape(self) -> bool:
        """True if the model that is trained may have another shape than the one to start from."""
        return self.prune.is_set or self.shape.is_set

    @property
    def has_teacher(self) -> bool:
        """True if the objective learns from a teacher."""
        return isinstance(self.objective, DistillationConfig)

    @property
    def teacher(self) -> str | None:
        """The folder of the teacher; None where the objective has none, or none is named."""
        return self.objective.teacher if isinstance(self.objective, DistillationConfig) else None

    def with_teacher_from(self, root: Path) -> "TrainConfig":
        """Resolves the teacher's folder, which is relative to ``root``, if the objective has one.

        Raises:
            UserError: no teacher is named, or there is no model where it should be.
        """
        if not isinstance(self.objective, DistillationConfig):
            return self
        return self.with_teacher(self.objective.teacher_folder(root))

    def with_teacher(self, folder: Path | None) -> "TrainConfig":
        """Returns the config with another teacher, if its objective has one."""
        if not isinstance(self.objective, DistillationConfig):
            return self
        objective = self.objective.model_copy(update={"teacher": None if folder is None else str(folder)})
        return self.model_copy(update={"objective": objective})

    def with_held_out(self, resolve: Callable[[str], str]) -> "TrainConfig":
        """Returns the config with the name of its held-out records resolved, if they have one."""
        if not isinstance(self.evaluate.data, str):
            return self
        evaluate = self.evaluate.model_copy(update={"data": resolve(self.evaluate.data)})
        return self.model_copy(update={"evaluate": evaluate})

    def with_precision(self, precision: ComputePrecision) -> "TrainConfig":
        """Returns the config with a precision in place of ``auto``."""
        return self if self.precision != "auto" else self.model_copy(update={"precision": precision})

    def key_settings(self) -> dict[str, Any]:
        """Returns the settings that decide a training's result, as JSON for its key.

        A key holds the teacher's artifact id, not its path.
        """
        return self.with_teacher(None).model_dump(mode="json", exclude={"start", *OPERATIONAL_SECTIONS})

    @property
    def token_budget(self) -> int:
        """``micro_batch_tokens``, once ``auto`` was resolved."""
        assert isinstance(self.micro_batch_tokens, int), "decide micro_batch_tokens first"
        return self.micro_batch_tokens

    @property
    def dtype(self) -> str:
        """Dtype of the weights that the model computes with, once ``auto`` was resolved."""
        assert self.precision != "auto", "decide precision first"
        return self.precision if self.precision in ("bfloat16", "float16") else "float32"


def training_phases(config: TrainConfig) -> list[PhaseConfig]:
    """Returns the phases of a training; one with all its epochs if the config names none.

    Raises:
        UserError: two curricula use different measures of difficulty, or one uses losses that the objective does not
            measure.
    """
    whole = PhaseConfig(steps=config.max_steps, epochs=config.epochs if config.max_steps is None else None)
    phases = list(config.phases) or [whole]
    curricula = [phase.curriculum for phase in phases if phase.curriculum]
    if len({curriculum.difficulty for curriculum in curricula}) > 1:
        raise UserError("the phases' curricula go by different difficulties", where="train.phases")
    if curriculum_difficulty(phases) == "loss" and config.spec.classifier:
        fix = "name a column of the data with numbers"
        raise UserError(f"{config.objective.name} has no loss before training", where=DIFFICULTY_KEY, fix=fix)
    return phases


def can_change_on_resume(key: str) -> bool:
    """Returns whether a training can continue from a checkpoint with another value of a key of ``train``, such as
    ``optimizer.weight_decay``.

    Weights, moments, random generators and the position in the data stay those of the checkpoint, and every later step
    is as if the training had had the new value. Other keys decide which weights there are, or which records a step has.
    """
    return _is_below(key, _RESUMABLE) and not _is_below(key, _NOT_RESUMABLE)


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def columns_read(config: TrainConfig) -> set[str]:
    """Returns the columns of a file besides prompt and answer that a training reads."""
    names = {config.weight, config.surgery.task_column, curriculum_difficulty(config.phases)}
    names |= {phase.mix_by for phase in config.phases if phase.mix is not None}
    names |= {"margin"} if config.spec.margins else set()
    names |= {"label"} if config.spec.shape in ("labelled", "class") else set()
    return {name for name in names if name is not None}
