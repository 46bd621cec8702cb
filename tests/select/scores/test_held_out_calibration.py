"""The champion is calibrated by what evaluation has judged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.evaluate.metrics import expected_calibration_error
from posttrain.models.task import TaskConfig
from posttrain.select.scores import calibration as module
from posttrain.select.scores.calibration import calibrate_champion, calibrate_labels
from posttrain.select.scores.config import ScoringConfig
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel

LABELS = ["lost card", "refund", "top up"]


def scoring(labels: Sequence[str] = (), most: int = 500) -> ScoringContext:
    def never() -> Any:
        raise AssertionError("no model is asked")

    return ScoringContext(ScoringModel("m", TaskConfig(), never), labels, ScoringConfig(calibration=most))


def predictions(rows: list[dict[str, Any]]) -> pa.Table:
    named = {"id": pa.string(), "expected": pa.string(), "predicted": pa.string(), "score": pa.float64()}
    schema = pa.schema([*named.items(), ("labels", pa.list_(pa.float32()))])
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


def judged_labels(count: int) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    logs = 3 * generator.normal(size=(count, 3))
    logs = (logs - np.logaddexp.reduce(logs, axis=1)[:, None]).astype(np.float32)
    truth = generator.integers(3, size=count)
    rows = [{"id": f"{row:020x}", "expected": LABELS[truth[row]], "labels": logs[row].tolist()} for row in range(count)]
    return predictions(rows), logs, truth


def test_labels_are_calibrated_by_what_the_evaluation_says_and_no_model_is_asked() -> None:
    table, logs, truth = judged_labels(60)
    mixed = table.take(np.random.default_rng(1).permutation(60))
    result = calibrate_champion(scoring(LABELS), records(0), mixed, expected_calibration_error)
    assert result == calibrate_labels(logs.astype(np.float64), truth, expected_calibration_error)
    assert result is not None
    assert result.temperature > 1.5


def test_at_most_so_many_are_taken_and_none_where_it_is_off() -> None:
    table, _, _ = judged_labels(60)
    subset = calibrate_champion(scoring(LABELS, most=40), records(0), table, expected_calibration_error)
    assert subset is not None
    assert subset.records == 40
    assert calibrate_champion(scoring(LABELS, most=0), records(0), table, expected_calibration_error) is None


def test_a_suite_that_does_not_measure_labels_calibrates_nothing() -> None:
    table, _, _ = judged_labels(60)
    nulls = pa.nulls(60, table.schema.field("labels").type)
    unknown = table.set_column(table.column_names.index("labels"), table.schema.field("labels"), nulls)
    assert calibrate_champion(scoring(LABELS), records(0), unknown, expected_calibration_error) is None
    assert calibrate_champion(scoring(["other"]), records(0), table, expected_calibration_error) is None


def test_answers_are_calibrated_by_how_likely_the_champion_finds_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ScoringInput] = []

    def score(lm: Any, subset: Sequence[ScoringInput]) -> pa.Table:
        asked.extend(subset)
        sums = [-float(len(item.answers[0])) for item in subset]
        return pa.table(
            {"log_probability": pa.array(sums, pa.float64()), "tokens": pa.array([10] * len(sums), pa.int64())}
        )

    monkeypatch.setattr(module, "likelihood_group", lambda: ScoreGroup("likelihood", 1, {}, score, 64))
    rows = [{"id": f"{row:020x}", "predicted": "x" * (1 + row % 3), "score": float(row % 3 == 0)} for row in range(45)]
    how = scoring()
    vars(how.model)["lm"] = None
    result = calibrate_champion(how, records(40), predictions(rows), expected_calibration_error)
    assert result is not None
    assert result.records == 40  # five are of other records than the test set's
    assert result.temperature != 1
    assert {(item.prompt[0]["content"], item.answers[0]) for item in asked} == {
        (f"question {row}", "x" * (1 + row % 3)) for row in range(40)
    }
    rows[7]["score"] = -2.5  # a log-likelihood, say
    assert calibrate_champion(how, records(40), predictions(rows), expected_calibration_error) is None
