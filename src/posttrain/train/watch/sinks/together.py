"""Several sinks as one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from posttrain.train.watch.findings import Decision
from posttrain.train.watch.sinks.base import Sink, first_line
from posttrain.train.watch.sinks.config import SinksConfig
from posttrain.train.watch.sinks.jsonl import JsonLines
from posttrain.train.watch.sinks.mlflow import MLflow
from posttrain.train.watch.sinks.prometheus import Prometheus
from posttrain.train.watch.sinks.tensorboard import TensorBoard
from posttrain.train.watch.sinks.wandb import WeightsAndBiases
from posttrain.train.watch.values import StepValues

log = logging.getLogger("posttrain")


class Together:
    """One sink that must not fail and others that may: one of these that does is named, closed and left out.

    Args:
        own: the workspace's file; its errors are raised.
        others: by a name for the log.
    """

    def __init__(self, own: Sink, others: dict[str, Sink]) -> None:
        self._own, self._others = own, others

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        self._own.write(values, decisions)
        self._each(lambda sink: sink.write(values, decisions))

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        self._own.rewind(steps, told)
        self._each(lambda sink: sink.rewind(steps, told))

    def close(self) -> None:
        self._own.close()
        self._each(lambda sink: sink.close())
        self._others.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._others.items()):
            if (problem := _problem(sink, call)) is not None:
                log.warning("the sink %s failed (%s) and gets nothing more", name, problem)
                del self._others[name]
                _problem(sink, lambda failed: failed.close())


def open_sinks(config: SinksConfig, path: Path, *, run: str) -> Together:
    """Open ``path`` and every sink that the config names.

    Args:
        path: the file of JSON lines.
        run: what the training is called elsewhere; the same name goes on with the same run.

    Raises:
        UserError: a package is missing, or something cannot be opened. The file is untouched then.
    """
    others: dict[str, Sink] = {}
    with ExitStack() as opened:
        for name, make in _makers(config, run).items():
            others[name] = make()
            opened.callback(others[name].close)
        own = JsonLines(path)
        opened.pop_all()
    return Together(own, others)


def _makers(config: SinksConfig, run: str) -> dict[str, Callable[[], Sink]]:
    makers: dict[str, Callable[[], Sink]] = {}
    if (port := config.prometheus) is not None:
        makers["prometheus"] = lambda: _served(port, config.prometheus_address)
    if (folder := config.tensorboard) is not None:
        makers["tensorboard"] = lambda: TensorBoard(Path(folder).expanduser())
    if (uri := config.mlflow) is not None:
        makers["mlflow"] = lambda: MLflow(uri, config.mlflow_experiment, run)
    if (project := config.wandb) is not None:
        makers["wandb"] = lambda: WeightsAndBiases(project, run)
    return makers


def _served(port: int, address: str) -> Prometheus:
    sink = Prometheus(port, address)
    log.info("  metrics for Prometheus at http://%s:%d/metrics", address, sink.port)
    return sink


def _problem(sink: Sink, call: Callable[[Sink], None]) -> str | None:
    try:
        call(sink)
    except Exception as error:  # noqa: BLE001 - what a foreign service raises must not end a training
        return f"{type(error).__name__}: {first_line(error)}"
    return None
