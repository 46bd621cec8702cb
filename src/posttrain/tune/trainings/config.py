"""The section ``tune`` of a config: what to search over trainings, and how a trained model is measured."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS
from posttrain.jobs.runner import SILENCE
from posttrain.store.amounts import BYTES, COUNTS, read_amount
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.budget import Budget
from posttrain.tune.objectives import COSTS, Objective, Objectives, read_objectives
from posttrain.tune.spaces import READY_KEY, expand, values_of
from posttrain.tune.trainings.settings import OBJECTIVE_KEY

LOSS = "loss"
"""The metric that is computed of log-likelihoods: nats per token of the answers, or per record with a label set."""

SHAPE_KEYS = ("train.prune.", "train.shape.")
"""The beginnings of the keys that decide the shape of the model that is trained."""

VALUE_NAMES = {
    "records": "labels of the round's training set",
    "tuned_records": "labels of the training set when settings were last tuned; 0 before",
    "rounds_since_tuning": "rounds since settings were last tuned, 1 in the round after; infinite before",
}
"""Names in the rule that starts a search in a round, besides those of drift."""

PREFERENCE_ACCURACY = "preference_accuracy"
"""The default metric of objectives on pairs: the share of pairs whose better answer the model prefers."""

_PREFERENCE = "preference"  # its scorer

MODEL_COSTS = ("parameters", "adapter_parameters", "model_bytes", "latency")
"""Objectives that are properties of the trained model, and no metrics of a scorer; all but ``latency`` follow from its
shape."""

TRAINING_COSTS = ("memory_bytes", "gpu_memory_bytes")
"""The costs of a training that may be limited: the most memory that its process has in use."""

_LIMITS: dict[str, Mapping[str, int]] = {
    **dict.fromkeys(("parameters", "adapter_parameters"), COUNTS),
    **dict.fromkeys(("model_bytes", *TRAINING_COSTS), BYTES),
    "latency": {},
}
"""What may be limited, and the units of its amount."""

_LEAST = frozenset({LOSS, "perplexity", "invalid_rate", "ece", "mean_absolute_error", *COSTS, *MODEL_COSTS})

_BY_LABELS, _BY_TEXT = ("label_likelihood", "exact_match"), ("exact_match", "preference", "perplexity", "token_f1")


LEAST_HELD_OUT = 5
"""Records that a search measures on, at least: the loss of fewer is that of chance."""


class HeldOutConfig(SuiteConfig):
    """The records that trained models are measured on, and the scorer of their answers."""

    data: str = Field(description="A file of records, or a share of the training data, such as 10%.")

    @property
    def share(self) -> float | None:
        """The share of the training data to hold out; None for a file."""
        if not self.data.endswith("%"):
            return None
        try:
            return float(self.data[:-1]) / 100
        except ValueError:
            return None

    @field_validator("data")
    @classmethod
    def _share_fits(cls, data: str) -> str:
        if data.endswith("%"):
            try:
                share = float(data[:-1])
            except ValueError:
                return data  # a file's name
            if not 0 < share <= 50:
                raise ValueError("a share of more than 0% and at most 50% can be held out")
        return data


class TuneConfig(Section):
    """Searches the best settings of trainings."""

    space: dict[str, Any] = Field(
        description="What to search, by key, such as train.learning_rate; or auto, or names of ready spaces."
    )
    constraints: list[str] = Field(default=[], description="Formulas that all settings must meet.")
    held_out: HeldOutConfig = Field(description="What models are measured on; a file, or a share, is enough.")
    metric: str = Field(
        default=LOSS,
        description="What is measured: loss, or a metric of the scorer; with an objective on pairs and no label set "
        "preference_accuracy by default.",
    )
    objectives: list[str | dict[str, Any]] = Field(
        default=[],
        description="In place of metric, one or several: names, or {metric, maximize, limit}; also seconds, tokens, "
        "memory_bytes, gpu_memory_bytes, parameters, adapter_parameters, model_bytes and latency.",
    )
    choose: str = Field(
        default="knee",
        description="Of several objectives: which trial of the front is the best: knee, or such as loss within 1%.",
    )
    limits: dict[str, float] = Field(
        default={},
        description="The most that a model or its training may have or take, such as {parameters: 100M}: parameters, "
        "adapter_parameters, model_bytes, latency, memory_bytes, gpu_memory_bytes.",
    )
    budget: str | int | None = Field(default=None, description="What it may spend, such as 50 trials, 2h.")
    sampler: str | dict[str, Any] | None = Field(
        default=None,
        description="What proposes settings: a name, or one with options; null: auto, or the scheduler's own.",
    )
    scheduler: str | dict[str, Any] = Field(
        default="none",
        description="Decides which trainings continue; its max_resource is the number of parts of a training.",
    )
    one_shot: bool = Field(
        default=False,
        description="Train once an adapter whose sub-networks share its weights, and measure these (arXiv:1904.00420).",
    )
    initial: list[dict[str, Any]] = Field(
        default=[], description="Points of the space that are tried first, such as {train.learning_rate: 0.001}."
    )
    warm_start: str | list[str] | None = Field(
        default=None,
        description="Earlier studies to start from: a folder of studies, or a list; a round takes those before it.",
    )
    when: str = Field(
        default="drift.psi > 0.25 or records >= 1.5 * tuned_records",
        description="In a loop: the rule by which a round searches; without it the last settings hold.",
    )
    storage: str | None = Field(
        default=None,
        description="URL of a PostgreSQL database in place of study.db, such as postgresql://user:${PASSWORD}@host/name.",
    )
    silence: float = Field(
        default=SILENCE,
        gt=0,
        description="Seconds without a step after which a training counts as hanging; not inline.",
    )
    engine: str = Field(default="inline", description="inline; processes, ray or slurm: several trials at a time.")
    workers: int | None = Field(default=None, ge=1, description="Trials at a time; null: one per core.")

    @field_validator("space", mode="before")
    @classmethod
    def _names_are_enough(cls, value: Any) -> Any:
        return {READY_KEY: value} if isinstance(value, str | list) else value

    @field_validator("limits", mode="before")
    @classmethod
    def _read_limits(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: _read_limit(name, value) for name, value in values.items()}

    @field_validator("held_out", mode="before")
    @classmethod
    def _data_is_enough(cls, value: Any) -> Any:
        if isinstance(value, float | int) and not isinstance(value, bool):
            value = f"{100 * value:g}%"
        return {"data": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _metric_or_objectives(self) -> Self:
        if self.objectives and "metric" in self.model_fields_set:
            raise ValueError("there are objectives, which take the place of metric")
        return self

    def for_training(self, train: TrainConfig, has_labels: bool) -> "TuneConfig":
        """Returns the section for a training: entries replace the names of ready spaces, and its metric the default.

        Objectives on pairs may lower the likelihood of the better answer, too (A. Pal et al., Smaug, 2024,
        arXiv:2402.13228): by its loss a search would favour little training, so that their default is the accuracy of
        the preferences. `preference_margin` has fewer ties, but grows as long as the model is trained, also where it
        orders no more pairs rightly. With a label set the loss is that of the label among the others, which pairs
        lower.

        Raises:
            UserError: there is no such ready space, or the training has nothing of what it searches.
        """
        space = expand(self.space, method=train.method, objective=train.objective.name, where="tune.space")
        changes: dict[str, Any] = {"space": space}
        has_default = not self.objectives and "metric" not in self.model_fields_set
        if has_default and not has_labels and self.held_out.scorer in (None, _PREFERENCE):
            names = values_of(space, OBJECTIVE_KEY, train.objective.name, "tune.space")
            if any(name in OBJECTIVES and OBJECTIVES[name].shape in ("pair", "labelled") for name in names):
                changes["metric"] = PREFERENCE_ACCURACY
        return self.model_copy(update=changes)

    def read_budget(self, budget: str | None = None) -> Budget:
        """Reads the budget, or the one of the command line in its place.

        Raises:
            UserError: it is not a budget.
        """
        return Budget.read(self.budget, "tune.budget") if budget is None else Budget.read(budget, "--budget")

    @property
    def searched(self) -> Objectives:
        """The objectives of the study.

        Raises:
            UserError: an objective or the rule of choice cannot be used.
        """
        if not self.objectives:
            return Objectives((Objective(f"held-out {self.metric}", self.metric not in _LEAST),))
        costs = (*COSTS, *MODEL_COSTS)
        return read_objectives(self.objectives, self.choose, "tune.objectives", lambda name: name not in _LEAST, costs)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values that are measured of a trained model: the metric, or those of the objectives."""
        return self.searched.measured if self.objectives else (self.metric,)

    def suite(self, has_labels: bool) -> SuiteConfig:
        """Returns the suite that has the metric, or those of all objectives.

        Raises:
            UserError: the scorer has no such metric, or no scorer has, or it is a cost of the model.
        """
        if self.metrics[0] in MODEL_COSTS and not self.objectives:
            what = f"only {self.metric}: what a model costs is least if it can do nothing"
            raise UserError(what, where="tune.metric", fix="set tune.limits, or name it in tune.objectives with others")
        scored = [name for name in self.metrics if name not in MODEL_COSTS]
        if self.held_out.scorer is not None:
            if self.held_out.scorer not in SCORERS:
                what = f"there is no scorer `{self.held_out.scorer}`"
                raise UserError(what, where="tune.held_out.scorer", fix=suggest(self.held_out.scorer, SCORERS))
            candidates: tuple[str, ...] = (self.held_out.scorer,)
        elif LOSS in self.metrics:
            candidates = ("label_likelihood" if has_labels else "perplexity",)
        else:
            candidates = _BY_LABELS if has_labels else _BY_TEXT
        known: dict[str, frozenset[str]] = {}
        for name in candidates:
            metrics = SCORERS[name].metrics | (SCORERS[name].label_metrics if has_labels else frozenset())
            known[name] = metrics | ({LOSS} if "log_likelihood_sum" in metrics else frozenset())
            if known[name].issuperset(scored):
                return self.held_out.model_copy(update={"scorer": name})
        where = "tune.objectives" if self.objectives else "tune.metric"
        every = sorted(frozenset().union(*known.values()))
        for metric in scored:
            if metric not in every:
                raise UserError(f"there is no metric `{metric}` here", where=where, fix=suggest(metric, every))
        what = f"no scorer measures all of {', '.join(scored)}"
        raise UserError(what, where=where, fix="leave some out")


def _read_limit(name: Any, value: Any) -> float:
    """Reads a limit, which may have a unit, such as 100M."""
    if name not in _LIMITS:
        raise ValueError(f"`{name}` cannot be limited; {suggest(str(name), _LIMITS)}")
    units = _LIMITS[name]
    amount = read_amount(value, units) if isinstance(value, str) else (value, "")
    limit = None if amount is None or isinstance(value, bool) else amount[0] * units.get(amount[1], 1)
    if not isinstance(limit, int | float) or not limit > 0:
        fix = f"such as 100M, in {', '.join(units)}" if units else "seconds"
        raise ValueError(f"{name}: `{value}` is not an amount; give {fix}")
    return float(limit)


class TuneJobConfig(TrainJobConfig):
    """A file that names a training, and what to search over it."""

    tune: TuneConfig = Field(description="What to search.")

    @field_validator("tune")
    @classmethod
    def _defaults_of_the_training(cls, tune: TuneConfig, info: ValidationInfo) -> TuneConfig:
        train, task = info.data.get("train"), info.data.get("task")  # absent where it is wrong
        return tune if train is None or task is None else tune.for_training(train, bool(task.labels))

    @property
    def training(self) -> TrainJobConfig:
        """The training alone."""
        return TrainJobConfig.model_construct(**{name: getattr(self, name) for name in TrainJobConfig.model_fields})
