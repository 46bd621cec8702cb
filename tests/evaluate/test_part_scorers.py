"""Ratings, several labels and spans against scikit-learn, and against seqeval's definition written out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from sklearn.preprocessing import MultiLabelBinarizer

from posttrain.data.records.record import assign_ids, records
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS, ScorerOutput
from posttrain.evaluate.scorers.base import GivenAnswers, read_examples
from posttrain.evaluate.suite import run_suite
from posttrain.models.generator import Answer
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.testing.scores import tiny_language_model

LABELS = ["a", "b", "c", "d"]
WORDS = ["Ana", "Bo", "Rome", "Oslo"]
TEXT = " ".join(WORDS)

SETS = st.lists(st.sets(st.sampled_from(LABELS)), min_size=1, max_size=8)
SPANS = st.lists(st.sets(st.tuples(st.sampled_from(["name", "city"]), st.sampled_from(WORDS))), min_size=1, max_size=8)


def table(expected: Sequence[str], text: str = TEXT) -> Any:
    fixed = dict.fromkeys(("id", "input_id", "rejected", "text", "group")) | {"source": "t", "meta": "{}"}
    prompt = [{"role": "user", "content": text}]
    rows = [{**fixed, "prompt": prompt, "completion": answer, "line": line} for line, answer in enumerate(expected, 1)]
    return assign_ids(records(rows))


def score(kind: str, labels: list[str], expected: Sequence[str], answers: Sequence[str]) -> ScorerOutput:
    given_answers = GivenAnswers(TaskConfig(kind=kind, labels=labels), [Answer(answer) for answer in answers])
    examples = read_examples(table(expected), "suite")
    return SCORERS[kind].score(given_answers, examples, SuiteConfig(), "suite")  # type: ignore[arg-type]


def spans_text(spans: set[tuple[str, str]]) -> str:
    return json.dumps([{"label": label, "text": words} for label, words in sorted(spans)])


@given(SETS, st.data())
def test_several_labels_as_scikit_learn_measures_them(expected: list[set[str]], data: st.DataObject) -> None:
    predicted = [data.draw(st.sets(st.sampled_from(LABELS))) for _ in expected]
    texts = [["; ".join(sorted(labels)) or "none" for labels in answers] for answers in (expected, predicted)]
    scored = score("choices", LABELS, *texts)
    encode = MultiLabelBinarizer(classes=LABELS).fit([LABELS])
    want, got = encode.transform(expected), encode.transform(predicted)
    options: dict[str, Any] = {"zero_division": 0}
    assert scored.metrics["accuracy"] == reference.accuracy_score(want, got) == scored.score.mean()
    assert scored.metrics["micro_f1"] == pytest.approx(reference.f1_score(want, got, average="micro", **options))
    for name, function in (("precision", reference.precision_score), ("recall", reference.recall_score)):
        assert scored.metrics[name] == pytest.approx(function(want, got, average="micro", **options))
    seen = [index for index in range(len(LABELS)) if want[:, index].any() or got[:, index].any()]
    macro = reference.f1_score(want, got, labels=seen, average="macro", **options) if seen else 0.0
    assert scored.metrics["macro_f1"] == pytest.approx(macro)
    assert [row.label for row in scored.per_class] == [LABELS[index] for index in seen]
    assert scored.valid.all()


@given(SPANS, st.data())
def test_spans_as_seqeval_measures_them(expected: list[set[tuple[str, str]]], data: st.DataObject) -> None:
    parts = st.tuples(st.sampled_from(["name", "city"]), st.sampled_from(WORDS))
    predicted = [data.draw(st.sets(parts)) for _ in expected]
    scored = score("spans", ["name", "city"], *(list(map(spans_text, answers)) for answers in (expected, predicted)))
    # Seqeval: an entity is right if its type and both ends are; the words of this text stand in it once.
    right = sum(len(want & got) for want, got in zip(expected, predicted, strict=True))
    precision = right / max(1, sum(map(len, predicted)))
    recall = right / max(1, sum(map(len, expected)))
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    assert scored.metrics["precision"] == pytest.approx(precision)
    assert scored.metrics["recall"] == pytest.approx(recall)
    assert scored.metrics["micro_f1"] == pytest.approx(f1)
    assert scored.metrics["accuracy"] == np.mean([a == b for a, b in zip(expected, predicted, strict=True)])
    shares = [2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0 for a, b in zip(expected, predicted, strict=True)]
    assert scored.score.tolist() == pytest.approx(shares)


def test_what_cannot_be_read_is_wrong_and_invalid() -> None:
    scored = score("choices", LABELS, ["a; b", "none", "none", "a"], ["a; x", "", "none", "a"])
    assert scored.valid.tolist() == [False, False, True, True]
    assert scored.score.tolist() == [0, 0, 1, 1]
    # 2 right of 4 written (`x` and the empty answer count) and 3 expected.
    assert (scored.metrics["precision"], scored.metrics["recall"]) == (2 / 4, 2 / 3)
    name, unknown = '{"label": "name", "text": "Ana"}', '{"label": "name", "text": "Cy"}'
    scored = score("spans", ["name"], [f"[{name}]"] * 4, [f"[{name}, {unknown}]", "Ana", "[]", f"[{name}]"])
    assert scored.valid.tolist() == [False, False, True, True]
    assert scored.score.tolist() == pytest.approx([2 / 3, 0, 0, 1])
    assert (scored.metrics["precision"], scored.metrics["recall"]) == (2 / 4, 2 / 4)
    # Of an answer that was cut off, the whole spans count.
    scored = score("spans", ["name"], [f"[{name}]"], [f'[{name}, {{"label": "na'])
    assert (scored.valid.tolist(), scored.metrics["recall"], scored.metrics["precision"]) == ([False], 1, 1 / 2)


def test_a_rating_is_measured_by_its_distance(tmp_path: Path) -> None:
    lm = tiny_language_model(tmp_path, TaskConfig(kind="rating", labels=["1", "2", "5"]))
    result = run_suite(lm, table(["1", "5", "2"]), SuiteConfig(scorer="rating"), "test")
    predicted, expected = (result.predictions[name].to_pylist() for name in ("predicted", "expected"))
    pairs = [(int(got), int(want)) for got, want in zip(predicted, expected, strict=True)]
    assert result.metrics["mean_absolute_error"] == np.mean([abs(got - want) for got, want in pairs])
    assert result.metrics["accuracy"] == np.mean([got == want for got, want in pairs])


@pytest.mark.parametrize("kind", ["rating", "choices", "spans"])
def test_a_scorer_needs_a_task_of_its_kind(kind: str) -> None:
    examples = read_examples(table(["a"]), "suite")
    with pytest.raises(UserError, match=f"scorer {kind} measures a task of that kind"):
        SCORERS[kind].score(GivenAnswers(TaskConfig(), []), examples, SuiteConfig(), "suite")  # type: ignore[arg-type]
