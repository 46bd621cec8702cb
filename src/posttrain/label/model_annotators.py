"""Models that label: their predictions, an endpoint and a vote as models, and the annotator that lets models answer."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
from pydantic import Field

from posttrain.label.annotator import AnnotationRequest, Annotator, with_answers
from posttrain.models.reply_cache import Generate
from posttrain.models.task import TaskConfig, labelled_text, record_turns
from posttrain.store.errors import UserError, WorkError
from posttrain.store.section import Section

TeacherName = Literal["champion", "linear", "endpoint", "vote", "ensemble"]
"""A model that labels: the champion, a linear head on sentence embeddings, an endpoint, a vote or an ensemble."""

TEACHERS: tuple[TeacherName, ...] = ("champion", "linear", "endpoint", "vote", "ensemble")

ENDPOINT_CHECKS = 200
"""Labelled records that an endpoint is asked at most, to measure how often it is right; each costs a request."""

PSEUDO_PER_LABEL = 8
"""Pseudo-labels for each label of people, at most."""

_QUOTES = "\"'`“”‘’"


class PseudoConfig(Section):
    """Pseudo-labels: a model's confident answers on the unlabelled pool, which join training."""

    teacher: TeacherName = Field(
        default="linear", description="The model that labels: champion, linear, endpoint, vote or ensemble."
    )
    weight: float = Field(
        default=0.5, gt=0, le=1, description="Weight of a pseudo-label in the loss; a label of people has 1."
    )
    confidence: float = Field(default=0.5, ge=0, le=1, description="Calibrated confidence that an answer needs.")


@dataclass(frozen=True)
class Predictions:
    """A model's answers to N records.

    Attributes:
        answers: [N]; None where the model gave no usable answer.
        confidence: float64 [N], 0 to 1, higher for answers that are more likely right; 0 without an answer, and NaN
            where it is not known.

    Raises:
        WorkError: a confidence is not from 0 to 1.
    """

    answers: list[str | None]
    confidence: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        # Sums of probabilities are off by their rounding.
        wrong = self.answered & (np.abs(self.confidence - 0.5) > 0.5 + 1e-6)
        if wrong.any():
            row = int(wrong.argmax())
            raise WorkError(f"the model's confidence in answer {row + 1} is {self.confidence[row]:g}, not from 0 to 1")
        object.__setattr__(self, "confidence", np.clip(self.confidence, 0.0, 1.0))

    @classmethod
    def none(cls, count: int) -> Self:
        """Returns no answer to any record."""
        return cls([None] * count, np.zeros(count))

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """bool [N], whether there is an answer."""
        return np.array([answer is not None for answer in self.answers], bool)

    def agrees_with(self, truth: Sequence[str]) -> npt.NDArray[np.bool_]:
        """bool [N], whether the answer is this one."""
        return np.array([answer == right for answer, right in zip(self.answers, truth, strict=True)], bool)


class Teacher(ABC):
    """A model that labels records.

    Attributes:
        name: its name in the config, which ``model:`` precedes as an annotator.
        calibrated: True if its confidence is a probability; else held-out answers make it one.
    """

    name: ClassVar[TeacherName]
    calibrated: bool = True

    def inputs(self) -> Mapping[str, str]:
        """Returns the ids of the artifacts that its answers depend on, by role."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Returns the settings that its answers depend on, as JSON values."""
        return {}

    @abstractmethod
    def predict(self, records: pa.Table) -> Predictions:
        """Predicts the answers of a RECORD table."""

    @abstractmethod
    def held_out(self, labelled: pa.Table) -> Predictions:
        """Returns the answers to labelled records by a model that did not learn from them; none where it did."""


class EndpointTeacher(Teacher):
    """Asks a model behind an endpoint for one of the labels, or for an answer in its own words.

    Args:
        generate: queries the model.
        task: the system message and the labels.
        settings: what its replies depend on.
    """

    name = "endpoint"
    calibrated = False

    def __init__(self, generate: Generate, task: TaskConfig, settings: Mapping[str, Any]) -> None:
        self._generate, self._task, self._settings = generate, task, settings

    def settings(self) -> Mapping[str, Any]:
        return self._settings

    def predict(self, records: pa.Table) -> Predictions:
        rows = records.select(["prompt", "text"]).to_pylist()
        prompts = [label_prompt(row, self._task) for row in rows]
        replies = self._generate(prompts) if prompts else []
        answers = [
            None if reply is None else self._parse(reply, labelled_text(row["prompt"], row["text"]))
            for row, reply in zip(rows, replies, strict=True)
        ]
        return Predictions(answers, np.array([float(answer is not None) for answer in answers]))

    def _parse(self, reply: str, text: str) -> str | None:
        """Returns the answer that a reply is; None if it is not one."""
        if labels := self._task.label_set:
            return parse_label(reply, labels)
        answer = _without_thoughts(reply) or None
        if answer is None or self._task.form is None:
            return answer
        try:
            return self._task.form.read(answer, text)
        except UserError:
            return None

    def held_out(self, labelled: pa.Table) -> Predictions:
        # By id, so that the same records are asked when the set grows: their replies are in the cache.
        ids = labelled["id"].to_pylist()
        rows = sorted(sorted(range(len(ids)), key=lambda row: str(ids[row]))[:ENDPOINT_CHECKS])
        asked = self.predict(labelled.take(pa.array(rows, pa.int64())))
        answers: list[str | None] = [None] * len(ids)
        for row, answer in zip(rows, asked.answers, strict=True):
            answers[row] = answer
        return Predictions(answers, np.array([float(answer is not None) for answer in answers]))


class VoteTeacher(Teacher):
    """Lets several models vote; a record without a majority over every other answer gets none."""

    name = "vote"
    calibrated = False

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        self._teachers = teachers

    def inputs(self) -> Mapping[str, str]:
        return {role: id for teacher in self._teachers for role, id in teacher.inputs().items()}

    def settings(self) -> Mapping[str, Any]:
        return {teacher.name: dict(teacher.settings()) for teacher in self._teachers}

    def predict(self, records: pa.Table) -> Predictions:
        return count_votes([teacher.predict(records) for teacher in self._teachers])

    def held_out(self, labelled: pa.Table) -> Predictions:
        return count_votes([teacher.held_out(labelled) for teacher in self._teachers])


def count_votes(ballots: Sequence[Predictions]) -> Predictions:
    """Returns the answer that most models give; its confidence is their share. A tie has no answer."""
    answers: list[str | None] = []
    shares: list[float] = []
    for votes in zip(*(ballot.answers for ballot in ballots), strict=True):
        ranked = Counter(vote for vote in votes if vote is not None).most_common(2)
        tied = not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1])
        answers.append(None if tied else ranked[0][0])
        shares.append(0.0 if tied else ranked[0][1] / len(ballots))
    return Predictions(answers, np.array(shares))


def label_prompt(record: Mapping[str, Any], task: TaskConfig) -> list[dict[str, str]]:
    """Builds the request for a record's label: the task, the labels in a list, then the record's own turns.

    Args:
        record: ``prompt`` and ``text`` by the record schema.
    """
    wish = task.form.instruction if task.form else ""
    if labels := task.label_set:
        lines = "\n".join(f"- {label}" for label in labels)
        wish = (
            f"Answer with exactly one of these {len(labels)} labels, letter by letter, and with nothing else:\n{lines}"
        )
    system = "\n\n".join(filter(None, [task.system, wish]))
    turns = record_turns(record)
    if turns and turns[0]["role"] == "system":
        # Two system turns in a row are refused by many servers.
        system = "\n\n".join(filter(None, [turns[0]["content"], wish]))
        turns = turns[1:]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def parse_label(reply: str, labels: Sequence[str]) -> str | None:
    """Returns the label that a reply consists of, alone, in quotes or with a full stop; None for anything else.

    Thoughts before it, as reasoning models write them, are left out.
    """
    text = _without_thoughts(reply)
    if text in labels:
        return text
    bare = text.removesuffix(".").strip(_QUOTES).strip().removesuffix(".").casefold()
    matches = [label for label in labels if label.casefold() == bare]
    # Labels that differ in case alone cannot be told apart so.
    return matches[0] if len(matches) == 1 else None


def _without_thoughts(reply: str) -> str:
    # Some chat templates open the thoughts in the prompt, so that the reply has their end alone.
    return reply.rpartition("</think>")[2].strip()


class ModelAnnotator(Annotator):
    """Answers the records whose suggestion is accepted by that suggestion, and has people answer all others.

    Args:
        teacher: name of the model that suggested.
        people: answers the rest.
    """

    def __init__(self, teacher: str, people: Annotator) -> None:
        self.name, self.people = f"model:{teacher}", people

    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        accepted = list(request.accepted or [False] * batch.num_rows)
        by_model = [row for row, is_accepted in enumerate(accepted) if is_accepted]
        rest = [row for row, is_accepted in enumerate(accepted) if not is_accepted]
        if not by_model:
            return self.people.annotate(batch, replace(request, accepted=None))
        own = request.take(by_model)
        answered = with_answers(
            batch.take(pa.array(by_model, pa.int64())),
            [str(answer) for answer in own.suggestions or []],
            self.name,
            request.round,
            confidences=own.confidences,
        )
        if not rest:
            return answered
        asked = self.people.annotate(batch.take(pa.array(rest, pa.int64())), replace(request.take(rest), accepted=None))
        together = pa.concat_tables([answered, asked])
        # People may have left records out; the order of the batch is kept.
        order = compute.index_in(batch["id"].combine_chunks(), value_set=together["id"].combine_chunks())
        return together.take(order.drop_null())

    def unlabelled(self, batch: pa.Table, request: AnnotationRequest) -> Mapping[str, str]:
        accepted = request.accepted or [False] * batch.num_rows
        rest = [row for row, is_accepted in enumerate(accepted) if not is_accepted]
        return self.people.unlabelled(
            batch.take(pa.array(rest, pa.int64())), replace(request.take(rest), accepted=None)
        )
