"""Metrics for a Prometheus server to read over HTTP."""

import math
import time
from collections.abc import Mapping, Sequence

from posttrain.store.errors import UserError
from posttrain.train.watch.findings import ACTIONS, KINDS, Decision
from posttrain.train.watch.sinks.base import optional
from posttrain.train.watch.values import StepValues

_WHERE = "train.sinks.prometheus"
_PREFIX = "posttrain_train"

# Metric, attribute of the step's values, help.
_GAUGES = (
    ("step", "step", "Optimiser step, from 0"),
    ("epoch", "epoch", "Finished passes over the data"),
    ("loss", "loss", "Mean loss of the step, nats a supervised token"),
    ("gradient_norm", "grad_norm", "L2 norm of the gradient before clipping"),
    ("update_ratio", "update_ratio", "Norm of the update over norm of the weights"),
    ("learning_rate", "lr", "Learning rate of the step"),
    ("loss_scale", "loss_scale", "What a float16 loss is multiplied by"),
    ("step_tokens", "tokens", "Tokens of the step without padding"),
    ("step_supervised_tokens", "supervised_tokens", "Tokens of the step that the loss is taken on"),
    ("tokens_per_second", "tokens_per_second", "Tokens without padding a second"),
    ("last_step_seconds", "seconds", "Wall time of the step"),
    ("memory_bytes", "memory_bytes", "Most memory in use so far"),
    ("data_wait_ratio", "data_wait", "Share of the step spent waiting for data"),
    ("mfu_ratio", "mfu", "Model FLOP utilisation against the measured matrix-product peak"),
)
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Prometheus:
    """Serves 26 metrics at ``http://ADDRESS:PORT/metrics``; all names begin with ``posttrain_train_``.

    Counters begin at zero in each process, as Prometheus expects. What a step did not measure is NaN.

    Args:
        port: 0 picks a free one; ``self.port`` says which.

    Raises:
        UserError: prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        client = optional("prometheus_client", "prometheus-client", _WHERE)
        registry = client.CollectorRegistry()
        named = {"namespace": _PREFIX, "registry": registry}
        self._gauges = {attribute: client.Gauge(name, text, **named) for name, attribute, text in _GAUGES}
        for gauge in self._gauges.values():
            gauge.set(math.nan)
        self._lowest = client.Gauge("lowest_loss", "Lowest loss of a step in this process", **named)
        self._lowest.set(math.inf)
        self._group = client.Gauge("group_gradient_norm", "Gradient norm by layer group", ["group"], **named)
        self._metric = client.Gauge("objective_metric", "What the objective measured besides", ["name"], **named)
        self._phase = client.Gauge("phase_seconds", "Time of the last step by phase", ["phase"], **named)
        self._finished = client.Gauge("last_step_timestamp_seconds", "When the last step was over, Unix time", **named)
        self._steps = client.Counter("steps", "Steps in this process", **named)
        self._tokens = client.Counter("tokens", "Tokens without padding in this process", **named)
        self._supervised = client.Counter("supervised_tokens", "Supervised tokens in this process", **named)
        self._waited = client.Counter("data_wait_seconds", "Time spent waiting for data in this process", **named)
        self._findings = client.Counter("findings", "What the detectors found", ["kind"], **named)
        self._decisions = client.Counter("decisions", "What was done about it", ["action"], **named)
        self._seconds = client.Histogram("step_seconds", "Wall time of the steps", buckets=_BUCKETS, **named)
        for kind in KINDS:
            self._findings.labels(kind)
        for action in ACTIONS:
            self._decisions.labels(action)
        try:
            self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            what = f"{address}:{port} cannot be served ({error.strerror})"
            raise UserError(what, where=_WHERE, fix="name another port, or 0 for a free one") from None
        self.port: int = self._server.server_port
        self._best = math.inf

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        for attribute, gauge in self._gauges.items():
            value = getattr(values, attribute)
            gauge.set(math.nan if value is None else value)
        if values.loss < self._best:
            self._best = values.loss
            self._lowest.set(values.loss)
        for group, norm in values.group_norms.items():
            self._group.labels(group).set(norm)
        for name, number in values.metrics.items():
            self._metric.labels(name).set(number)
        for phase, seconds in values.phases.items():
            self._phase.labels(phase).set(seconds)
        self._finished.set(time.time())
        self._steps.inc()
        self._tokens.inc(values.tokens)
        self._supervised.inc(values.supervised_tokens)
        self._waited.inc(values.data_wait * values.seconds)
        self._seconds.observe(values.seconds)
        for decision in decisions:
            self._findings.labels(decision.finding.kind).inc()
            self._decisions.labels(decision.action).inc()

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        """Nothing: a server keeps what it has read."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
