"""The config sections ``train.watch``, ``train.profile`` and ``train.sinks``."""

from typing import Literal

from pydantic import Field

from posttrain.store.section import Section


class NanConfig(Section):
    """Loss or gradient norm that is NaN or infinite. It is never only warned of: the weights would be lost."""

    action: Literal["skip", "rollback", "lower_rate", "stop"] = Field("rollback", description="Action on a finding.")


class ExplosionConfig(Section):
    """A gradient norm far above the recent ones, by a robust z-score of its logarithm."""

    action: Literal["warn", "skip", "rollback", "lower_rate", "stop"] = Field(
        "skip", description="Action on a finding."
    )
    z: float = Field(7.0, gt=0, description="Deviations above the median that count as an explosion.")
    window: int = Field(64, ge=4, description="Steps that median and deviation are taken over.")
    warmup: int = Field(8, ge=3, description="Steps before the first check.")
    floor: float = Field(
        0.25, gt=0, description="Least deviation of the logarithm: norms below exp(z * floor) times the median pass."
    )


class DivergenceConfig(Section):
    """A smoothed loss (running median) that stays well above its lowest."""

    action: Literal["warn", "rollback", "lower_rate", "stop"] = Field("rollback", description="Action on a finding.")
    rise: float = Field(0.5, gt=0, description="Rise as a share of the lowest loss, or of what was gained if more.")
    z: float = Field(10.0, gt=0, description="Rise in standard errors of the smoothed loss; the larger rise counts.")
    window: int = Field(25, ge=3, description="Steps that the loss is smoothed over.")
    patience: int = Field(10, ge=1, description="Steps in a row that the loss has to stay above.")


class PlateauConfig(Section):
    """A loss that surely has not improved over a window, by its slope and the slope's standard error."""

    action: Literal["warn", "lower_rate", "stop"] = Field("warn", description="Action on a finding.")
    window: int = Field(500, ge=10, description="Steps that the slope is taken over.")
    improvement: float = Field(0.02, gt=0, description="Improvement over the window that is enough, relative.")
    z: float = Field(2.0, ge=0, description="Standard errors by which the improvement has to be below that.")


class DeadLayersConfig(Section):
    """Layer groups whose gradient is zero, or next to nothing beside the others'."""

    action: Literal["warn", "rollback", "lower_rate", "stop"] = Field("warn", description="Action on a finding.")
    share: float = Field(1e-4, ge=0, lt=1, description="Share of the groups' median norm that is next to nothing.")
    patience: int = Field(20, ge=1, description="Steps in a row.")


class NoSupervisedConfig(Section):
    """A step's batch without a token that the loss is taken on."""

    action: Literal["warn", "skip", "stop"] = Field("skip", description="Action on a finding.")


class MonitorConfig(Section):
    """The faults that the monitor detects while training, and its actions."""

    nan: NanConfig = Field(NanConfig(), description="Loss or gradient norm that is NaN or infinite.")
    explosion: ExplosionConfig = Field(ExplosionConfig(), description="A gradient norm far above the recent ones.")
    divergence: DivergenceConfig = Field(DivergenceConfig(), description="A loss that stays well above its lowest.")
    plateau: PlateauConfig = Field(PlateauConfig(), description="A loss that surely has not improved.")
    dead_layers: DeadLayersConfig = Field(DeadLayersConfig(), description="Layers without a gradient.")
    no_supervised: NoSupervisedConfig = Field(NoSupervisedConfig(), description="A batch without a supervised token.")
    again_within: int = Field(
        200, ge=1, description="NaN, explosion or divergence again within so many steps: the next graver action."
    )
    max_skips: int = Field(5, ge=1, description="Skips of one kind within these steps before it is rolled back.")
    max_rollbacks: int = Field(3, ge=0, description="Rollbacks in a training; where one more is due, it stops.")
    rate_factor: float = Field(0.5, gt=0, lt=1, description="Factor of lower_rate on the learning rate.")


class ProfileConfig(Section):
    """Steps that are profiled: a trace of every operation, and a table of where the time went."""

    steps: int = Field(0, ge=0, description="Steps to profile, after two of warm-up; 0: none.")


class SinksConfig(Section):
    """Sinks for the metrics of each step. Nothing leaves the machine unless it is named here."""

    prometheus: int | None = Field(
        None, ge=0, le=65535, description="Port that a Prometheus server reads from; 0 picks a free one."
    )
    prometheus_address: str = Field("127.0.0.1", description="Address that the port is opened on.")
    tensorboard: str | None = Field(None, description="Folder of TensorBoard's event files.")
    mlflow: str | None = Field(None, description="MLflow's tracking URI, such as sqlite:///mlflow.db.")
    mlflow_experiment: str = Field("posttrain", description="MLflow's experiment; made if missing.")
    wandb: str | None = Field(None, description="Project at Weights & Biases.")
