"""The config section ``train``."""

from typing import Literal

from pydantic import Field

from posttrain.store.section import Section
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.objectives.config import CdpoConfig, DpoConfig, HingeConfig, IpoConfig, RobustDpoConfig
from posttrain.train.optimizers.config import OptimizerConfig
from posttrain.train.schedule import ScheduleConfig
from posttrain.train.watch.config import WatchConfig
from posttrain.train.watch.sinks.config import SinksConfig


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), through peft."""

    rank: int = Field(16, ge=1, description="Rank of the update.")
    alpha: int = Field(32, ge=1, description="Scale of the update, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the update.")
    targets: list[str] | str = Field("all-linear", description="Names of the adapted modules.")


class TrainConfig(Section):
    """How a round trains its candidate."""

    objective: Literal["sft", "dpo", "cdpo", "robust_dpo", "ipo", "hinge"] = Field(
        "sft", description="Learn the answers, or from pairs of a better and a worse one."
    )
    method: Literal["full", "lora"] = Field("full", description="Train all weights, or a LoRA adapter.")
    start: Literal["base", "champion"] = Field("base", description="The weights that a round starts from.")
    epochs: int = Field(6, ge=1, description="Passes over the training set.")
    shuffle: bool = Field(True, description="Shuffle each pass, or keep the records' order.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    batch_size: int = Field(16, ge=1, description="Examples an optimiser step.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens that are in memory at once.")
    max_length: int = Field(1024, ge=8, description="Longer examples are cut at the start of their prompt, in tokens.")
    precision: Literal["bfloat16", "autocast", "float32"] = Field(
        "bfloat16", description="bfloat16 weights with float32 masters, float32 under bfloat16 autocast, or float32."
    )
    compile: bool = Field(
        False, description="Compile the model's layers: a minute at the start, then faster; needs a C++ compiler."
    )
    clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="How the learning rate moves.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="What turns gradients into updates.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="What a kill cannot undo.")
    watch: WatchConfig = Field(WatchConfig(), description="What is watched for, and what is done about it.")
    sinks: SinksConfig = Field(SinksConfig(), description="Where else the values of each step go.")
    lora: LoraConfig = Field(LoraConfig(), description="LoRA's settings, with method lora.")
    dpo: DpoConfig = Field(DpoConfig(), description="The objective dpo's settings.")
    cdpo: CdpoConfig = Field(CdpoConfig(), description="The objective cdpo's settings.")
    robust_dpo: RobustDpoConfig = Field(RobustDpoConfig(), description="The objective robust_dpo's settings.")
    ipo: IpoConfig = Field(IpoConfig(), description="The objective ipo's settings.")
    hinge: HingeConfig = Field(HingeConfig(), description="The objective hinge's settings.")
