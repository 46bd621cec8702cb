"""Requests and replies of models that label, their votes, and answers that stand without people."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.label.annotator import AnnotationRequest, Annotator, label_summary, labelled_by_model, with_answers
from posttrain.label.model_annotators import (
    EndpointTeacher,
    ModelAnnotator,
    Predictions,
    count_votes,
    label_prompt,
    parse_label,
)
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, Waiting, WorkError
from posttrain.testing.steps import table_of

LABELS = ["card_lost", "Cash", "cash", "top up"]


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("card_lost", "card_lost"),
        (" card_lost\n", "card_lost"),
        ("`card_lost`", "card_lost"),
        ('"Top up."', "top up"),
        ("TOP UP.", "top up"),
        ("cash", "cash"),
        ("Cash", "Cash"),
        ("CASH", None),
        ("The label is card_lost", None),
        ("card_lost, cash", None),
        ("card lost", None),
        ("- card_lost", None),
        ("", None),
        ("<think>\nIs it cash?\n</think>\n\ncard_lost", "card_lost"),
        ("Is it cash?</think>top up", "top up"),
        ("<think>cash</think>", None),
        ("<think>cash", None),
    ],
)
def test_a_reply_is_a_label_or_nothing(reply: str, label: str | None) -> None:
    assert parse_label(reply, LABELS) == label


def test_the_request_lists_every_label_and_has_one_system_turn() -> None:
    task = TaskConfig(system="Name the intent.", labels=LABELS)
    turns = label_prompt({"prompt": [{"role": "user", "content": "gone"}], "text": None}, task)
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert turns[0]["content"].startswith("Name the intent.\n\nAnswer with exactly one of these 4 labels")
    assert turns[0]["content"].endswith("\n- card_lost\n- Cash\n- cash\n- top up")
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "gone"}]
    turns = label_prompt({"prompt": own, "text": None}, task)
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert turns[0]["content"].startswith("Be brief.\n\nAnswer")
    assert label_prompt({"prompt": None, "text": "gone"}, TaskConfig()) == [{"role": "user", "content": "gone"}]


def test_an_endpoint_answers_with_several_labels_or_nothing() -> None:
    replies = ["<think>?</think>\ncash; card", "none", "refund", None]
    asked: list[Any] = []
    task = TaskConfig(kind="choices", labels=["card", "cash"])
    teacher = EndpointTeacher(lambda prompts: asked.extend(prompts) or replies, task, {})
    table = pa.table({"prompt": pa.nulls(4, pa.list_(pa.string())), "text": ["a", "b", "c", "d"]})
    assert teacher.predict(table).answers == ["card; cash", "none", None, None]
    assert "Which of these labels apply: card; cash?" in asked[0][0]["content"]


def predictions(*answers: str | None) -> Predictions:
    return Predictions(list(answers), np.array([0.9 if answer else 0.0 for answer in answers]))


def test_a_vote_is_the_answer_of_most_and_a_tie_is_none() -> None:
    votes = count_votes(
        [
            predictions("a", "a", "a", None, None, "a"),
            predictions("a", "b", "b", "b", None, "b"),
            predictions("a", "a", None, None, None, "c"),
        ]
    )
    assert votes.answers == ["a", "a", None, "b", None, None]
    np.testing.assert_allclose(votes.confidence, [1, 2 / 3, 0, 1 / 3, 0, 0])


def batch_of(count: int) -> pa.Table:
    return table_of(*({"prompt": f"message {number}", "line": number + 1} for number in range(count)))


class People(Annotator):
    name = "people"

    def __init__(self) -> None:
        self.requests: list[AnnotationRequest] = []
        self.batches: list[pa.Table] = []

    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        self.requests.append(request)
        self.batches.append(batch)
        return with_answers(batch, ["people"] * batch.num_rows, self.name, request.round)


def request_for(suggestions: list[str | None], accepted: list[bool] | None, folder: Path) -> AnnotationRequest:
    confidences = [None if answer is None else 0.9 for answer in suggestions]
    return AnnotationRequest(2, 0, folder, LABELS, suggestions, confidences, "model:linear", accepted)


def test_accepted_suggestions_stand_and_people_answer_the_rest_in_the_order_of_the_batch(tmp_path: Path) -> None:
    people, batch = People(), batch_of(4)
    request = request_for(["w", "x", None, "z"], [False, True, False, True], tmp_path)
    answers = ModelAnnotator("linear", people).annotate(batch, request)
    assert answers["id"].to_pylist() == batch["id"].to_pylist()
    assert answers["completion"].to_pylist() == ["people", "x", "people", "z"]
    assert labelled_by_model(answers) == [False, True, False, True]
    marks = [json.loads(meta)["labelled_by"] for meta in answers["meta"].to_pylist()]
    assert marks[1] == {"annotator": "model:linear", "confidence": 0.9, "round": 2, "seconds": None}
    assert "confidence" not in marks[0]
    assert people.batches[0]["id"].to_pylist() == [batch["id"][0].as_py(), batch["id"][2].as_py()]
    assert (people.requests[0].suggestions, people.requests[0].accepted) == (["w", None], None)


def test_labels_of_feedback_and_of_a_column_of_that_name_are_not_a_models() -> None:
    marks = ["feedback", ["model:x"], None, {"annotator": "model:x"}]
    table = pa.table({"meta": [None, *(json.dumps({"labelled_by": mark}) for mark in marks)], "completion": ["a"] * 5})
    assert labelled_by_model(table) == [False] * 4 + [True]
    assert label_summary(table)["annotators"] == {"unknown": 4, "model:x": 1}


@pytest.mark.parametrize("accepted", [None, [False, False], [True, True]])
def test_all_or_nothing_may_be_accepted(accepted: list[bool] | None, tmp_path: Path) -> None:
    people = People()
    answers = ModelAnnotator("linear", people).annotate(batch_of(2), request_for(["x", "y"], accepted, tmp_path))
    everything = accepted == [True, True]
    assert answers["completion"].to_pylist() == (["x", "y"] if everything else ["people", "people"])
    assert len(people.batches) == (0 if everything else 1)


def test_it_waits_as_long_as_people_do(tmp_path: Path) -> None:
    class Absent(Annotator):
        name = "absent"

        def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
            raise Waiting("later")

    with pytest.raises(Waiting, match="later"):
        ModelAnnotator("linear", Absent()).annotate(batch_of(2), request_for(["x", None], [True, False], tmp_path))


def test_an_endpoint_is_asked_for_so_many_labelled_records_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.label.model_annotators.ENDPOINT_CHECKS", 5)
    asked: list[Any] = []

    def generate(prompts: Any) -> list[str | None]:
        asked.extend(prompts)
        return ["top up" if "3" in prompt[-1]["content"] else None for prompt in prompts]

    teacher = EndpointTeacher(generate, TaskConfig(labels=LABELS), {"model": "m"})
    labelled = batch_of(20)
    first = teacher.held_out(labelled)
    assert len(asked) == 5
    assert int(first.answered.sum()) <= 5
    assert teacher.held_out(labelled.slice(0)).answers == first.answers
    everything = teacher.predict(labelled)
    assert everything.answers == ["top up" if "3" in f"message {number}" else None for number in range(20)]
    assert teacher.settings() == {"model": "m"}


@pytest.mark.parametrize("confidence", [2.0, -1.0, math.inf, -math.inf])
def test_a_models_confidence_outside_0_to_1_is_refused(confidence: float) -> None:
    with pytest.raises(WorkError, match=r"confidence in answer 2 is .*, not from 0 to 1"):
        Predictions(["card", "cash"], np.array([0.5, confidence]))
    assert Predictions(["card", None], np.array([1.0 + 1e-9, confidence])).confidence[0] == 1.0


@pytest.mark.parametrize("confidence", [math.nan, 2.0, -1.0])
def test_an_answer_with_an_impossible_confidence_is_not_stored(confidence: float) -> None:
    batch = pa.table({"id": ["a"], "completion": pa.array([None], pa.string()), "meta": pa.array([None], pa.string())})
    with pytest.raises(UserError, match=r"the answers of model:own: .* not a possible value of `confidence`"):
        with_answers(batch, ["card"], "model:own", 1, confidences=[confidence])
