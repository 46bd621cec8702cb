"""The metrics that a Prometheus server reads over HTTP."""

import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from posttrain.store.errors import UserError
from posttrain.train.monitor.decisions import Finding, MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.sinks import PrometheusSink

MakeValues = Callable[..., StepValues]

SKIPPED = MonitorDecision(Finding("explosion", 4, "gradient norm 90 is 100 times the median", 90.0, 5.0), "skip")

METRICS_AND_PHASES = {"metrics": {"rewards/margins": 0.5}, "phases": {"forward": 1.25}}


@pytest.fixture
def prometheus() -> Iterator[PrometheusSink]:
    sink = PrometheusSink(0)
    yield sink
    sink.close()


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_prometheus_reads_the_metrics_over_http(prometheus: PrometheusSink, make_values: MakeValues) -> None:
    prometheus.write(make_values(3, loss=1.2), [])
    prometheus.write(
        make_values(4, loss=1.4, seconds=4.0, group_norms={"layers.0": 0.25}, mfu=None, **METRICS_AND_PHASES), [SKIPPED]
    )
    text = get(prometheus.port)
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    names = {name for name in types if not name.endswith("_created")}
    assert len(names) >= 20, "as many as documented"
    assert f"Serves {len(names)} metrics" in str(PrometheusSink.__doc__)
    assert all(name.startswith("posttrain_train_") for name in names)
    assert set(types.values()) == {"gauge", "counter", "histogram"}
    actual = samples(text)
    expected = {
        "step": 4,
        "loss": 1.4,
        "lowest_loss": 1.2,
        "gradient_norm": 0.8,
        'group_gradient_norm{group="layers.0"}': 0.25,
        'objective_metric{name="rewards/margins"}': 0.5,
        'phase_seconds{phase="forward"}': 1.25,
        "update_ratio": 1e-3,
        "data_wait_ratio": 0.01,
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
    assert {name: actual[f"posttrain_train_{name}"] for name in expected} == pytest.approx(expected)
    assert math.isnan(actual["posttrain_train_mfu_ratio"])


@pytest.mark.slow
def test_two_endpoints_are_independent(prometheus: PrometheusSink, make_values: MakeValues) -> None:
    other = PrometheusSink(0)
    other.write(make_values(9), [])
    assert samples(get(other.port))["posttrain_train_steps_total"] == 1
    assert samples(get(prometheus.port))["posttrain_train_steps_total"] == 0
    other.close()
    with pytest.raises(urllib.error.URLError):
        get(other.port)
    PrometheusSink(other.port).close()


def test_an_occupied_port_is_a_user_error(prometheus: PrometheusSink) -> None:
    with pytest.raises(UserError, match=rf"train.sinks.prometheus: 127.0.0.1:{prometheus.port} cannot be served"):
        PrometheusSink(prometheus.port)
