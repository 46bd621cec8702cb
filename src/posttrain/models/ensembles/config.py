"""The file of an ensemble: method, models, weights, and what is fitted on held-out records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.store.yaml_files import read_yaml

FILES = (".yaml", ".yml")
"""Endings of an ensemble's file, which tell it from the name of a model."""


class MemberConfig(Section):
    """One model of an ensemble."""

    model: str = Field(min_length=1)
    embedder: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        return {"model": values} if isinstance(values, str) else values


class EnsembleConfig(Section):
    """An ensemble.

    Attributes:
        method: ``average`` (of the probabilities of labels), ``vote``, ``cascade`` or ``gate``.
        models: one or more; in a cascade the cheapest first. A model is named as in a merge; ``linear`` is the linear
            head on sentence embeddings, and so is a folder that holds one.
        weights: of an average or a vote, one per model; the same for all by default.
        data: a file of records with answers, relative to the ensemble's file, that no model learned from.
        columns: columns of the file, by our name for each.
        suite: the suite of the workspace whose scorer scores free-text answers to ``data``; the first by default.
        thresholds: confidences from which the models of a cascade answer, for all but the last.
        accuracy: the accuracy that a cascade must show on ``data``, in free text its mean score, in place of
            thresholds.
        tolerance: the share of records that a cascade may get wrong where its last model alone is right, in free text
            the mean score that it may lose against the last model, in place of thresholds.
        embedder: the sentence model of the gate: a folder, a Hub id or ``minilm``.
    """

    method: Literal["average", "vote", "cascade", "gate"]
    models: list[MemberConfig] = Field(min_length=1)
    weights: list[float] | None = None
    data: str | None = None
    columns: dict[str, str] | None = None
    suite: str | None = None
    thresholds: list[float] | None = None
    accuracy: float | None = Field(default=None, gt=0, lt=1)
    tolerance: float | None = Field(default=None, gt=0, lt=1)
    embedder: str = "minilm"

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.weights is None:
            return self
        if self.method not in ("average", "vote"):
            raise ValueError(f"{self.method} has no weights; remove `weights`")
        if len(self.weights) != len(self.models):
            raise ValueError(f"{len(self.weights)} weights for {len(self.models)} models")
        if min(self.weights) < 0 or not 0 < sum(self.weights) < math.inf:
            raise ValueError("weights are 0 or more, and one of them is above 0")
        return self

    @model_validator(mode="after")
    def _thresholds_fit(self) -> Self:
        choices = [name for name in ("thresholds", "accuracy", "tolerance") if getattr(self, name) is not None]
        if self.method != "cascade":
            if choices:
                raise ValueError(f"`{choices[0]}` is of method cascade, and this is {self.method}")
            return self
        if len(choices) != 1:
            raise ValueError("a cascade needs one of `thresholds`, `accuracy` and `tolerance`")
        if self.thresholds is not None:
            if len(self.thresholds) != len(self.models) - 1:
                raise ValueError(f"{len(self.thresholds)} thresholds for {len(self.models)} models: the last has none")
            if min(self.thresholds, default=0.0) < 0:
                raise ValueError("a threshold is 0 or more")
        return self

    @model_validator(mode="after")
    def _data_fit(self) -> Self:
        if self.needs_data and self.data is None:
            raise ValueError("`data` is needed: a file of records with answers that no model learned from")
        # A file without a use is a mistake that nothing else would show.
        for key in ("data", "suite"):
            if getattr(self, key) is not None and not self.needs_data:
                raise ValueError(f"nothing is fitted, so `{key}` has no use; remove it")
        return self

    @property
    def needs_data(self) -> bool:
        """True if held-out records fit a gate or choose a threshold."""
        return self.method == "gate" or self.accuracy is not None or self.tolerance is not None

    @classmethod
    def load(cls, file: str | Path, name: str | None = None) -> Self:
        """Reads a file.

        Args:
            file: the file.
            name: its name in errors; the path by default.

        Raises:
            UserError: there is no such file, or a key or value is wrong.
        """
        where, file = name or str(file), Path(file)
        if not file.is_file():
            raise UserError("no such file", where=where, fix="check the path")
        values: Mapping[str, Any] = read_yaml(file)
        return cls.read(values, where)


def check_task(config: EnsembleConfig, has_labels: bool, name: str | None = None) -> None:
    """Checks that the method can answer the task.

    Args:
        config: the file.
        has_labels: whether the task has a closed label set.
        name: the file's name in errors.

    Raises:
        UserError: it cannot.
    """
    if has_labels and config.suite is not None:
        key, what, fix = "suite", "is of free text, and task.labels is a closed set", "remove it"
    elif not has_labels and config.method == "average":
        key, what, fix = "method", "averages probabilities of labels", "use vote, cascade or gate, or set task.labels"
    else:
        return
    raise UserError(what, where=f"{name}: {key}" if name else key, fix=fix)


@dataclass(frozen=True)
class FittedParameters:
    """The parameters of an ensemble.

    Attributes:
        weights: one per model, with the sum 1.
        thresholds: of a cascade, for all models but the last.
        gate: `MixtureGate.to_json`; None without a gate.
        report: what they rest on: ``records``, ``log_loss``, or the fields of `ThresholdChoice`; of free text
            ``score_alone``, the mean score of each model.
    """

    weights: list[float]
    thresholds: list[float] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    report: dict[str, Any] = field(default_factory=dict)


def normalised_weights(config: EnsembleConfig) -> list[float]:
    """Returns the weights of the file, which add up to 1; equal ones where it has none."""
    weights = config.weights or [1.0] * len(config.models)
    total = math.fsum(weights)
    return [weight / total for weight in weights]
