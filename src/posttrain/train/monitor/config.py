"""The config sections ``train.profile`` and ``train.sinks``."""

from pydantic import Field

from posttrain.store.section import Section


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
    mlflow: str | None = Field(
        None, description="MLflow's tracking URI, such as sqlite:///mlflow.db; its experiment is `posttrain`."
    )
    wandb: str | None = Field(None, description="Project at Weights & Biases.")
