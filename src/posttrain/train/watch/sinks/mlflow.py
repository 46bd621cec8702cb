"""An MLflow tracking server, or its database file."""

import os
import time
from collections.abc import Mapping, Sequence

from posttrain.store.errors import UserError
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.sinks.base import first_line, optional
from posttrain.train.watch.values import StepValues

_WHERE = "train.sinks.mlflow"
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A server that is away must not hold the training up for minutes, which is MLflow's default.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_SECONDS = 5.0  # between two sendings: a request a step would slow fast steps down
_MOST = 1000  # metrics that MLflow takes at once


class MLflow:
    """Metrics by step, decisions as tags. A run of the same name in the experiment is gone on with.

    Args:
        uri: the tracking URI.
        run: the run's name.

    Raises:
        UserError: mlflow is not installed, or the server cannot be reached.
    """

    def __init__(self, uri: str, experiment: str, run: str) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        library = optional("mlflow", "mlflow", _WHERE)
        self._entities = library.entities
        try:
            self._client = library.MlflowClient(tracking_uri=uri)
            self._run = self._find(experiment, run)
        except library.exceptions.MlflowException as error:
            what = f"{uri} cannot be used ({first_line(error)})"
            raise UserError(what, where=_WHERE, fix="check the tracking URI") from None
        self._metrics: list[object] = []
        self._sent = time.monotonic()

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(*item, now, values.step) for item in values.numbers().items()]
        for decision in decisions:
            self._client.set_tag(self._run, f"decision.{values.step}.{decision.finding.kind}", decision.line())
        if len(self._metrics) >= _MOST or time.monotonic() - self._sent >= _SECONDS:
            self._send()

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        """Nothing: MLflow keeps every value of a step and shows the last."""

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._run)

    def _find(self, experiment: str, name: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        where = known.experiment_id if known else self._client.create_experiment(experiment)
        quoted = name.replace("'", "")
        for found in self._client.search_runs([where], f"attributes.run_name = '{quoted}'", max_results=1):
            self._client.update_run(found.info.run_id, status="RUNNING")
            return str(found.info.run_id)
        return str(self._client.create_run(where, run_name=quoted).info.run_id)

    def _send(self) -> None:
        for start in range(0, len(self._metrics), _MOST):
            self._client.log_batch(self._run, metrics=self._metrics[start : start + _MOST])
        self._metrics.clear()
        self._sent = time.monotonic()
