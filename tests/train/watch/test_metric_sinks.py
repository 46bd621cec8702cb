"""The workspace's own file, Prometheus' endpoint, and how several sinks are held together."""

import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.train.watch.findings import Decision, Finding
from posttrain.train.watch.sinks.config import SinksConfig
from posttrain.train.watch.sinks.jsonl import JsonLines, read_steps
from posttrain.train.watch.sinks.prometheus import Prometheus
from posttrain.train.watch.sinks.together import Together, open_sinks
from posttrain.train.watch.values import StepValues

MakeValues = Callable[..., StepValues]

SKIPPED = Decision(Finding("explosion", 4, "gradient norm 90 is 100 times the median", 90.0, 5.0), "skip")


def write(sink: JsonLines, make_values: MakeValues, steps: Sequence[int]) -> None:
    for step in steps:
        sink.write(make_values(step), [SKIPPED] if step == 4 else [])


@pytest.fixture
def path(tmp_path: Path, make_values: MakeValues) -> Path:
    """A file with the steps 0 to 9."""
    path = tmp_path / "out" / "metrics.jsonl"
    sink = JsonLines(path)
    write(sink, make_values, range(10))
    sink.close()
    return path


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_line_a_step(path: Path, make_values: MakeValues) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    assert lines[4].pop("decisions") == [SKIPPED.to_json()]
    assert lines[4] == make_values(4).to_json()
    assert all("decisions" not in line for line in lines)
    assert [line["step"] for line in read_steps(path)] == list(range(10))


def test_a_line_is_there_as_soon_as_it_is_written(path: Path, make_values: MakeValues) -> None:
    sink = JsonLines(path, start=10)
    for step in (10, 11):
        sink.write(make_values(step, loss=math.nan), [])
        assert read_steps(path)[-1]["step"] == step
        assert read_steps(path)[-1]["loss"] is None
    sink.close()


@pytest.mark.parametrize("start", [0, 1, 6, 10, 15])
def test_after_a_resume_no_step_stands_twice(path: Path, make_values: MakeValues, start: int) -> None:
    before = path.read_bytes()
    sink = JsonLines(path, start)
    write(sink, make_values, range(start, 10))
    sink.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("tail", [b'{"step": 10, "lo', b'{"step": 10}', b"{", b"\0" * 100, b"[10]\n", b'{"loss": 1}\n'])
def test_what_a_kill_leaves_is_removed(
    path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture, tail: bytes
) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [line["step"] for line in read_steps(path)] == list(range(10))
    JsonLines(path, start=10).close()
    assert path.read_bytes() == whole
    assert len(caplog.messages) == 1
    assert "cannot be read" in caplog.messages[0]


def test_damage_amid_the_file_costs_what_follows_and_is_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\xff" + lines[3], *lines[4:]]))
    JsonLines(path, start=8).close()
    assert steps(path) == [0, 1, 2]
    assert len(caplog.messages) == 1


def test_going_back_within_a_training(path: Path, make_values: MakeValues) -> None:
    sink = JsonLines(path, start=10)
    sink.rewind(7)
    write(sink, make_values, [7, 8])
    sink.close()
    assert steps(path) == list(range(9))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file is where a folder is to be made"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    sink = Prometheus(0)
    yield sink
    sink.close()


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_prometheus_reads_the_metrics_over_http(prometheus: Prometheus, make_values: MakeValues) -> None:
    prometheus.write(make_values(3, loss=1.2), [])
    prometheus.write(make_values(4, loss=1.4, seconds=4.0, group_norms={"layers.0": 0.25}, mfu=None), [SKIPPED])
    text = get(prometheus.port)
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    names = {name for name in types if not name.endswith("_created")}
    assert len(names) >= 20
    assert all(name.startswith("posttrain_train_") for name in names)
    assert set(types.values()) == {"gauge", "counter", "histogram"}
    found = samples(text)
    expected = {
        "step": 4,
        "loss": 1.4,
        "lowest_loss": 1.2,
        "gradient_norm": 0.8,
        'group_gradient_norm{group="layers.0"}': 0.25,
        "learning_rate": 1e-4,
        "memory_bytes": 3e9,
        "steps_total": 2,
        "tokens_total": 8000,
        "supervised_tokens_total": 1800,
        "data_wait_seconds_total": 0.06,
        "step_seconds_count": 2,
        "step_seconds_sum": 6,
        'step_seconds_bucket{le="1.0"}': 0,
        'step_seconds_bucket{le="3.0"}': 1,
        'step_seconds_bucket{le="10.0"}': 2,
        'findings_total{kind="explosion"}': 1,
        'findings_total{kind="nan"}': 0,
        'decisions_total{action="skip"}': 1,
        'decisions_total{action="rollback"}': 0,
    }
    assert {name: found[f"posttrain_train_{name}"] for name in expected} == pytest.approx(expected)
    assert math.isnan(found["posttrain_train_mfu_ratio"])


def test_two_endpoints_do_not_meet(prometheus: Prometheus, make_values: MakeValues) -> None:
    other = Prometheus(0)
    other.write(make_values(9), [])
    assert samples(get(other.port))["posttrain_train_steps_total"] == 1
    assert samples(get(prometheus.port))["posttrain_train_steps_total"] == 0
    other.close()
    with pytest.raises(urllib.error.URLError):
        get(other.port)
    Prometheus(other.port).close()


def test_a_port_that_is_taken(prometheus: Prometheus) -> None:
    with pytest.raises(UserError, match=rf"train.sinks.prometheus: 127.0.0.1:{prometheus.port} cannot be served"):
        Prometheus(prometheus.port)


@pytest.mark.parametrize(
    ("key", "value", "module", "package"),
    [
        ("prometheus", 0, "prometheus_client", "prometheus-client"),
        ("tensorboard", "events", "torch.utils.tensorboard", "tensorboard"),
        ("mlflow", "sqlite:///mlflow.db", "mlflow", "mlflow"),
        ("wandb", "project", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_one_line_before_anything_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, module: str, package: str
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setitem(sys.modules, module, None)
    whole = path.read_bytes()
    with pytest.raises(UserError) as error:
        open_sinks(SinksConfig.read({key: value}, "test"), path, run="r")
    assert str(error.value).startswith(f"train.sinks.{key}: needs a package that is not installed")
    assert str(error.value).endswith(f"; pip install {package}")
    assert path.read_bytes() == whole
    assert [file.name for file in path.parent.iterdir()] == [path.name]


class Recorder:
    """A sink that notes its calls, and fails from a given one on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        self._note(f"write {values.step}")

    def rewind(self, step: int) -> None:
        self._note(f"rewind {step}")

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._fails_at is not None and len(self.calls) > self._fails_at:
            raise ConnectionError("the server is away\nand more of it")


def test_a_sink_that_fails_does_not_end_the_training(make_values: MakeValues, caplog: pytest.LogCaptureFixture) -> None:
    own, good, bad = Recorder(), Recorder(), Recorder(fails_at=1)
    together = Together(own, {"bad": bad, "good": good})
    for step in (0, 1, 2):
        together.write(make_values(step), [])
    together.rewind(1)
    together.close()
    assert own.calls == good.calls == ["write 0", "write 1", "write 2", "rewind 1", "close"]
    assert bad.calls == ["write 0", "write 1", "close"]
    assert caplog.messages == ["the sink bad failed (ConnectionError: the server is away) and gets nothing more"]


def test_the_workspaces_own_file_must_not_fail(make_values: MakeValues) -> None:
    with pytest.raises(ConnectionError):
        Together(Recorder(fails_at=0), {}).write(make_values(0), [])


def test_what_was_opened_is_closed_when_another_cannot_be(
    path: Path, prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    close = Prometheus.close

    def noted(sink: Prometheus) -> None:
        closed.append(sink.port)
        close(sink)

    monkeypatch.setattr(Prometheus, "close", noted)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb"):
        open_sinks(SinksConfig(prometheus=0, wandb="project"), path, run="r")
    assert len(closed) == 1
    with pytest.raises(urllib.error.URLError):
        get(closed[0])


def test_sinks_opened_from_a_config(path: Path, make_values: MakeValues, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="posttrain")
    sinks = open_sinks(SinksConfig(prometheus=0), path, run="r", start=5)
    sinks.write(make_values(5), [SKIPPED])
    assert steps(path) == list(range(6))
    (line,) = caplog.messages
    address = line.split(" at ")[1]
    assert "posttrain_train_step 5.0" in get(int(address.split(":")[2].split("/")[0]))
    sinks.close()


def test_without_a_config_nothing_but_the_file_is_written(path: Path, make_values: MakeValues) -> None:
    sinks = open_sinks(SinksConfig(), path, run="r")
    sinks.write(make_values(0), [])
    sinks.close()
    assert steps(path) == [0]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
