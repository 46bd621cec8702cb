"""The metrics that a Prometheus server reads over HTTP."""

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
    prometheus.write(make_values(4, loss=1.4, mfu=0.5), [SKIPPED])
    prometheus.write(make_values(5, seconds=4.0, mfu=None, **METRICS_AND_PHASES), [])
    actual = samples(get(prometheus.port))
    expected = {
        'value{name="step"}': 5,
        'value{name="loss"}': 1.5,
        'value{name="objective/rewards/margins"}': 0.5,
        'value{name="seconds/forward"}': 1.25,
        'value{name="update_ratio"}': 1e-3,
        'value{name="memory_bytes"}': 3e9,
        "steps_total": 3,
        "tokens_total": 12000,
        'decisions_total{action="skip",kind="explosion"}': 1,
    }
    assert {name: actual[f"posttrain_train_{name}"] for name in expected} == pytest.approx(expected)
    assert 'posttrain_train_value{name="mfu"}' not in actual, "what was not measured is missing"


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
