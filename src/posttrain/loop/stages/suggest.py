"""Suggest: has a model answer the batch before people do, and accepts what is surely right."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.label.acceptance import CHECKED_SHARE, Acceptance, choose_threshold, draw_checks
from posttrain.label.annotator import AnnotationRequest, labelled_by_model
from posttrain.label.model_annotators import TEACHERS, Teacher
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states, parent_dataset
from posttrain.loop.linear_head import people_labels
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.score_files import BATCH, LABELS, chosen_records
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState
from posttrain.loop.teachers import ChampionTeacher, build_teacher, calibrated
from posttrain.models.binomial import clopper_pearson
from posttrain.models.task import labelled_text
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.message import Message
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

SUGGESTIONS = "suggestions.parquet"
"""One row for each record of the batch: ``id``, ``answer``, ``score`` (the model's own), ``confidence`` (calibrated),
``accepted`` without people, and of these ``checked`` by people all the same."""


@dataclass(frozen=True)
class Suggest(Stage):
    """Predicts the labels of a batch by the teacher, and decides which of them stand without people.

    Args:
        selection: Id of the batch.
        pool: Id of the pool that it is from.
        dataset: Id of the training set so far, whose labels the teacher may learn from.
        teacher: The model.
        checks: Ids of earlier rounds' suggestions and labels, by role.
    """

    selection: str
    pool: str
    dataset: str
    teacher: Teacher
    checks: dict[str, str]
    name = "suggest"
    title = Message("suggest")
    kind = "suggestions"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Predicts the labels, unless the config asks for no more than the champion's answers."""
        state, config = context.state, context.config.label
        plain = config.teacher == "champion" and config.annotator not in TEACHERS and config.accept_error is None
        if plain or state.selection is None or state.queried_pool is None:
            return state
        # A batch that is out keeps its suggestions: what was accepted must not change while people answer the rest.
        if suggestions_of(context.workspace, state) is not None:
            return state
        dataset = parent_dataset(context.workspace)
        teacher = build_teacher(context, config.teacher, dataset)
        checks = _earlier_checks(context, teacher.name) if config.accept_error is not None else {}
        suggestions = context.run(cls(state.selection, state.queried_pool, dataset, teacher, checks))
        meta = suggestions.meta
        log.info("  %s suggests labels for %d of %d records", teacher.name, meta["suggested"], meta["records"])
        if acceptance := meta["acceptance"]:
            log.info("  accepted without people: %d; %s", meta["accepted"], acceptance["why"])
        return state.with_output(cls.name, suggestions.id)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports what a model labelled, and what people's checks of it say."""
        report, state = None, record.state
        if state.labelled is not None and (suggestions := suggestions_of(record.workspace, state)) is not None:
            try:
                report = check_report(record.workspace, suggestions, state.labelled)
            except DamagedArtifactError as error:
                log.warning("%s; what models labelled is unknown", error)
        return StageReport({"models": report}, report["sentences"] if report else ())

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the batch, the labels so far and everything that the model's answers depend on."""
        own = {"selection": self.selection, "pool": self.pool, "dataset": self.dataset}
        return {**own, **self.teacher.inputs(), **self.checks}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the teacher, the bound, the share of checks, and the task."""
        config = context.config
        return {
            "teacher": self.teacher.name,
            "options": dict(self.teacher.settings()),
            "answers_count": config.label.annotator in TEACHERS,
            "accept_error": config.label.accept_error,
            "task": config.task.key,
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the suggestions."""
        config = context.config.label
        batch, _ = chosen_records(context, context.artifact(self.selection), context.artifact(self.pool))
        labelled = people_labels(context.dataset(self.dataset).records, context.config.task.label_set)
        predictions = self.teacher.predict(batch)
        answered = predictions.answered
        confidence = calibrated(self.teacher, predictions, labelled)
        acceptance, accepted, checked = None, np.zeros(len(answered), bool), np.zeros(len(answered), bool)
        if config.accept_error is not None:
            acceptance = self._acceptance(context, labelled)
            # What was drawn at random stays with people: it says how often the champion is right on the whole pool.
            drawn = parquet.read_table(context.path(self.selection) / BATCH)["inclusion"].is_valid().to_numpy()
            accepted = answered & acceptance.accepts(predictions.confidence) & ~drawn
            checked = draw_checks(accepted, CHECKED_SHARE, context.seed("suggest"))
        elif config.annotator in TEACHERS:
            accepted = answered
        table = pa.table(
            {
                "id": batch["id"],
                "answer": pa.array(predictions.answers, pa.string()),
                "score": pa.array(np.round(predictions.confidence, 6)),
                "confidence": pa.array(np.round(confidence, 6), mask=np.isnan(confidence)),
                "accepted": pa.array(accepted),
                "checked": pa.array(checked),
            }
        )
        parquet.write_table(table, out / SUGGESTIONS)
        return {
            "teacher": self.teacher.name,
            "records": len(answered),
            "suggested": int(answered.sum()),
            "unanswered": int((~answered).sum()),
            "accepted": int(accepted.sum()),
            "checked": int(checked.sum()),
            "acceptance": acceptance.to_json() if acceptance else None,
        }

    def _acceptance(self, context: RoundContext, labelled: pa.Table) -> Acceptance:
        bound = context.config.label.accept_error
        assert bound is not None, "there is a bound"
        held_out = self.teacher.held_out(labelled)
        answered = held_out.answered
        right = held_out.agrees_with(labelled["completion"].to_pylist())
        rounds = sorted({role.removeprefix("checks ") for role in self.checks if role.startswith("checks ")})
        checks = [
            checked_answers(context.workspace, self.checks[f"checks {number}"], self.checks[f"labels {number}"])
            for number in rounds
        ]
        pooled = tuple(np.concatenate(parts) for parts in zip(*checks, strict=True)) if checks else None
        return choose_threshold(
            held_out.confidence[answered], right[answered], bound, checked=(pooled[0], pooled[1]) if pooled else None
        )


def suggestions_of(workspace: Workspace, state: RoundState) -> str | None:
    """Returns the id of the suggestions for the round's batch; None where there are none, or for another batch."""
    id = state.outputs.get(Suggest.name)
    if id is None or state.selection is None:
        return None
    runs = workspace.metadata.producers(id)
    return id if runs and runs[-1].inputs.get("selection") == state.selection else None


def with_suggestions(context: RoundContext, batch: pa.Table, request: AnnotationRequest) -> AnnotationRequest:
    """Returns the request with the suggestions of the round's teacher, their confidences, and which of them stand.

    What people check is hidden from them: a suggestion that is seen is agreed with too often.

    Args:
        context: The round.
        batch: RECORD table of the batch.
        request: With the champion's answers, or none before its first training.
    """
    id = suggestions_of(context.workspace, context.state)
    if id is None:
        if request.suggestions is None:
            return request
        confidences = ChampionTeacher(context).predict(batch).confidence.tolist()
        return replace(request, confidences=[None if math.isnan(value) else value for value in confidences])
    table = parquet.read_table(context.path(id) / SUGGESTIONS).to_pydict()
    hidden = table["checked"]
    return replace(
        request,
        suggestions=[None if hide else answer for answer, hide in zip(table["answer"], hidden, strict=True)],
        confidences=[None if hide else value for value, hide in zip(table["confidence"], hidden, strict=True)],
        accepted=[yes and not hide for yes, hide in zip(table["accepted"], hidden, strict=True)],
        suggested_by=f"model:{context.artifact(id).meta['teacher']}",
    )


def with_usable_suggestions(batch: pa.Table, request: AnnotationRequest) -> AnnotationRequest:
    """Returns the request without suggestions that are not an answer of its form; people answer these records."""
    if request.form is None or request.suggestions is None:
        return request
    texts = [labelled_text(*pair) for pair in zip(batch["prompt"].to_pylist(), batch["text"].to_pylist(), strict=True)]
    suggestions: list[str | None] = []
    for suggestion, text in zip(request.suggestions, texts, strict=True):
        try:
            suggestions.append(None if suggestion is None else request.form.read(suggestion, text))
        except UserError:
            suggestions.append(None)
    usable = [suggestion is not None for suggestion in suggestions]
    accepted = request.accepted and [yes and can for yes, can in zip(request.accepted, usable, strict=True)]
    return replace(request, suggestions=suggestions, accepted=accepted)


def rest_for_people(batch: pa.Table, request: AnnotationRequest) -> tuple[pa.Table, AnnotationRequest]:
    """Returns the records of a batch that people answer, without those whose suggestion stands."""
    if request.accepted is None:
        return batch, request
    rows = [row for row, accepted in enumerate(request.accepted) if not accepted]
    return batch.take(pa.array(rows, pa.int64())), replace(request.take(rows), accepted=None)


def checked_answers(workspace: Workspace, suggestions: str, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores of the checked answers of a round, and whether people gave the same answers."""
    table = parquet.read_table(workspace.artifacts.path(suggestions) / SUGGESTIONS)
    checked = table.filter(table["checked"]).to_pydict()
    labelled = parquet.read_table(workspace.artifacts.path(labels) / LABELS)
    by_people = labelled.filter(pa.array([not by_model for by_model in labelled_by_model(labelled)], pa.bool_()))
    answer_of = dict(zip(by_people["id"].to_pylist(), by_people["completion"].to_pylist(), strict=True))
    rows = [
        (score, answer_of[id] == answer)
        for id, answer, score in zip(checked["id"], checked["answer"], checked["score"], strict=True)
        if id in answer_of
    ]
    return np.array([score for score, _ in rows], np.float64), np.array([right for _, right in rows], bool)


def check_report(workspace: Workspace, suggestions: str, labels: str) -> dict[str, Any]:
    """Reports what a round accepted without people, and the error that checks of it found, with its interval.

    Returns:
        ``teacher``, ``accepted``, ``unanswered``, ``acceptance`` (fields of `Acceptance`, None without a bound),
        ``checked``, ``wrong``, ``error`` with ``low`` and ``high``, and ``sentences`` for people.

    Raises:
        DamagedArtifactError: an artifact is damaged or lost.
    """
    meta = workspace.artifacts.get(suggestions).meta
    _, right = checked_answers(workspace, suggestions, labels)
    wrong = int((~right).sum())
    low, high = clopper_pearson(wrong, len(right))
    report = {name: meta[name] for name in ("teacher", "accepted", "unanswered", "acceptance")}
    error = wrong / len(right) if len(right) else None
    report |= {"checked": len(right), "wrong": wrong, "error": error, "low": low, "high": high}
    return {**report, "sentences": _sentences(report)}


def _sentences(report: dict[str, Any]) -> list[str]:
    """Says what a model labelled in a round, on which ground, and what people's checks of it say."""
    teacher, acceptance = report["teacher"], report["acceptance"]
    sentences: list[str] = []
    if report["unanswered"]:
        sentences.append(Message("{unanswered} records have no usable answer of {teacher}", **report))
    if acceptance is None:
        return sentences
    template = "{accepted} answers of {teacher} were accepted; {why}"
    sentences.append(Message(template, accepted=report["accepted"], teacher=teacher, why=acceptance["why"]))
    if report["checked"]:
        template = (
            "people found {wrong} of {checked} checked ones wrong: an error of {error:.1%} ({low:.1%} to {high:.1%}), "
            "and {bound:.1%} is allowed"
        )
        sentences.append(Message(template, **report, bound=acceptance["bound"]))
    return sentences


def _earlier_checks(context: RoundContext, teacher: str) -> dict[str, str]:
    """Returns the suggestions of earlier rounds by the same teacher, and their labels, by role."""
    ids: dict[str, str] = {}
    for number, state in enumerate(finished_states(context.workspace)):
        suggestions = suggestions_of(context.workspace, state)
        if suggestions is None or state.labelled is None:
            continue
        try:
            meta = context.artifact(suggestions).meta
            context.path(state.labelled)
        except DamagedArtifactError as error:
            log.warning("%s; the checks of round %d do not count", error, number)
            continue
        if meta["teacher"] == teacher and meta["checked"]:
            ids |= {f"checks {number}": suggestions, f"labels {number}": state.labelled}
    return ids
