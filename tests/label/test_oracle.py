"""The oracle answers from its file, with exactly the configured number of errors."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.reading.reader import read
from posttrain.data.records.record import RECORD
from posttrain.label.annotator import AnnotationRequest, Annotator
from posttrain.label.config import LabelConfig, build_annotator
from posttrain.store.errors import UserError

Batch = Callable[..., pa.Table]
COLUMNS = {"prompt": "text", "completion": "category"}
LABELS = ["a", "b", "c", "d"]
COUNT = 400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = [f"message {n},{LABELS[n % 4]}" for n in range(COUNT)]
    (tmp_path / "answers.csv").write_text("\n".join(["text,category", *lines]))
    return tmp_path


def oracle(root: Path, **values: Any) -> Annotator:
    config = LabelConfig.read({"annotator": "oracle", "file": "answers.csv", **values}, "posttrain.yaml")
    return build_annotator(config, root, read, COLUMNS)


def request(root: Path, round: int = 1, seed: int = 0, labels: list[str] | None = LABELS) -> AnnotationRequest:
    return AnnotationRequest(round, seed, root, labels)


def test_answers_come_from_the_file(root: Path, batch: Batch) -> None:
    records = batch("message 6", " message  1", "message 399")
    labelled = oracle(root).annotate(records, request(root, round=3))
    assert labelled.schema == RECORD
    assert labelled["completion"].to_pylist() == ["c", "b", "d"]
    assert json.loads(labelled["meta"][0].as_py()) == {
        "channel": "web",
        "labelled_by": {"annotator": "oracle", "round": 3, "seconds": None},
    }
    other_columns = [name for name in RECORD.names if name not in ("completion", "meta")]
    assert labelled.select(other_columns).equals(records.select(other_columns))


def test_the_first_of_two_answers_counts(root: Path, batch: Batch) -> None:
    (root / "answers.csv").write_text("text,category\nhello,b\nhello,c\n")
    assert oracle(root).annotate(batch("hello"), request(root))["completion"].to_pylist() == ["b"]


@pytest.mark.parametrize(("rate", "wrong"), [(0.0, 0), (0.4, 160), (0.0012, 0), (0.0013, 1), (1.0, 400)])
def test_the_number_of_errors_is_exact_and_errors_spread_over_the_other_labels(
    root: Path, batch: Batch, rate: float, wrong: int
) -> None:
    records = batch(*(f"message {n}" for n in range(COUNT)))
    annotator = oracle(root, error_rate={2: rate})
    right = annotator.annotate(records, request(root, round=1))["completion"].to_pylist()
    assert right == [LABELS[n % 4] for n in range(COUNT)]
    labels = annotator.annotate(records, request(root, round=2))["completion"].to_pylist()
    shifts = Counter(
        (LABELS.index(label) - LABELS.index(truth)) % 4 for label, truth in zip(labels, right, strict=True)
    )
    assert COUNT - shifts.pop(0, 0) == wrong
    if wrong >= 160:
        assert sorted(shifts) == [1, 2, 3]
        assert all(abs(count - wrong / 3) < 5 * np.sqrt(wrong * 2 / 9) for count in shifts.values())


def test_errors_depend_on_seed_and_round_and_not_on_order(root: Path, batch: Batch) -> None:
    texts = [f"message {n}" for n in range(100)]
    annotator = oracle(root, error_rate={1: 0.4, 2: 0.4})

    def answers(messages: list[str], round: int, seed: int) -> dict[str, str]:
        labels = annotator.annotate(batch(*messages), request(root, round, seed))["completion"].to_pylist()
        return dict(zip(messages, labels, strict=True))

    first = answers(texts, 1, 0)
    assert answers(texts[::-1], 1, 0) == first
    assert answers(texts, 2, 0) != first
    assert answers(texts, 1, 1) != first


def test_an_empty_batch_gives_no_labels(root: Path, batch: Batch) -> None:
    assert oracle(root, error_rate={1: 0.5}).annotate(batch(), request(root)).num_rows == 0


def test_a_record_without_an_answer_is_refused(root: Path, batch: Batch) -> None:
    with pytest.raises(UserError, match=r"^pool\.csv:2: the oracle's file answers\.csv has no answer"):
        oracle(root).annotate(batch("message 1", "never seen"), request(root))


def test_an_answer_outside_the_label_set_is_refused(root: Path, batch: Batch) -> None:
    (root / "answers.csv").write_text("text,category\nhello,crad\n")
    with pytest.raises(UserError, match=r"^answers\.csv:2: label `crad` .* did you mean `card`\?$"):
        oracle(root).annotate(batch("hello"), request(root, labels=["cash", "card"]))


@pytest.mark.parametrize("labels", [None, ["a"]])
def test_errors_need_other_labels(root: Path, batch: Batch, labels: list[str] | None) -> None:
    with pytest.raises(UserError, match=r"^label\.error_rate: wrong labels need a set of at least two"):
        oracle(root, error_rate={1: 1.0}).annotate(batch("message 0"), request(root, labels=labels))


def test_unusable_settings_of_the_oracle_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"^label\.file: the oracle needs a file of answers"):
        oracle(root, file=None)
    with pytest.raises(UserError, match="error_rate"):
        oracle(root, error_rate={1: 1.2})
    with pytest.raises(UserError, match="annotator"):
        oracle(root, annotator="oracel")
