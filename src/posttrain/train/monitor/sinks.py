"""Sinks for Prometheus, TensorBoard, MLflow and Weights & Biases, and all sinks of a config as one."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder
from posttrain.store.hashing import digest
from posttrain.store.installation import install_command
from posttrain.train.monitor.config import SinksConfig
from posttrain.train.monitor.decisions import ACTIONS, KINDS, MonitorDecision
from posttrain.train.monitor.metrics import JsonlSink, MultiSink, Sink, StepValues, first_error_line

log = logging.getLogger("posttrain")

_PROMETHEUS_KEY = "train.sinks.prometheus"

_PROMETHEUS_NAMESPACE = "posttrain_train"

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

_MLFLOW_KEY = "train.sinks.mlflow"

_MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A server that is away must not hold the training up for minutes, which is MLflow's default.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

_MLFLOW_INTERVAL = 5.0  # between two sendings: a request a step would slow fast steps down

_MLFLOW_BATCH = 1000  # metrics that MLflow takes at once

_WANDB_KEY = "train.sinks.wandb"

_WANDB_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def import_optional(module: str, package: str, where: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: pip's name of it.
        where: the config key that needs it.

    Raises:
        UserError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        what = f"needs a package that is not installed ({error})"
        raise UserError(what, where=where, fix=install_command(package)) from None


def open_sinks(config: SinksConfig, path: Path, *, run: str) -> MultiSink:
    """Opens ``path`` and every sink that the config names.

    Args:
        path: the file of JSON lines.
        run: the name of the run in trackers; a run of the same name is resumed.

    Raises:
        UserError: a package is missing, or something cannot be opened. The file is untouched then.
    """
    others: dict[str, Sink] = {}
    # The trackers first: where one cannot be opened, the file stays untouched and all others are closed.
    with ExitStack() as opened:
        for name, make in _sink_factories(config, run).items():
            others[name] = make()
            opened.callback(others[name].close)
        own = JsonlSink(path)
        opened.pop_all()
    return MultiSink(own, others)


def _sink_factories(config: SinksConfig, run: str) -> dict[str, Callable[[], Sink]]:
    makers: dict[str, Callable[[], Sink]] = {}
    if (port := config.prometheus) is not None:
        makers["prometheus"] = lambda: _open_prometheus(port, config.prometheus_address)
    if (folder := config.tensorboard) is not None:
        makers["tensorboard"] = lambda: TensorBoardSink(Path(folder).expanduser())
    if (uri := config.mlflow) is not None:
        makers["mlflow"] = lambda: MLflowSink(uri, config.mlflow_experiment, run)
    if (project := config.wandb) is not None:
        makers["wandb"] = lambda: WandbSink(project, run)
    return makers


class PrometheusSink:
    """Serves 26 metrics at ``http://ADDRESS:PORT/metrics``; all names begin with ``posttrain_train_``.

    Counters begin at zero in each process, as Prometheus expects. What a step did not measure is NaN.

    Args:
        port: 0 picks a free one; ``self.port`` says which.

    Raises:
        UserError: prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        client = import_optional("prometheus_client", "prometheus-client", _PROMETHEUS_KEY)
        registry = client.CollectorRegistry()
        named = {"namespace": _PROMETHEUS_NAMESPACE, "registry": registry}
        self._gauges = {attribute: client.Gauge(name, text, **named) for name, attribute, text in _GAUGES}
        for gauge in self._gauges.values():
            gauge.set(math.nan)  # not 0, which would look like a measurement
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
        # Every label starts at 0, so that rates are right from the first event on.
        for kind in KINDS:
            self._findings.labels(kind)
        for action in ACTIONS:
            self._decisions.labels(action)
        try:
            self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            what = f"{address}:{port} cannot be served ({error.strerror})"
            raise UserError(what, where=_PROMETHEUS_KEY, fix="name another port, or 0 for a free one") from None
        self.port: int = self._server.server_port
        self._best = math.inf

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        for attribute, gauge in self._gauges.items():
            value = getattr(values, attribute)
            # Prometheus has no None; NaN leaves a gap in the graph.
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

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        """Nothing: a server keeps what it has read."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _open_prometheus(port: int, address: str) -> PrometheusSink:
    sink = PrometheusSink(port, address)
    log.info("  metrics for Prometheus at http://%s:%d/metrics", address, sink.port)
    return sink


class TensorBoardSink:
    """Scalars by step, decisions as text; steps that were trained again hide those of before.

    Raises:
        UserError: tensorboard is not installed, or the disk refused.
    """

    def __init__(self, folder: Path) -> None:
        self._library = import_optional("torch.utils.tensorboard", "tensorboard", "train.sinks.tensorboard")
        self._folder = folder
        make_folder(folder)
        self._open(None)

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        for name, number in values.numbers().items():
            self._writer.add_scalar(name, number, values.step)
        for decision in decisions:
            self._writer.add_text("decisions", decision.line(), values.step)

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self._writer.close()
        self._open(len(steps))

    def close(self) -> None:
        self._writer.close()

    def _open(self, step: int | None) -> None:
        with disk_errors(self._folder):
            self._writer = self._library.SummaryWriter(str(self._folder), purge_step=step)


class MLflowSink:
    """Metrics by step, decisions as tags. A run of the same name in the experiment is resumed.

    Args:
        uri: the tracking URI.
        run: the run's name.

    Raises:
        UserError: mlflow is not installed, or the server cannot be reached.
    """

    def __init__(self, uri: str, experiment: str, run: str) -> None:
        for name, value in _MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        library = import_optional("mlflow", "mlflow", _MLFLOW_KEY)
        self._entities = library.entities
        try:
            self._client = library.MlflowClient(tracking_uri=uri)
            self._run = self._find(experiment, run)
        except library.exceptions.MlflowException as error:
            what = f"{uri} cannot be used ({first_error_line(error)})"
            raise UserError(what, where=_MLFLOW_KEY, fix="check the tracking URI") from None
        self._metrics: list[object] = []
        self._sent = time.monotonic()

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        # MLflow counts milliseconds.
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(*item, now, values.step) for item in values.numbers().items()]
        for decision in decisions:
            self._client.set_tag(self._run, f"decision.{values.step}.{decision.finding.kind}", decision.line())
        # In batches: a request a step would make training wait for the server.
        if len(self._metrics) >= _MLFLOW_BATCH or time.monotonic() - self._sent >= _MLFLOW_INTERVAL:
            self._send()

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        """Nothing: MLflow keeps every value of a step and shows the last."""

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._run)

    def _find(self, experiment: str, name: str) -> str:
        existing = self._client.get_experiment_by_name(experiment)
        where = existing.experiment_id if existing else self._client.create_experiment(experiment)
        quoted = name.replace("'", "")
        for run in self._client.search_runs([where], f"attributes.run_name = '{quoted}'", max_results=1):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return str(self._client.create_run(where, run_name=quoted).info.run_id)

    def _send(self) -> None:
        for start in range(0, len(self._metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=self._metrics[start : start + _MLFLOW_BATCH])
        self._metrics.clear()
        self._sent = time.monotonic()


class WandbSink:
    """The values of each step, and nothing else of the machine: no code, no console output, no list of packages, no
    system metrics.

    A run of the same name in the project is resumed.

    Raises:
        UserError: wandb is not installed, or refuses (such as without an account).
    """

    def __init__(self, project: str, run: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        library = import_optional("wandb", "wandb", _WANDB_KEY)
        settings = library.Settings(**_WANDB_SETTINGS)
        try:
            self._run = library.init(project=project, name=run, id=digest(run)[:16], resume="allow", settings=settings)
        except library.Error as error:
            raise UserError(first_error_line(error), where=_WANDB_KEY, fix="see `wandb login`") from None
        # An axis of its own: the library drops what is logged for a step before the last, as after a rollback.
        self._run.define_metric("*", step_metric="step")

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        lines = {"decisions": "; ".join(decision.line() for decision in decisions)} if decisions else {}
        self._run.log({"step": values.step, **values.numbers(), **lines})

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        """Nothing: what was logged stays, and what follows is drawn over it."""

    def close(self) -> None:
        self._run.finish()
