"""An ensemble of models: fits its parameters on held-out records, and answers with them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from posttrain.models.calibration import at_temperature, fit_temperature
from posttrain.models.ensembles.cascade import (
    can_answer,
    cascade_point,
    choose_cascade_threshold,
    choose_models,
    cost_curve,
)
from posttrain.models.ensembles.config import EnsembleConfig, normalised_weights
from posttrain.models.ensembles.members import Member, MemberScores, prompt_texts, score_labels
from posttrain.models.ensembles.mixture_gate import MixtureGate, fit_gate
from posttrain.models.ensembles.pooling import POOLS, fit_pool_weights, linear_pool, log_loss
from posttrain.models.generate import Generation
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import write_atomically

Floats = npt.NDArray[np.float64]

FILE = "ensemble.json"


@dataclass(frozen=True)
class FittedParameters:
    """The parameters of an ensemble.

    Attributes:
        weights: one a model, with the sum 1.
        temperatures: one a model, 1 without calibration.
        thresholds: of a cascade, for all models but the last.
        gate: `MixtureGate.to_json`; None without a gate.
        report: what they rest on: ``records``, ``log_loss``, or the fields of `ThresholdChoice`.
    """

    weights: list[float]
    temperatures: list[float]
    thresholds: list[float] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnsembleScores:
    """Answers of an ensemble to N prompts.

    Attributes:
        log_probabilities: float64 [N, K], normalised over the labels.
        answered_by: int64 [N], number of the model that answered; -1 where all did together.
        members: answers of the single models, calibrated where the ensemble is.
    """

    log_probabilities: Floats
    answered_by: npt.NDArray[np.int64]
    members: MemberScores


@dataclass(frozen=True)
class Ensemble:
    """Several models that answer together.

    Args:
        config: the file.
        members: the models, in the order of the file.
        task: the task of all of them.
        parameters: None for those of the file; `fit` returns an ensemble with fitted ones.
    """

    config: EnsembleConfig
    members: Sequence[Member]
    task: TaskConfig
    parameters: FittedParameters | None = None

    def __post_init__(self) -> None:
        if len(self.members) != len(self.config.models):
            raise ValueError(f"{len(self.members)} members for the {len(self.config.models)} models of the file")
        check_task(self.config, self.task)
        if self.parameters is None and not self.config.needs_data:
            thresholds = list(self.config.thresholds or [])
            parameters = FittedParameters(normalised_weights(self.config), [1.0] * len(self.members), thresholds)
            object.__setattr__(self, "parameters", parameters)

    def fit(self, prompts: Sequence[Turns], answers: Sequence[str], ids: Sequence[str]) -> Self:
        """Returns the ensemble with the parameters that its file wants fitted; runs every model on every record.

        Args:
            prompts: N conversations that no model learned from.
            answers: their labels.
            ids: a name of each record, equal for equal records. A calibrated cascade fits temperatures to one half of
                the records and chooses the threshold on the other; which is which hangs on the ids.

        Raises:
            UserError: there are fewer than two records, or a label is not in the task's set.
        """
        config, labels = self.config, self.task.label_set
        if not config.needs_data:
            return self
        if len(prompts) < 2:
            raise UserError(f"{len(prompts)} records are too few to fit anything", where="data", fix="add records")
        position = {label: index for index, label in enumerate(labels)}
        if unknown := [answer for answer in answers if answer not in position]:
            raise UserError(f"label `{unknown[0]}` is not in task.labels", where="data")
        truth = np.array([position[answer] for answer in answers], np.int64)
        scores = self._score_members(prompts, truth.tolist())
        rows = np.arange(len(prompts))
        # The test of thresholds is valid for confidences that do not hang on the records it looks at.
        fitted = rows
        if config.calibrate and config.method == "cascade":
            in_half = np.array([hashlib.sha256(id.encode()).digest()[0] < 128 for id in ids], bool)
            if in_half.all() or not in_half.any():
                raise UserError(f"{len(prompts)} records are too few to fit and to test", where="data")
            fitted, rows = rows[in_half], rows[~in_half]
        temperatures = [1.0] * len(self.members)
        if config.calibrate:
            temperatures = [fit_temperature(logs[fitted], truth[fitted]) for logs in scores.log_probabilities]
        scores = _calibrated(scores, temperatures)
        logs = scores.log_probabilities
        parameters = FittedParameters(normalised_weights(config), temperatures)
        report: dict[str, Any] = {"records": len(rows)}
        if config.method == "cascade":
            parameters = replace(parameters, thresholds=list(config.thresholds or []))
            if config.thresholds is None:
                right = logs[:, rows].argmax(axis=2) == truth[rows]
                choice = choose_cascade_threshold(
                    scores.confidence[:, rows], right, accuracy=config.accuracy, tolerance=config.tolerance
                )
                parameters = replace(parameters, thresholds=[choice.threshold] * (len(self.members) - 1))
                report |= choice.to_json()
        elif config.method == "gate":
            own = logs[:, np.arange(len(truth)), truth]
            gate = fit_gate(self._features(prompts, scores), own)
            parameters = replace(parameters, gate=gate.to_json())
        elif config.weights == "fit":
            parameters = replace(parameters, weights=fit_pool_weights(config.method, logs, truth))  # type: ignore[arg-type]
        ensemble = replace(self, parameters=replace(parameters, report=report))
        if config.method in ("probability", "logit", "gate"):
            report["log_loss"] = log_loss(ensemble._combine(prompts, scores)[0], truth)
            report["log_loss_alone"] = [log_loss(alone, truth) for alone in logs]
        return ensemble

    def label_scores(
        self, prompts: Sequence[Turns], exact: Sequence[int] | None = None, *, all_models: bool = False
    ) -> EnsembleScores:
        """Computes the probability of every label of the task for every prompt.

        Args:
            prompts: N conversations.
            exact: for each prompt a label to follow to its end, however improbable.
            all_models: True to ask every model of a cascade every prompt, as its curve needs; otherwise a model is
                asked only what the cheaper ones before it leave.
        """
        parameters = self._fitted
        if self.config.method == "cascade" and not all_models:
            return self._score_in_turn(prompts, exact)
        scores = _calibrated(self._score_members(prompts, exact), parameters.temperatures)
        logs, answered_by = self._combine(prompts, scores)
        return EnsembleScores(logs, answered_by, scores)

    def generate(self, prompts: Sequence[Turns]) -> list[Generation]:
        """Answers every prompt: a label where the task has a set of them, else a text."""
        if labels := self.task.label_set:
            best = self.label_scores(prompts).log_probabilities.argmax(axis=1)
            return [Generation(labels[index], True) for index in best.tolist()]
        from posttrain.models.ensembles import text_answers

        weights, method = self._fitted.weights, self.config.method
        if method == "vote":
            return text_answers.vote(self.members, weights, prompts)
        if method == "rescore":
            return text_answers.rescore(self.members, weights, prompts)
        assert method in ("probability", "logit"), "the task was checked"
        return text_answers.generate_pooled(method, self.members, weights, prompts)

    def describe(self, scores: EnsembleScores, truth: npt.ArrayLike) -> dict[str, Any]:
        """Reports on an ensemble and its models: accuracy and cost of each alone, and of a cascade the whole curve.

        Args:
            scores: of `label_scores` with ``all_models``, N >= 1.
            truth: int [N], the right labels.

        Returns:
            ``method``, ``models`` (a row each: ``model``, ``weight`` or ``threshold``, ``temperature``, ``accuracy``,
            ``seconds`` and ``flops`` a record), ``fitted`` (what the parameters rest on), and of a cascade ``chosen``
            and ``curve`` (rows of `cost_curve`). Seconds are measured, so no two runs give the same.
        """
        parameters, members = self._fitted, scores.members
        right = members.log_probabilities.argmax(axis=2) == np.asarray(truth, np.int64)
        seconds = members.seconds / right.shape[1]
        rows: list[dict[str, Any]] = []
        for number, member in enumerate(self.members):
            row: dict[str, Any] = {"model": member.name, "temperature": parameters.temperatures[number]}
            if self.config.method == "cascade":
                row["threshold"] = [*map(_threshold, parameters.thresholds), None][number]
            elif self.config.method != "gate":
                row["weight"] = parameters.weights[number]
            row |= {"accuracy": float(right[number].mean()), "seconds": float(seconds[number])}
            rows.append({**row, "flops": float(members.flops[number].mean())})
        report: dict[str, Any] = {"method": self.config.method, "models": rows, "fitted": parameters.report}
        if self.config.method == "cascade":
            thresholds = parameters.thresholds
            report["chosen"] = cascade_point(scores.answered_by, thresholds, right, members.flops, seconds)
            report["curve"] = cost_curve(members.confidence, right, members.flops, seconds)
        return report

    def save(self, folder: Path) -> None:
        """Writes the file and the parameters, but no model, into a folder."""
        values = {"config": self.config.model_dump(mode="json"), "parameters": asdict(self._fitted)}
        write_atomically(folder / FILE, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path, members: Sequence[Member], task: TaskConfig) -> Self:
        """Reads what `save` wrote, around models that are given.

        Raises:
            WorkError: the folder holds no ensemble.
        """
        config = read_config(folder)
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return cls(config, members, task, FittedParameters(**values["parameters"]))

    @property
    def _fitted(self) -> FittedParameters:
        if self.parameters is None:
            raise ValueError("the ensemble's parameters are not fitted; call fit")
        return self.parameters

    def _score_members(self, prompts: Sequence[Turns], exact: Sequence[int] | None) -> MemberScores:
        labels = self.task.label_set
        results = [score_labels(member, prompts, labels, exact) for member in self.members]
        logs, seconds, flops = zip(*results, strict=True)
        return MemberScores(np.stack(logs), np.array(seconds), np.stack(flops))

    def _score_in_turn(self, prompts: Sequence[Turns], exact: Sequence[int] | None) -> EnsembleScores:
        parameters, labels = self._fitted, self.task.label_set
        models, count = len(self.members), len(prompts)
        logs = np.full((models, count, len(labels)), np.nan)
        seconds, flops = np.zeros(models), np.zeros((models, count))
        answered_by = np.full(count, models - 1, np.int64)
        rest = np.arange(count)
        for number, member in enumerate(self.members):
            threshold = [*parameters.thresholds, 0.0][number]
            if not len(rest) or not can_answer(threshold):
                continue
            own = None if exact is None else [exact[row] for row in rest.tolist()]
            scored, seconds[number], flops[number, rest] = score_labels(
                member, [prompts[row] for row in rest.tolist()], labels, own
            )
            logs[number, rest] = at_temperature(scored, parameters.temperatures[number])
            confidence = np.minimum(np.exp(logs[number, rest].max(axis=1)), 1.0)
            sure = confidence >= threshold
            answered_by[rest[sure]] = number
            rest = rest[~sure]
        scores = MemberScores(logs, seconds, flops)
        return EnsembleScores(logs[answered_by, np.arange(count)], answered_by, scores)

    def _combine(self, prompts: Sequence[Turns], scores: MemberScores) -> tuple[Floats, npt.NDArray[np.int64]]:
        parameters, logs = self._fitted, scores.log_probabilities
        count = logs.shape[1]
        together = np.full(count, -1, np.int64)
        if self.config.method == "cascade":
            chosen = choose_models(scores.confidence, parameters.thresholds)
            return logs[chosen, np.arange(count)], chosen
        if self.config.method == "gate":
            assert parameters.gate is not None, "the gate is fitted"
            gate = MixtureGate.from_json(parameters.gate)
            return linear_pool(logs, gate(self._features(prompts, scores))), together
        return POOLS[self.config.method](logs, parameters.weights), together

    def _features(self, prompts: Sequence[Turns], scores: MemberScores) -> npt.NDArray[Any]:
        """Returns what the gate sees, float [N, D]."""
        if self.config.features == "probabilities":
            first: npt.NDArray[Any] = np.exp(scores.log_probabilities[0])
            return first
        from posttrain.models.embedder import Embedder

        return Embedder.load(self.config.embedder).embed(prompt_texts(prompts))


def read_config(folder: Path) -> EnsembleConfig:
    """Reads the config of an ensemble that `Ensemble.save` wrote.

    Raises:
        WorkError: the folder holds no ensemble.
    """
    try:
        return EnsembleConfig.read(json.loads((folder / FILE).read_text(encoding="utf-8"))["config"], str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WorkError(f"{folder} holds no readable ensemble: {error}") from error


def check_task(config: EnsembleConfig, task: TaskConfig) -> None:
    """Checks that the method can answer the task.

    Raises:
        UserError: it cannot.
    """
    has_labels = bool(task.label_set)
    if has_labels and config.method == "rescore":
        fix = "use `logit`, which is the same over a closed set"
        raise UserError("rescore is of free text, and task.labels is a closed set", where="method", fix=fix)
    if not has_labels and (config.method in ("cascade", "gate") or config.needs_data):
        what = config.method if config.method in ("cascade", "gate") else "fitting an ensemble"
        raise UserError(f"{what} needs a closed label set", where="method", fix="set task.labels")


def _calibrated(scores: MemberScores, temperatures: Sequence[float]) -> MemberScores:
    logs = [at_temperature(own, factor) for own, factor in zip(scores.log_probabilities, temperatures, strict=True)]
    return replace(scores, log_probabilities=np.stack(logs))


def _threshold(value: float) -> float | None:
    return value if can_answer(value) else None
