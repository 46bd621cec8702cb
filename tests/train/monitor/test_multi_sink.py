"""Several sinks as one: opened from a config, and robust against the failure of a sink."""

import json
import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.monitor.config import SinksConfig
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import JsonlSink, MultiSink, StepValues
from posttrain.train.monitor.sinks import PrometheusSink, open_sinks

MakeValues = Callable[..., StepValues]


@pytest.fixture
def path(tmp_path: Path, make_values: MakeValues) -> Path:
    """A file with the steps 0 to 9."""
    path = tmp_path / "out" / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(10):
        sink.write(make_values(step), [])
    sink.close()
    return path


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("key", "value", "module", "package"),
    [
        ("prometheus", 0, "prometheus_client", "prometheus-client"),
        ("tensorboard", "events", "torch.utils.tensorboard", "tensorboard"),
        ("mlflow", "sqlite:///mlflow.db", "mlflow", "mlflow"),
        ("wandb", "project", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_reported_before_any_work(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, module: str, package: str
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setitem(sys.modules, module, None)
    content = path.read_bytes()
    with pytest.raises(UserError) as error:
        open_sinks(SinksConfig.read({key: value}, "test"), path, run="r")
    assert str(error.value).startswith(f"train.sinks.{key}: needs a package that is not installed")
    assert str(error.value).endswith(f"pip install {package}")
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


class Recorder:
    """A sink that records its calls, and fails after ``fails_at`` calls."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self._record(f"write {values.step}")

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self._record(f"rewind {len(steps)}")

    def close(self) -> None:
        self._record("close")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if self._fails_at is not None and len(self.calls) > self._fails_at:
            raise ConnectionError("the server is away\nand more of it")


def test_a_failing_sink_does_not_stop_the_training(make_values: MakeValues, caplog: pytest.LogCaptureFixture) -> None:
    own_sink, good_sink, bad_sink = Recorder(), Recorder(), Recorder(fails_at=1)
    multi_sink = MultiSink(own_sink, {"bad": bad_sink, "good": good_sink})
    for step in (0, 1, 2):
        multi_sink.write(make_values(step), [])
    multi_sink.rewind([make_values(0)], {})
    multi_sink.close()
    assert own_sink.calls == good_sink.calls == ["write 0", "write 1", "write 2", "rewind 1", "close"]
    assert bad_sink.calls == ["write 0", "write 1", "close"]
    assert caplog.messages == ["the sink bad failed (ConnectionError: the server is away) and gets nothing more"]


def test_a_failing_metrics_file_is_an_error(make_values: MakeValues) -> None:
    with pytest.raises(ConnectionError):
        MultiSink(Recorder(fails_at=0), {}).write(make_values(0), [])


@pytest.mark.slow
def test_opened_sinks_are_closed_when_another_fails_to_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_ports: list[int] = []
    close = PrometheusSink.close

    def record_port(sink: PrometheusSink) -> None:
        closed_ports.append(sink.port)
        close(sink)

    monkeypatch.setattr(PrometheusSink, "close", record_port)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb"):
        open_sinks(SinksConfig(prometheus=0, wandb="project"), path, run="r")
    assert len(closed_ports) == 1
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", closed_ports[0]), timeout=10):
        pass


@pytest.mark.slow
def test_sinks_opened_from_a_config(path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="posttrain")
    sinks = open_sinks(SinksConfig(prometheus=0), path, run="r")
    sinks.rewind([make_values(step) for step in range(5)], {})
    sinks.write(make_values(5), [])
    assert steps(path) == list(range(6))
    (line,) = caplog.messages
    with urllib.request.urlopen(line.split(" at ")[1], timeout=10) as answer:
        assert b'posttrain_train_value{name="step"} 5.0' in answer.read()
    sinks.close()


def test_without_a_config_only_the_file_is_written(path: Path, make_values: MakeValues) -> None:
    sinks = open_sinks(SinksConfig(), path, run="r")
    sinks.rewind([], {})
    sinks.write(make_values(0), [])
    sinks.close()
    assert steps(path) == [0]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
