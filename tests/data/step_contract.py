"""What every step of the pipeline keeps to. A step's test class inherits and gives ``step`` and ``table``."""

import json
import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.records.identity import assign_ids
from posttrain.data.records.outcome import Outcome
from posttrain.data.records.schema import CHANGED, RECORD, REJECTED, concat, records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.registry import STEPS
from posttrain.data.steps.step import RowStep, Step


def table_of(*rows: dict[str, Any] | str) -> pa.Table:
    """A RECORD table: a string is plain text, a mapping gives columns; a prompt may be a string."""
    made = []
    for line, row in enumerate(rows, 1):
        values = {"text": row} if isinstance(row, str) else dict(row)
        if isinstance(values.get("prompt"), str):
            values["prompt"] = [{"role": "user", "content": values["prompt"]}]
        made.append({**dict.fromkeys(RECORD.names), "source": "f", "line": line, "meta": "{}", **values})
    return assign_ids(records(made))


def lines(table: pa.Table) -> list[int]:
    return [int(line) for line in table["line"].to_pylist()]


def reasons(outcome: Outcome) -> dict[int, str]:
    """Why each line went."""
    return dict(zip(lines(outcome.rejected), outcome.rejected["reason"].to_pylist(), strict=True))


class StepContract:
    """Both halves together are the table, nothing depends on how it is cut, and every change is told."""

    adds_rows = False

    @pytest.fixture
    def step(self) -> Step:
        raise NotImplementedError

    @pytest.fixture
    def table(self) -> pa.Table:
        """Records of which the step keeps some and, unless it only changes or measures, rejects some."""
        raise NotImplementedError

    @pytest.fixture
    def evaluation(self) -> pa.Table:
        return RECORD.empty_table()

    def test_it_is_registered(self, step: Step) -> None:
        assert STEPS[step.name] is type(step)
        assert type(step).__doc__

    def test_it_tells_what_becomes_of_every_row(self, step: Step, table: pa.Table, evaluation: pa.Table) -> None:
        kept, rejected, changed, facts = apply_step(step, table, evaluation)
        assert kept.schema == RECORD
        assert rejected.schema == REJECTED
        assert changed.schema == CHANGED
        if not self.adds_rows:
            assert sorted(lines(kept) + lines(rejected)) == sorted(lines(table))
        assert lines(kept) == sorted(lines(kept))
        assert lines(rejected) == sorted(lines(rejected))
        given, stories = set(table["id"].to_pylist()), _pairs(changed)
        for now in kept["id"].to_pylist():
            assert now in given or now in stories
        assert set(stories.values()) <= given
        for row in rejected.to_pylist():
            assert row["step"] == step.name
            assert row["reason"]
            assert row["id"] in given
        assert all(len(values) == table.num_rows for values in facts.values())
        assert kept.equals(assign_ids(kept)), "ids are those of the content"

    def test_it_does_the_same_again_after_a_journey(self, step: Step, table: pa.Table, evaluation: pa.Table) -> None:
        again = pickle.loads(pickle.dumps(step))  # noqa: S301
        assert again == step
        assert _as_json(apply_step(again, table, evaluation)) == _as_json(apply_step(step, table, evaluation))

    def test_an_empty_table_passes(self, step: Step, evaluation: pa.Table) -> None:
        kept, rejected, changed, _ = apply_step(step, RECORD.empty_table(), evaluation)
        assert (kept.num_rows, rejected.num_rows, changed.num_rows) == (0, 0, 0)

    def test_its_key_is_json_and_tells_settings_apart(self, step: Step) -> None:
        assert json.loads(json.dumps(step.key())) == step.key()
        assert step.key()["step"] == step.name

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_where_the_table_is_cut_does_not_matter(
        self, step: Step, table: pa.Table, evaluation: pa.Table, size: int
    ) -> None:
        parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
        if isinstance(step, RowStep):
            whole, cut = step.apply(table), [step.apply(one) for one in parts]
            assert _rows(whole.kept) == _rows(concat([one.kept for one in cut]))
            assert _rows(whole.rejected) == _rows(concat([one.rejected for one in cut], REJECTED))
            assert _rows(whole.changed) == _rows(concat([one.changed for one in cut], CHANGED))
        else:
            sketch = step.sketch  # type: ignore[attr-defined]
            assert _rows(sketch(table)) == [row for one in parts for row in _rows(sketch(one))]


def _pairs(changed: pa.Table) -> dict[str, str]:
    return dict(zip(changed["id"].to_pylist(), changed["before"].to_pylist(), strict=True))


def _rows(table: pa.Table) -> Sequence[Any]:
    return [repr(row) for row in table.to_pylist()]


def _as_json(outcome: Outcome) -> str:
    tables = [table.to_pylist() for table in outcome[:3]]
    return json.dumps([*tables, {name: values.to_pylist() for name, values in outcome.facts.items()}])
