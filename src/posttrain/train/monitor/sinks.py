"""Sinks for Prometheus, TensorBoard, MLflow and Weights & Biases, and all sinks of a config as one."""

import logging
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
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import JsonlSink, MultiSink, Sink, StepValues, first_error_line

log = logging.getLogger("posttrain")

_PROMETHEUS_KEY = "train.sinks.prometheus"

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
        makers["mlflow"] = lambda: MLflowSink(uri, "posttrain", run)
    if (project := config.wandb) is not None:
        makers["wandb"] = lambda: WandbSink(project, run)
    return makers


class _KeepingSink:
    """A sink that cannot drop steps: what was written stays, and steps that are trained again follow it."""

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        """Does nothing."""


class PrometheusSink(_KeepingSink):
    """Serves the last step at ``http://ADDRESS:PORT/metrics``: ``posttrain_train_value{name="loss"}`` and others.

    Names are those of `StepValues.numbers`; what a step did not measure is missing. Counters of steps, tokens and
    decisions begin at zero in each process, as Prometheus expects.

    Args:
        port: 0 picks a free one; ``self.port`` says which.

    Raises:
        UserError: prometheus-client is not installed, or the port cannot be used.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        client = import_optional("prometheus_client", "prometheus-client", _PROMETHEUS_KEY)
        registry = client.CollectorRegistry()
        named = {"namespace": "posttrain_train", "registry": registry}
        self._value = client.Gauge("value", "Values of the last step", ["name"], **named)
        self._steps = client.Counter("steps", "Steps in this process", **named)
        self._tokens = client.Counter("tokens", "Tokens without padding in this process", **named)
        self._decisions = client.Counter("decisions", "Decisions of the monitor", ["kind", "action"], **named)
        self._names: set[str] = set()
        try:
            self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            what = f"{address}:{port} cannot be served ({error.strerror})"
            raise UserError(what, where=_PROMETHEUS_KEY, fix="name another port, or 0 for a free one") from None
        self.port: int = self._server.server_port

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        numbers = {"step": values.step, **values.numbers()}
        for name, number in numbers.items():
            self._value.labels(name).set(number)
        for name in self._names - numbers.keys():
            self._value.remove(name)
        self._names = set(numbers)
        self._steps.inc()
        self._tokens.inc(values.tokens)
        for decision in decisions:
            self._decisions.labels(decision.finding.kind, decision.action).inc()

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


class MLflowSink(_KeepingSink):
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


class WandbSink(_KeepingSink):
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

    def close(self) -> None:
        self._run.finish()
