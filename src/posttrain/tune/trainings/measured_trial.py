"""The base of trials that train models: their data, their measurement on held-out records, and their limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.suite import SuiteResult, run_suite
from posttrain.jobs.memory import peak_memory
from posttrain.models.language_model import LanguageModel
from posttrain.train.config import TrainConfig
from posttrain.tune.objectives import Measured
from posttrain.tune.trainings.config import LOSS, MODEL_COSTS, TRAINING_COSTS
from posttrain.tune.trainings.model_costs import check_limits, measure_model_latency, shape_costs


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial:
    """A function of a study whose trials are models that are measured on held-out records.

    Args:
        base: the config as JSON values, which a trial's settings are laid over.
        model: the source of the initial model.
        records: RECORD rows to train on.
        held_out: RECORD rows to measure on.
        suite: the scorer of the answers.
        metrics: what is measured.
        limits: the most that a model may have or take, by names of `MODEL_COSTS` and `TRAINING_COSTS`.
    """

    base: Mapping[str, Any]
    model: str
    records: pa.Table
    held_out: pa.Table
    suite: SuiteConfig
    metrics: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)

    def shape_costs(self, train: TrainConfig) -> dict[str, float]:
        """Returns the costs that follow from a model's shape; empty where none is asked for.

        Raises:
            Infeasible: the model is over a limit.
        """
        names = {*self.metrics, *self.limits}.intersection(MODEL_COSTS)
        costs = shape_costs(Path(self.model), train) if names else {}
        check_limits(costs, self.limits)
        return costs

    def measure(self, shape_costs: Mapping[str, float], lm: LanguageModel) -> Measured:
        """Returns the metrics of a model, of several a list.

        Args:
            shape_costs: the costs that follow from its shape.
            lm: the model.
        """
        costs = dict(shape_costs)
        if "latency" in self.metrics:
            costs["latency"] = measure_model_latency(lm, self.held_out)
        result = run_suite(lm, self.held_out, self.suite, "held_out")
        values = [costs[name] if name in MODEL_COSTS else metric_value(result, name) for name in self.metrics]
        return values[0] if len(values) == 1 else values

    def check_latency(self, load: Callable[[], LanguageModel]) -> None:
        """Raises `Infeasible` if the latency of a model is over its limit; loads none where there is no limit."""
        if "latency" in self.limits:
            check_limits({"latency": measure_model_latency(load(), self.held_out)}, self.limits)

    def check_memory(self) -> None:
        """Raises `Infeasible` if this process has had more memory in use than the limit since its trial began."""
        check_limits(dict(zip(TRAINING_COSTS, map(float, peak_memory()), strict=True)), self.limits)


def metric_value(result: SuiteResult, metric: str) -> float:
    """Returns a metric of a suite's result; of ``loss`` the mean negative log-likelihood, in nats.

    It is that of a token where the suite counts tokens, else that of a record.
    """
    if metric != LOSS:
        return result.metrics[metric]
    count = result.counts.get("tokens", result.counts["records"])
    return -result.counts["log_likelihood_sum"] / max(1.0, count)
