"""TensorBoard, MLflow and Weights & Biases, by stand-ins that record the calls to their libraries."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.monitor.decisions import Finding, MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.sinks import MLflowSink, TensorBoardSink, WandbSink

MakeValues = Callable[..., StepValues]

STOPPED = MonitorDecision(Finding("nan", 4, "loss is nan"), "stop", "nothing helped")


class Writer:
    """TensorBoard's SummaryWriter."""

    created: list["Writer"]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: dict[tuple[str, int], float] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.open = True
        self.created.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name, step] = text

    def close(self) -> None:
        self.open = False


def test_tensorboard_gets_values_and_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_values: MakeValues
) -> None:
    Writer.created = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    sink = TensorBoardSink(tmp_path / "events")
    sink.write(make_values(4, loss=float("nan")), [STOPPED])
    sink.rewind([make_values(0), make_values(1)], {})
    sink.write(make_values(2), [])
    sink.close()
    first, second = Writer.created
    assert (first.folder, first.purge_step, first.open) == (str(tmp_path / "events"), None, False)
    assert (second.purge_step, second.open) == (2, False)
    assert first.scalars["grad_norm/layers.0", 4] == 0.5
    assert ("loss", 4) not in first.scalars
    assert first.texts == {("decisions", 4): "step 4: loss is nan: stop (nothing helped)"}
    assert second.scalars["loss", 2] == 1.5


class Client:
    """MLflow's client, over one shared server."""

    def __init__(self, tracking_uri: str) -> None:
        if tracking_uri == "away":
            raise ConnectionFailure("cannot connect\nafter 2 tries")
        self.uri = tracking_uri
        self.experiments: dict[str, str] = {}
        self.runs: list[SimpleNamespace] = []
        self.batches: list[list[Any]] = []
        self.tags: dict[str, str] = {}
        self.ended_runs: list[str] = []

    def get_experiment_by_name(self, name: str) -> Any:
        if self.uri == "away later":
            raise ConnectionFailure("cannot connect\nafter 2 tries")
        result = self.experiments.get(name)
        return result and SimpleNamespace(experiment_id=result)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, "7")

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        return [run for run in self.runs if query == f"attributes.run_name = '{run.name}'"]

    def create_run(self, experiment: str, run_name: str) -> Any:
        run = SimpleNamespace(name=run_name, info=SimpleNamespace(run_id=f"{experiment}-{len(self.runs)}"))
        self.runs.append(run)
        return run

    def update_run(self, run_id: str, status: str) -> None:
        self.ended_runs.remove(run_id)

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        self.batches.append(list(metrics))

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.tags[name] = value

    def set_terminated(self, run_id: str) -> None:
        self.ended_runs.append(run_id)


class ConnectionFailure(Exception):
    pass


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Client:
    server = Client("here")

    def client(tracking_uri: str) -> Client:
        return server if tracking_uri == "here" else Client(tracking_uri)

    def metric(name: str, value: float, timestamp: int, step: int) -> tuple[str, float, int]:
        return name, value, step

    entities = SimpleNamespace(Metric=metric)
    library = SimpleNamespace(
        entities=entities, MlflowClient=client, exceptions=SimpleNamespace(MlflowException=ConnectionFailure)
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    return server


def test_mlflow_gets_values_and_resumes_a_run(mlflow: Client, make_values: MakeValues) -> None:
    sink = MLflowSink("here", "posttrain", "it's mine")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    for step in range(300):
        sink.write(make_values(step), [STOPPED] if step == 4 else [])
    sink.close()
    metrics_sent = [metric for batch in mlflow.batches for metric in batch]
    assert len(metrics_sent) == len(set(metrics_sent)) == 300 * len(make_values(0).numbers())
    assert ("loss", 1.5, 299) in metrics_sent
    assert len(mlflow.batches) < 20, "not one request a step"
    assert mlflow.tags == {"decision.4.nan": STOPPED.line()}
    assert mlflow.ended_runs == ["7-0"]
    MLflowSink("here", "posttrain", "it's mine").close()
    assert len(mlflow.runs) == 1, "the same name resumes the same run"
    MLflowSink("here", "posttrain", "another").close()
    assert mlflow.ended_runs == ["7-0", "7-1"]


@pytest.mark.parametrize("uri", ["away later", "away"])
def test_an_unreachable_mlflow_is_a_user_error(mlflow: Client, uri: str) -> None:
    with pytest.raises(UserError) as error:
        MLflowSink(uri, "posttrain", "r")
    assert str(error.value) == f"train.sinks.mlflow: {uri} cannot be used (cannot connect); check the tracking URI"


def test_wandb_gets_values_and_resumes_a_run(monkeypatch: pytest.MonkeyPatch, make_values: MakeValues) -> None:
    logged: list[dict[str, Any]] = []
    axes: list[tuple[str, str]] = []
    finish_calls: list[bool] = []
    init_arguments: dict[str, Any] = {}

    class Problem(Exception):
        pass

    def init(**arguments: Any) -> Any:
        if arguments["project"] == "nobody's":
            raise Problem("no API key\nsee the manual")
        init_arguments.update(arguments)
        return SimpleNamespace(
            log=logged.append,
            define_metric=lambda name, step_metric: axes.append((name, step_metric)),
            finish=lambda: finish_calls.append(True),
        )

    library = SimpleNamespace(Settings=lambda **settings: settings, init=init, Error=Problem)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    sink = WandbSink("project", "my run")
    sink.write(make_values(3), [])
    sink.write(make_values(4), [STOPPED])
    sink.close()
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert init_arguments["settings"]["console"] == "off"
    assert init_arguments["settings"]["disable_code"] is True
    assert init_arguments["resume"] == "allow"
    assert logged[0] == {"step": 3, **make_values(3).numbers()}
    assert logged[1]["decisions"] == STOPPED.line()
    assert axes == [("*", "step")]
    assert finish_calls == [True]
    first = init_arguments["id"]
    WandbSink("project", "my run")
    assert init_arguments["id"] == first, "the same name resumes the same run"
    WandbSink("project", "another")
    assert init_arguments["id"] != first
    with pytest.raises(UserError, match=r"^train.sinks.wandb: no API key; see `wandb login`$"):
        WandbSink("nobody's", "r")
