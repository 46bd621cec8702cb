"""The champion is calibrated on its evaluated predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.select.scores import calibration as module
from posttrain.select.scores.calibration import calibrate_champion, calibrate_labels
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel

LABELS = ["lost card", "refund", "top up"]


def scoring(labels: Sequence[str] = ()) -> ScoringContext:
    def refuse() -> Any:
        raise AssertionError("no model is run")

    return ScoringContext(ScoringModel("m", TaskConfig(), refuse), labels)


def predictions(rows: list[dict[str, Any]]) -> pa.Table:
    types = {"id": pa.string(), "expected": pa.string(), "predicted": pa.string(), "score": pa.float64()}
    schema = pa.schema([*types.items(), ("labels", pa.list_(pa.float32()))])
    return pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema=schema)


def records(count: int) -> pa.Table:
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    prompts = [[{"role": "user", "content": f"question {row}"}] for row in range(count)]
    ids = [f"{row:020x}" for row in range(count)]
    return pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "prompt": pa.array(prompts, turn),
            "text": pa.array([None] * count, pa.string()),
        }
    )


def evaluated_labels(count: int) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    logs = 3 * generator.normal(size=(count, 3))
    logs = (logs - np.logaddexp.reduce(logs, axis=1)[:, None]).astype(np.float32)
    truth = generator.integers(3, size=count)
    rows = [{"id": f"{row:020x}", "expected": LABELS[truth[row]], "labels": logs[row].tolist()} for row in range(count)]
    return predictions(rows), logs, truth


def test_labels_are_calibrated_on_the_evaluation_without_running_a_model() -> None:
    table, logs, truth = evaluated_labels(60)
    mixed = table.take(np.random.default_rng(1).permutation(60))
    result = calibrate_champion(scoring(LABELS), records(0), mixed)
    assert result == calibrate_labels(logs.astype(np.float64), truth)
    assert result is not None
    assert result.temperature > 1.5


def test_calibration_uses_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _, _ = evaluated_labels(60)
    monkeypatch.setattr(module, "_MAX_CALIBRATION_RECORDS", 40)
    subset = calibrate_champion(scoring(LABELS), records(0), table)
    assert subset is not None
    assert subset.records == 40


def test_a_suite_without_label_probabilities_calibrates_nothing() -> None:
    table, _, _ = evaluated_labels(60)
    nulls = pa.nulls(60, table.schema.field("labels").type)
    unknown = table.set_column(table.column_names.index("labels"), table.schema.field("labels"), nulls)
    assert calibrate_champion(scoring(LABELS), records(0), unknown) is None
    assert calibrate_champion(scoring(["other"]), records(0), table) is None


def test_answers_are_calibrated_by_their_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    scored_inputs: list[ScoringInput] = []

    def score(lm: Any, inputs: Sequence[ScoringInput]) -> pa.Table:
        scored_inputs.extend(inputs)
        log_probabilities = [-float(len(item.answers[0])) for item in inputs]
        return pa.table(
            {
                "log_probability": pa.array(log_probabilities, pa.float64()),
                "tokens": pa.array([10] * len(log_probabilities), pa.int64()),
            }
        )

    monkeypatch.setattr(module, "likelihood_group", lambda: ScoreGroup("likelihood", 1, {}, score, 64))
    rows = [{"id": f"{row:020x}", "predicted": "x" * (1 + row % 3), "score": float(row % 3 == 0)} for row in range(45)]
    context = scoring()
    vars(context.model)["lm"] = None
    result = calibrate_champion(context, records(40), predictions(rows))
    assert result is not None
    assert result.records == 40  # five are of other records than the test set's
    assert result.temperature != 1
    assert {(item.prompt[0]["content"], item.answers[0]) for item in scored_inputs} == {
        (f"question {row}", "x" * (1 + row % 3)) for row in range(40)
    }
    rows[7]["score"] = -2.5  # a log-likelihood, say
    assert calibrate_champion(context, records(40), predictions(rows)) is None
