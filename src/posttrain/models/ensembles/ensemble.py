"""An ensemble of models: fits its parameters on held-out records, and answers with them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from posttrain.models.calibration import at_temperature, fit_temperature
from posttrain.models.ensembles import text_answers
from posttrain.models.ensembles.cascade import can_answer, choose_cascade_threshold, choose_models
from posttrain.models.ensembles.config import EnsembleConfig, FittedParameters, check_task, normalised_weights
from posttrain.models.ensembles.members import Member, MemberScores, MemberTexts, score_labels
from posttrain.models.ensembles.mixture_gate import MixtureGate, fit_gate
from posttrain.models.ensembles.pooling import MIN_LOG_PROBABILITY, POOLS, fit_pool_weights, linear_pool, log_loss
from posttrain.models.ensembles.report import describe_ensemble
from posttrain.models.ensembles.text_routing import (
    AnswerScore,
    EnsembleTexts,
    answer_by_gate,
    answer_in_turn,
    embed_prompts,
    exact_match,
    score_members,
)
from posttrain.models.generate import Generation
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import write_atomically

Floats = npt.NDArray[np.float64]

FILE = "ensemble.json"


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
        check_task(self.config, bool(self.task.label_set))
        if self.parameters is None and not self.config.needs_data:
            thresholds = list(self.config.thresholds or [])
            parameters = FittedParameters(normalised_weights(self.config), [1.0] * len(self.members), thresholds)
            object.__setattr__(self, "parameters", parameters)

    def fit(
        self,
        prompts: Sequence[Turns],
        answers: Sequence[str],
        ids: Sequence[str],
        score: AnswerScore | None = None,
    ) -> Self:
        """Returns the ensemble with the parameters that its file wants fitted; runs every model on every record.

        Args:
            prompts: N conversations that no model learned from.
            answers: their labels, or in free text the right answers.
            ids: a name of each record, equal for equal records. A calibrated cascade fits temperatures to one half of
                the records and chooses the threshold on the other; which is which hangs on the ids.
            score: scores free-text answers to the prompts; 1 for the right answer and 0 for others by default.

        Raises:
            UserError: there are fewer than two records, a label is not in the task's set, or a score is outside of 0
                to 1.
        """
        config, labels = self.config, self.task.label_set
        if not config.needs_data:
            return self
        if len(prompts) < 2:
            raise UserError(f"{len(prompts)} records are too few to fit anything", where="data", fix="add records")
        if not labels:
            return self._fit_texts(prompts, score or exact_match(answers))
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

    def texts(self, prompts: Sequence[Turns], *, all_models: bool = False) -> EnsembleTexts:
        """Answers every prompt of a task without labels.

        Args:
            prompts: N conversations.
            all_models: True to have every model of a cascade, or of a gate that chooses one, answer every prompt, as a
                comparison needs; otherwise a model is asked only what it has to answer.
        """
        parameters, method, members = self._fitted, self.config.method, self.members
        if method == "cascade":
            return answer_in_turn(members, parameters.thresholds, prompts, all_models=all_models)
        if method == "gate":
            gate, features = self._gate, embed_prompts(self.config.embedder, prompts)
            if not self.config.per_token:
                return answer_by_gate(members, gate, features, prompts, all_models=all_models)
            answers = text_answers.generate_pooled("probability", members, gate(features.values), prompts)
        elif method == "vote":
            answers = text_answers.vote(members, parameters.weights, prompts)
        elif method == "rescore":
            answers = text_answers.rescore(members, parameters.weights, prompts)
        else:
            answers = text_answers.generate_pooled(method, members, parameters.weights, prompts)
        return EnsembleTexts(answers, np.full(len(prompts), -1, np.int64), None)

    def generate(self, prompts: Sequence[Turns]) -> list[Generation]:
        """Answers every prompt: a label where the task has a set of them, else a text."""
        if labels := self.task.label_set:
            best = self.label_scores(prompts).log_probabilities.argmax(axis=1)
            return [Generation(labels[index], True) for index in best.tolist()]
        return self.texts(prompts).answers

    def describe(self, scores: EnsembleScores, truth: npt.ArrayLike) -> dict[str, Any]:
        """Reports on an ensemble and its models: accuracy and cost of each alone, and of a cascade the whole curve.

        Args:
            scores: of `label_scores` with ``all_models``, N >= 1.
            truth: int [N], the right labels.

        Returns:
            See `posttrain.models.ensembles.report.describe_ensemble`.
        """
        right = scores.members.log_probabilities.argmax(axis=2) == np.asarray(truth, np.int64)
        return describe_ensemble(self.config, self._fitted, scores.members, scores.answered_by, right, "accuracy")

    def describe_texts(self, texts: EnsembleTexts, scores: npt.ArrayLike, metric: str) -> dict[str, Any]:
        """Reports on a cascade, or a gate that chooses a model, in free text, as `describe` does.

        Args:
            texts: of `texts` with ``all_models``, N >= 1.
            scores: float [M, N], of each model's answers.
            metric: name of their mean.
        """
        assert texts.members is not None, "every model answered"
        cost = (texts.gate_seconds / len(texts.answers), float(np.mean(texts.gate_flops)))
        return describe_ensemble(
            *(self.config, self._fitted, texts.members, texts.answered_by, scores, metric),
            gate_cost=cost if self.config.method == "gate" else None,
        )

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

    @property
    def _gate(self) -> MixtureGate:
        gate = self._fitted.gate
        assert gate is not None, "the gate is fitted"
        return MixtureGate.from_json(gate)

    def _fit_texts(self, prompts: Sequence[Turns], score: AnswerScore) -> Self:
        config = self.config
        texts = MemberTexts.of_all(self.members, prompts)
        scores = score_members(texts, score)
        parameters = FittedParameters(normalised_weights(config), [1.0] * len(self.members))
        report: dict[str, Any] = {"records": len(prompts), "score_alone": scores.mean(axis=1).tolist()}
        if config.method == "cascade":
            choice = choose_cascade_threshold(
                texts.confidence, scores, accuracy=config.accuracy, tolerance=config.tolerance
            )
            parameters = replace(parameters, thresholds=[choice.threshold] * (len(self.members) - 1))
            report |= choice.to_json()
        else:
            features = embed_prompts(config.embedder, prompts).values
            # The score of an answer takes the place of the probability of the right label: the mixture is then the
            # expected score of a model that is drawn by the gate's weights.
            gate = fit_gate(features, np.log(np.maximum(scores, np.exp(MIN_LOG_PROBABILITY))))
            chosen = gate(features).argmax(axis=1)
            report["score"] = float(scores[chosen, np.arange(len(chosen))].mean())
            report["why"] = (
                f"on the {len(prompts)} records of the fit the gate's choice scores {report['score']:.3f}, "
                f"the best single model {max(report['score_alone']):.3f}"
            )
            parameters = replace(parameters, gate=gate.to_json())
        return replace(self, parameters=replace(parameters, report=report))

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
            return linear_pool(logs, self._gate(self._features(prompts, scores))), together
        return POOLS[self.config.method](logs, parameters.weights), together

    def _features(self, prompts: Sequence[Turns], scores: MemberScores) -> npt.NDArray[Any]:
        """Returns what the gate sees, float [N, D]."""
        if self.config.features == "probabilities":
            first: npt.NDArray[Any] = np.exp(scores.log_probabilities[0])
            return first
        return embed_prompts(self.config.embedder, prompts).values


def read_config(folder: Path) -> EnsembleConfig:
    """Reads the config of an ensemble that `Ensemble.save` wrote.

    Raises:
        WorkError: the folder holds no ensemble.
    """
    try:
        return EnsembleConfig.read(json.loads((folder / FILE).read_text(encoding="utf-8"))["config"], str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WorkError(f"{folder} holds no readable ensemble: {error}") from error


def _calibrated(scores: MemberScores, temperatures: Sequence[float]) -> MemberScores:
    logs = [at_temperature(own, factor) for own, factor in zip(scores.log_probabilities, temperatures, strict=True)]
    return replace(scores, log_probabilities=np.stack(logs))
