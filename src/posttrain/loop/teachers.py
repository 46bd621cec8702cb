"""Builds the models that label in a round: champion, linear head, endpoint, vote and ensemble."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.label.model_annotators import EndpointTeacher, Predictions, Teacher, VoteTeacher
from posttrain.loop.context import RoundContext
from posttrain.loop.ensembles import ENSEMBLE, fit_ensemble, learns_here, load_ensemble
from posttrain.loop.history import finished_states
from posttrain.loop.linear_head import OUT_OF_FOLD, fit_head
from posttrain.loop.score_files import BATCH, read_champion_scores
from posttrain.loop.scoring import sentence_embeddings
from posttrain.models.calibration import calibrate_confidence
from posttrain.models.endpoint import Endpoint
from posttrain.models.linear_head import LinearHead
from posttrain.models.reply_cache import ReplyCache
from posttrain.models.task import record_turns
from posttrain.store.errors import DamagedArtifactError, WorkError
from posttrain.store.paths import locate_path

log = logging.getLogger("posttrain")

MIN_HELD_OUT = 30
"""Held-out answers from which a confidence is calibrated."""

_REPLIES = "replies"


def build_teacher(context: RoundContext, name: str, dataset: str) -> Teacher:
    """Builds a model that labels.

    Args:
        context: The round.
        name: champion, linear, endpoint, vote or ensemble.
        dataset: Id of the training set with the labels that it may learn from.
    """
    if name == "linear":
        return LinearTeacher(context, fit_head(context, dataset))
    if name == "endpoint":
        return _endpoint_teacher(context)
    if name == "vote":
        return VoteTeacher([build_teacher(context, each, dataset) for each in context.config.label.voters])
    if name == "ensemble":
        file = context.config.label.ensemble
        assert file is not None, "the config was checked"
        return EnsembleTeacher(
            context, fit_ensemble(context, locate_path(context.workspace.root, file), "label.ensemble", dataset)
        )
    return ChampionTeacher(context)


def calibrated(teacher: Teacher, predictions: Predictions, labelled: pa.Table) -> np.ndarray:
    """Returns the probability that each answer is right, float64 [N]; NaN without an answer, or where unknown.

    Args:
        teacher: The model.
        predictions: Its answers.
        labelled: RECORD table of people's labels.
    """
    confidence = predictions.confidence.astype(np.float64)
    if not teacher.calibrated:
        held_out = teacher.held_out(labelled)
        answered = held_out.answered
        if int(answered.sum()) < MIN_HELD_OUT:
            return np.full(len(confidence), np.nan)
        right = held_out.agrees_with(labelled["completion"].to_pylist())
        confidence = calibrate_confidence(confidence, held_out.confidence[answered], right[answered])
    return np.where(predictions.answered, confidence, np.nan)


class ChampionTeacher(Teacher):
    """The champion's answers, from the scores of this round; held out are those to earlier batches, at their time."""

    name = "champion"

    def __init__(self, context: RoundContext) -> None:
        self._context = context

    def inputs(self) -> dict[str, str]:
        state = self._context.state
        own = {"scores": state.scores, "selection": state.selection}
        return {role: id for role, id in own.items() if id is not None} | self._earlier()

    def predict(self, records: pa.Table) -> Predictions:
        state = self._context.state
        if state.scores is None or state.selection is None or self._context.artifact(state.scores).meta["cold"]:
            return Predictions.none(records.num_rows)
        folder = self._context.path(state.scores)
        columns = ["id", "predicted", "confidence"]
        table = read_champion_scores(folder, self._context.path(state.selection), columns)
        row_of = {id: row for row, id in enumerate(table["id"].to_pylist())}
        rows = [row_of.get(id) for id in records["id"].to_pylist()]
        predicted, confidence = table["predicted"].to_pylist(), table["confidence"].to_pylist()
        answers = [None if row is None else predicted[row] for row in rows]
        # A confidence that is not known is null; NaN comes from a model whose outputs are NaN.
        if any(
            row is not None and answer and confidence[row] != confidence[row]
            for row, answer in zip(rows, answers, strict=True)
        ):
            raise WorkError("the champion's confidence in an answer is NaN: its weights give no probabilities")
        values = np.array([0.0 if row is None else confidence[row] for row in rows], np.float64)
        return Predictions(answers, values)

    def held_out(self, labelled: pa.Table) -> Predictions:
        earlier: dict[str, tuple[str, float]] = {}
        for state in finished_states(self._context.workspace):
            if state.batch is None:
                continue
            try:
                earlier |= _batch_answers(self._context, **state.batch)
            except DamagedArtifactError as error:
                log.warning("%s; the champion's answers of an earlier round do not count", error)
        known = [earlier.get(id) for id in labelled["input_id"].to_pylist()]
        answers = [None if pair is None else pair[0] for pair in known]
        return Predictions(answers, np.array([0.0 if pair is None else pair[1] for pair in known], np.float64))

    def _earlier(self) -> dict[str, str]:
        states = finished_states(self._context.workspace)
        return {f"selection {number}": str(state.selection) for number, state in enumerate(states) if state.batch}


def _batch_answers(context: RoundContext, pool: str, scores: str, selection: str) -> dict[str, tuple[str, float]]:
    """Returns the champion's answer to each input of a finished round's batch, with its confidence."""
    if context.artifact(scores).meta["cold"]:
        return {}
    records = context.dataset(pool).records
    input_of = dict(zip(records["id"].to_pylist(), records["input_id"].to_pylist(), strict=True))
    batch = set(parquet.read_table(context.path(selection) / BATCH, columns=["id"])["id"].to_pylist())
    table = read_champion_scores(context.path(scores), context.path(selection), ["id", "predicted", "confidence"])
    rows = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    return {
        input_of[id]: (predicted, confidence)
        for id, predicted, confidence in rows
        if id in batch and predicted is not None and confidence is not None
    }


class LinearTeacher(Teacher):
    """The linear head on sentence embeddings; held out are its predictions out of fold.

    Args:
        context: The round.
        head: Id of the head; None where there are too few labels, and no answer.
    """

    name = "linear"

    def __init__(self, context: RoundContext, head: str | None) -> None:
        self._context, self._head = context, head

    def inputs(self) -> dict[str, str]:
        return {"head": self._head} if self._head else {}

    def predict(self, records: pa.Table) -> Predictions:
        if self._head is None or not records.num_rows:
            return Predictions.none(records.num_rows)
        head = LinearHead.load(self._context.path(self._head))
        embedder = str(self._context.config.label.embedder)
        probabilities = head.probabilities(sentence_embeddings(self._context, embedder, records))
        answers: list[str | None] = [head.labels[index] for index in probabilities.argmax(axis=1).tolist()]
        return Predictions(answers, probabilities.max(axis=1))

    def held_out(self, labelled: pa.Table) -> Predictions:
        if self._head is None:
            return Predictions.none(labelled.num_rows)
        table = parquet.read_table(self._context.path(self._head) / OUT_OF_FOLD).to_pydict()
        pairs = zip(table["predicted"], table["confidence"], strict=True)
        by_input = dict(zip(table["input_id"], pairs, strict=True))
        known = [by_input.get(id) for id in labelled["input_id"].to_pylist()]
        answers = [None if pair is None else pair[0] for pair in known]
        return Predictions(answers, np.array([0.0 if pair is None else pair[1] for pair in known], np.float64))


class EnsembleTeacher(Teacher):
    """An ensemble that labels; a cascade asks its large models only what the small ones leave.

    Held out are its answers to labelled records where none of its models comes from this workspace, whose models have
    learned from them. In free text an answer that was cut off, or is empty, is none.

    Args:
        context: The round.
        ensemble: Id of the ensemble.
    """

    name = "ensemble"

    def __init__(self, context: RoundContext, ensemble: str) -> None:
        self._context, self._id = context, ensemble
        # Shares of votes, and texts, have no probabilities; held-out answers say what they are worth.
        self.calibrated = bool(context.config.task.label_set) and context.artifact(ensemble).meta["method"] != "vote"

    def inputs(self) -> dict[str, str]:
        return {ENSEMBLE: self._id}

    def predict(self, records: pa.Table) -> Predictions:
        if not records.num_rows:
            return Predictions.none(0)
        prompts = [record_turns(row) for row in records.select(["prompt", "text"]).to_pylist()]
        ensemble, labels = load_ensemble(self._context, self._id), self._context.config.task.label_set
        if not labels:
            written = ensemble.generate(prompts)
            texts = [answer.text if answer.finished and answer.text else None for answer in written]
            return Predictions(texts, np.array([float(text is not None) for text in texts]))
        scores = ensemble.label_scores(prompts)
        probabilities = np.minimum(np.exp(scores.log_probabilities), 1.0)
        answers: list[str | None] = [labels[index] for index in probabilities.argmax(axis=1).tolist()]
        return Predictions(answers, probabilities.max(axis=1))

    def held_out(self, labelled: pa.Table) -> Predictions:
        if any(learns_here(model) for model, _ in self._context.artifact(self._id).meta["models"]):
            return Predictions.none(labelled.num_rows)
        return self.predict(labelled)


def _endpoint_teacher(context: RoundContext) -> EndpointTeacher:
    config = context.config.label.endpoint
    assert config is not None, "the config was checked"
    # A label is asked for once, whatever round it is: the same prompt finds its reply.
    endpoint = Endpoint(config, ReplyCache(context.workspace.home / _REPLIES), temperature=0.0, again=False)
    # The settings that the replies depend on.
    settings = {name: getattr(config, name) for name in ("base_url", "model", "max_tokens")}
    return EndpointTeacher(endpoint, context.config.task, settings)
