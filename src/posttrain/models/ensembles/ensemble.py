"""An ensemble of models: fits its parameters on held-out records, and answers with them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.cascade import can_answer, choose_cascade_threshold, choose_models
from posttrain.models.ensembles.config import EnsembleConfig, FittedParameters, check_task, normalised_weights
from posttrain.models.ensembles.members import Member, MemberScores, MemberTexts, score_labels
from posttrain.models.ensembles.mixture_gate import MixtureGate, fit_gate
from posttrain.models.ensembles.pooling import MIN_LOG_PROBABILITY, linear_pool, majority_vote
from posttrain.models.ensembles.report import describe_ensemble
from posttrain.models.ensembles.texts import (
    AnswerScore,
    EnsembleTexts,
    answer_by_gate,
    answer_by_vote,
    answer_in_turn,
    embed_prompts,
    exact_match,
    score_members,
)
from posttrain.models.generator import Answer
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import write_atomically
from posttrain.store.message import Message

Floats = npt.NDArray[np.float64]

FILE = "ensemble.json"


@dataclass(frozen=True)
class EnsembleScores:
    """Answers of an ensemble to N prompts.

    Attributes:
        log_probabilities: float64 [N, K], normalised over the labels.
        answered_by: int64 [N], number of the model that answered; -1 where all did together.
        members: answers of the single models.
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
            object.__setattr__(self, "parameters", FittedParameters(normalised_weights(self.config), thresholds))

    def fit(self, prompts: Sequence[Turns], answers: Sequence[str], score: AnswerScore | None = None) -> Self:
        """Returns the ensemble with the gate or the threshold that its file wants fitted, if any; runs every model on
        every record.

        Args:
            prompts: N conversations that no model learned from.
            answers: their labels, or in free text the right answers.
            score: scores free-text answers to the prompts; 1 for the right answer and 0 for others by default.

        Raises:
            UserError: there are fewer than two records, a label is not in the task's set, or a score is outside of 0
                to 1.
        """
        if not self.config.needs_data:
            return self
        if len(prompts) < 2:
            raise UserError(
                Message("{count} records are too few to fit anything", count=len(prompts)),
                where="data",
                fix="add records",
            )
        if self.task.label_set:
            return self._fit_labels(prompts, answers)
        return self._fit_texts(prompts, score or exact_match(answers))

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
        if self.config.method == "cascade" and not all_models:
            return self._score_in_turn(prompts, exact)
        scores = self._score_members(prompts, exact)
        return EnsembleScores(*self._combine(prompts, scores), scores)

    def texts(self, prompts: Sequence[Turns], *, all_models: bool = False) -> EnsembleTexts:
        """Answers every prompt of a task without labels.

        Args:
            prompts: N conversations.
            all_models: True to have every model of a cascade or of a gate answer every prompt, as a comparison needs;
                otherwise a model is asked only what it has to answer.
        """
        parameters, members = self._fitted, self.members
        if self.config.method == "cascade":
            return answer_in_turn(members, parameters.thresholds, prompts, all_models=all_models)
        if self.config.method == "gate":
            features = embed_prompts(self.config.embedder, prompts)
            return answer_by_gate(members, self._gate, features, prompts, all_models=all_models)
        return answer_by_vote(members, parameters.weights, prompts)

    def generate(self, prompts: Sequence[Turns]) -> list[Answer]:
        """Answers every prompt: a label where the task has a set of them, else a text."""
        if labels := self.task.label_set:
            best = self.label_scores(prompts).log_probabilities.argmax(axis=1)
            return [Answer(labels[index]) for index in best.tolist()]
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
        """Reports on an ensemble in free text, as `describe` does.

        Args:
            texts: of `texts` with ``all_models``, N >= 1.
            scores: float [M, N], of each model's answers.
            metric: name of their mean.
        """
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

    def _fit_labels(self, prompts: Sequence[Turns], answers: Sequence[str]) -> Self:
        labels = self.task.label_set
        position = {label: index for index, label in enumerate(labels)}
        if unknown := [answer for answer in answers if answer not in position]:
            raise UserError(f"label `{unknown[0]}` is not in task.labels", where="data")
        truth = np.array([position[answer] for answer in answers], np.int64)
        scores = self._score_members(prompts, truth.tolist())
        if self.config.method == "cascade":
            return self._with_threshold(scores.confidence, scores.log_probabilities.argmax(axis=2) == truth)
        own = scores.log_probabilities[:, np.arange(len(truth)), truth]
        features = embed_prompts(self.config.embedder, prompts).values
        gate = fit_gate(features, own)
        losses = -np.log((gate(features).T * np.exp(own)).sum(axis=0))
        alone = [-float(values.mean()) for values in own]
        report = {"records": len(prompts), "log_loss": float(losses.mean()), "log_loss_alone": alone}
        return self._with_gate(gate, report)

    def _fit_texts(self, prompts: Sequence[Turns], score: AnswerScore) -> Self:
        texts = MemberTexts.of_all(self.members, prompts)
        scores = score_members(texts, score)
        report: dict[str, Any] = {"score_alone": scores.mean(axis=1).tolist()}
        if self.config.method == "cascade":
            return self._with_threshold(texts.confidence, scores, report)
        features = embed_prompts(self.config.embedder, prompts).values
        # The score of an answer takes the place of the probability of the right label: the mixture is then the expected
        # score of a model that is drawn by the gate's weights.
        gate = fit_gate(features, np.log(np.maximum(scores, np.exp(MIN_LOG_PROBABILITY))))
        chosen = gate(features).argmax(axis=1)
        report["score"] = float(scores[chosen, np.arange(len(chosen))].mean())
        report["why"] = (
            f"on the {len(prompts)} records of the fit the gate's choice scores {report['score']:.3f}, "
            f"the best single model {max(report['score_alone']):.3f}"
        )
        return self._with_gate(gate, {"records": len(prompts)} | report)

    def _with_threshold(self, confidence: Floats, scores: npt.ArrayLike, report: dict[str, Any] | None = None) -> Self:
        config = self.config
        choice = choose_cascade_threshold(confidence, scores, accuracy=config.accuracy, tolerance=config.tolerance)
        thresholds = [choice.threshold] * (len(self.members) - 1)
        known = {**(report or {}), **choice.to_json()}
        return replace(self, parameters=FittedParameters(normalised_weights(config), thresholds, report=known))

    def _with_gate(self, gate: MixtureGate, report: dict[str, Any]) -> Self:
        parameters = FittedParameters(normalised_weights(self.config), gate=gate.to_json(), report=report)
        return replace(self, parameters=parameters)

    def _score_members(self, prompts: Sequence[Turns], exact: Sequence[int] | None) -> MemberScores:
        labels = self.task.label_set
        results = [score_labels(member, prompts, labels, exact) for member in self.members]
        logs, seconds, flops = zip(*results, strict=True)
        return MemberScores(np.stack(logs), np.array(seconds), np.stack(flops))

    def _score_in_turn(self, prompts: Sequence[Turns], exact: Sequence[int] | None) -> EnsembleScores:
        labels = self.task.label_set
        models, count = len(self.members), len(prompts)
        logs = np.full((models, count, len(labels)), np.nan)
        seconds, flops = np.zeros(models), np.zeros((models, count))
        answered_by = np.full(count, models - 1, np.int64)
        rest = np.arange(count)
        for number, threshold in enumerate([*self._fitted.thresholds, 0.0]):
            if not len(rest) or not can_answer(threshold):
                continue
            own = None if exact is None else [exact[row] for row in rest.tolist()]
            logs[number, rest], seconds[number], flops[number, rest] = score_labels(
                self.members[number], [prompts[row] for row in rest.tolist()], labels, own
            )
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
            return linear_pool(logs, self._gate(embed_prompts(self.config.embedder, prompts).values)), together
        pool = majority_vote if self.config.method == "vote" else linear_pool
        return pool(logs, parameters.weights), together


def read_config(folder: Path) -> EnsembleConfig:
    """Reads the config of an ensemble that `Ensemble.save` wrote.

    Raises:
        WorkError: the folder holds no ensemble.
    """
    try:
        return EnsembleConfig.read(json.loads((folder / FILE).read_text(encoding="utf-8"))["config"], str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WorkError(f"{folder} holds no readable ensemble: {error}") from error
