"""The config section ``train``."""

from typing import Literal

from pydantic import Field

from posttrain.store.section import Section


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), through peft."""

    rank: int = Field(16, ge=1, description="Rank of the update.")
    alpha: int = Field(32, ge=1, description="Scale of the update, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the update.")
    targets: list[str] | str = Field("all-linear", description="Names of the adapted modules.")


class TrainConfig(Section):
    """How a round trains its candidate."""

    method: Literal["full", "lora"] = Field("full", description="Train all weights, or a LoRA adapter.")
    start: Literal["base", "champion"] = Field("base", description="The weights that a round starts from.")
    epochs: int = Field(6, ge=1, description="Passes over the training set.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    batch_size: int = Field(16, ge=1, description="Examples an optimiser step.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Padded tokens that are in memory at once.")
    max_length: int = Field(1024, ge=8, description="Longer examples are cut at the start of their prompt, in tokens.")
    precision: Literal["bfloat16", "autocast", "float32"] = Field(
        "bfloat16", description="bfloat16 weights with float32 masters, float32 under bfloat16 autocast, or float32."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Learning rate after warm-up.")
    warmup: float = Field(0.1, ge=0, lt=1, description="Share of the steps in which the rate climbs.")
    final_rate: float = Field(0.0, ge=0, le=1, description="Where the schedule ends, as a share of the peak.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay; not on norms, biases and embeddings.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    checkpoint_seconds: float = Field(
        60.0, gt=0, description="Seconds between checkpoints: the most work a kill can cost."
    )
    lora: LoraConfig = Field(LoraConfig(), description="LoRA's settings, with method lora.")
