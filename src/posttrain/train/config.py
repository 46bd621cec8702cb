"""The config section ``train``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.curriculum import CurriculumConfig
from posttrain.train.ema_config import EmaConfig
from posttrain.train.initialization.config import InitializationConfig
from posttrain.train.memory.config import RecomputeConfig
from posttrain.train.noise.config import NoiseConfig
from posttrain.train.objectives.config import (
    CdpoConfig,
    ClassificationConfig,
    CpoConfig,
    DistillationConfig,
    DpoConfig,
    HiddenConfig,
    HingeConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    RewardConfig,
    RobustDpoConfig,
    SftConfig,
    SimpoConfig,
)
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.optimizers.config import OptimizerConfig
from posttrain.train.order import StageConfig
from posttrain.train.scaling import ScalingConfig
from posttrain.train.schedule import ScheduleConfig
from posttrain.train.tokens.config import LoaderConfig
from posttrain.train.watch.config import ProfileConfig, WatchConfig
from posttrain.train.watch.sinks.config import SinksConfig


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), through peft."""

    rank: int = Field(16, ge=1, description="Rank of the update.")
    alpha: int = Field(32, ge=1, description="Scale of the update, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the update.")
    targets: list[str] | str = Field("all-linear", description="Names of the adapted modules.")


BESIDE = frozenset({"checkpoint", "loader", "profile", "sinks"})
"""Parts of the config that do not decide what a training ends with."""


class TrainConfig(Section):
    """How a round trains its candidate."""

    objective: Literal[
        "sft",
        "dpo",
        "cdpo",
        "robust_dpo",
        "ipo",
        "hinge",
        "orpo",
        "simpo",
        "cpo",
        "kto",
        "reward",
        "classification",
        "distill",
        "distill_hidden",
    ] = Field("sft", description="Learn the answers, from preferences, to classify, to reward, or from a teacher.")
    method: Literal["full", "lora"] = Field("full", description="Train all weights, or a LoRA adapter.")
    start: Literal["base", "champion"] = Field("base", description="The weights that a round starts from.")
    epochs: int = Field(6, ge=1, description="Passes over the training set.")
    shuffle: bool = Field(True, description="Shuffle each pass, or keep the records' order.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    batch_size: int = Field(16, ge=1, description="Examples an optimiser step.")
    stages: list[StageConfig] = Field(
        [], description="Parts of the training one after the other, each with its data, length and rate."
    )
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="Whether easy records come first.")
    weight: str | None = Field(
        None, description="A column with what each record counts in the loss, 0 or more; none: all count alike."
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Tokens that are in memory at once; auto: as many as fit and still make it faster."
    )
    max_length: int = Field(1024, ge=8, description="Longer examples are cut at the start of their prompt, in tokens.")
    precision: Literal["bfloat16", "float16", "autocast", "float32"] = Field(
        "bfloat16",
        description="bfloat16 or float16 weights with float32 masters, float32 under bfloat16 autocast, or float32; "
        "what was trained is saved in bfloat16.",
    )
    scaling: ScalingConfig = Field(ScalingConfig(), description="Loss scaling, with precision float16.")
    compile: bool = Field(
        False, description="Compile the model's layers: a minute at the start, then faster; needs a C++ compiler."
    )
    recompute: RecomputeConfig = Field(RecomputeConfig(), description="What the backward pass computes again.")
    clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; null: any.")
    clip_value: float | None = Field(
        None, gt=0, description="Largest element of the gradient, clipped before the norm."
    )
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="How the learning rate moves.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="What turns gradients into updates.")
    ema: EmaConfig = Field(EmaConfig(), description="A moving average of the weights.")
    noise: NoiseConfig = Field(NoiseConfig(), description="What is done to the model's inside while it trains.")
    weight_standardization: bool = Field(
        False, description="Standardise the filters of convolutions (arXiv:1903.10520)."
    )
    initialization: InitializationConfig = Field(InitializationConfig(), description="Training from scratch.")
    loader: LoaderConfig = Field(LoaderConfig(), description="How examples come to the model.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="What a kill cannot undo.")
    watch: WatchConfig = Field(WatchConfig(), description="What is watched for, and what is done about it.")
    profile: ProfileConfig = Field(ProfileConfig(), description="A close look at where the time goes.")
    sinks: SinksConfig = Field(SinksConfig(), description="Where else the values of each step go.")
    lora: LoraConfig = Field(LoraConfig(), description="LoRA's settings, with method lora.")
    sft: SftConfig = Field(SftConfig(), description="The objective sft's settings.")
    dpo: DpoConfig = Field(DpoConfig(), description="The objective dpo's settings.")
    cdpo: CdpoConfig = Field(CdpoConfig(), description="The objective cdpo's settings.")
    robust_dpo: RobustDpoConfig = Field(RobustDpoConfig(), description="The objective robust_dpo's settings.")
    ipo: IpoConfig = Field(IpoConfig(), description="The objective ipo's settings.")
    hinge: HingeConfig = Field(HingeConfig(), description="The objective hinge's settings.")
    orpo: OrpoConfig = Field(OrpoConfig(), description="The objective orpo's settings.")
    simpo: SimpoConfig = Field(SimpoConfig(), description="The objective simpo's settings.")
    cpo: CpoConfig = Field(CpoConfig(), description="The objective cpo's settings.")
    kto: KtoConfig = Field(KtoConfig(), description="The objective kto's settings.")
    reward: RewardConfig = Field(RewardConfig(), description="The objective reward's settings.")
    classification: ClassificationConfig = Field(
        ClassificationConfig(), description="The objective classification's settings."
    )
    distill: DistillationConfig = Field(DistillationConfig(), description="The objective distill's settings.")
    distill_hidden: HiddenConfig = Field(HiddenConfig(), description="The objective distill_hidden's settings.")

    @property
    def has_teacher(self) -> bool:
        """Whether the objective learns from a teacher."""
        return OBJECTIVES[self.objective].shape == "teacher"

    def with_teacher_from(self, root: Path) -> "TrainConfig":
        """The same config with the teacher's folder, which is relative to ``root``, in full.

        Raises:
            UserError: the objective has a teacher, and none is named, or there is no model where it should be.
        """
        from posttrain.models.folder import check_folder

        if not self.has_teacher:
            return self
        name, where, fix = self.distill.teacher, "train.distill.teacher", "name a model's folder"
        if name is None:
            raise UserError("distillation needs a teacher", where=where, fix=fix)
        folder = (root / Path(name).expanduser()).resolve()
        if not folder.is_dir():
            raise UserError(f"no folder `{name}`", where=where, fix=fix)
        check_folder(folder)
        return self.with_teacher(folder)

    def with_teacher(self, folder: Path | None) -> "TrainConfig":
        """The same config with another teacher."""
        distill = self.distill.model_copy(update={"teacher": None if folder is None else str(folder)})
        return self.model_copy(update={"distill": distill})

    @property
    def token_budget(self) -> int:
        """``micro_batch_tokens`` once ``auto`` was decided."""
        assert isinstance(self.micro_batch_tokens, int), "decide micro_batch_tokens first"
        return self.micro_batch_tokens

    @property
    def dtype(self) -> str:
        """Of the weights that the model computes with."""
        return self.precision if self.precision in ("bfloat16", "float16") else "float32"
