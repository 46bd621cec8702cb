"""The contract of data steps, as a test class to inherit from.

class TestShout(StepContract):
    @pytest.fixture
    def step(self):
        return Shout()

    @pytest.fixture
    def table(self):
        return table_of("LOUD", "quiet")
"""

import json
import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import CHANGED, RECORD, REJECTED, assign_ids, concat, records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.registry import STEPS
from posttrain.data.steps.step import DataStep, GlobalStep, RowStep
from posttrain.data.versions.recipe import config_name


def table_of(*rows: dict[str, Any] | str) -> pa.Table:
    """Builds a RECORD table: a string is plain text, a mapping gives columns; a prompt may be a string."""
    values = []
    for line, row in enumerate(rows, 1):
        fields: dict[str, Any] = {"text": row} if isinstance(row, str) else dict(row)
        if isinstance(fields.get("prompt"), str):
            fields["prompt"] = [{"role": "user", "content": fields["prompt"]}]
        values.append({**dict.fromkeys(RECORD.names), "source": "f", "line": line, "meta": "{}", **fields})
    return assign_ids(records(values))


def lines(table: pa.Table) -> list[int]:
    """Returns the line of each record."""
    return [int(line) for line in table["line"].to_pylist()]


def reasons(outcome: Outcome) -> dict[int, str]:
    """Returns the reason of each rejection, by line."""
    return dict(zip(lines(outcome.rejected), outcome.rejected["reason"].to_pylist(), strict=True))


class StepContract:
    """Tests what every data step promises; inherit and define the fixtures ``step`` and ``table``.

    ``table`` holds records of which the step keeps some and, unless it only changes or measures, rejects some. Kept and
    rejected rows together are the table, results do not depend on where the table is cut, and every change of a record
    is listed.

    Attributes:
        adds_rows: True if the step adds records, such as augmented ones.
    """

    adds_rows = False

    @pytest.fixture
    def evaluation(self) -> pa.Table:
        """Returns the evaluation records that the step sees; none by default."""
        return RECORD.empty_table()

    def test_the_registry_finds_it(self, step: DataStep) -> None:
        assert STEPS[config_name(step)] is type(step)
        assert type(step).__doc__

    def test_every_row_is_kept_changed_or_rejected(self, step: DataStep, table: pa.Table, evaluation: pa.Table) -> None:
        kept, rejected, changed, facts = apply_step(step, table, evaluation)
        assert kept.schema == RECORD
        assert rejected.schema == REJECTED
        assert changed.schema == CHANGED
        if not self.adds_rows:
            assert sorted(lines(kept) + lines(rejected)) == sorted(lines(table))
        assert lines(kept) == sorted(lines(kept))
        assert lines(rejected) == sorted(lines(rejected))
        ids, origins = set(table["id"].to_pylist()), _origins(changed)
        assert all(id in ids or id in origins for id in kept["id"].to_pylist())
        assert set(origins.values()) <= ids
        for row in rejected.to_pylist():
            assert row["step"] == step.name
            assert row["reason"]
            assert row["id"] in ids
        assert all(len(values) == table.num_rows for values in facts.values())
        assert kept.equals(assign_ids(kept)), "ids are those of the content"

    def test_pickling_changes_no_result(self, step: DataStep, table: pa.Table, evaluation: pa.Table) -> None:
        copy = pickle.loads(pickle.dumps(step))  # noqa: S301
        # Workers get the step by pickle: one that keeps a compiled or open object must still be the same.
        assert copy == step
        assert _as_json(apply_step(copy, table, evaluation)) == _as_json(apply_step(step, table, evaluation))

    def test_an_empty_table_passes(self, step: DataStep, evaluation: pa.Table) -> None:
        kept, rejected, changed, _ = apply_step(step, RECORD.empty_table(), evaluation)
        assert (kept.num_rows, rejected.num_rows, changed.num_rows) == (0, 0, 0)

    def test_its_key_is_json(self, step: DataStep) -> None:
        # A version's id hashes the keys of its steps: a value that JSON changes would name another version.
        assert json.loads(json.dumps(step.key())) == step.key()
        assert step.key()["step"] == step.name

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_where_the_table_is_cut_changes_nothing(self, step: DataStep, table: pa.Table, size: int) -> None:
        # A shard's borders follow from file sizes, and must not decide what becomes of a record.
        parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
        if isinstance(step, RowStep):
            whole, cut = step.apply(table), [step.apply(part) for part in parts]
            assert _rows(whole.kept) == _rows(concat([outcome.kept for outcome in cut]))
            assert _rows(whole.rejected) == _rows(concat([outcome.rejected for outcome in cut], REJECTED))
            assert _rows(whole.changed) == _rows(concat([outcome.changed for outcome in cut], CHANGED))
        else:
            assert isinstance(step, GlobalStep)
            assert _rows(step.sketch(table)) == [row for part in parts for row in _rows(step.sketch(part))]


def _origins(changed: pa.Table) -> dict[str, str]:
    return dict(zip(changed["id"].to_pylist(), changed["before"].to_pylist(), strict=True))


def _rows(table: pa.Table) -> Sequence[Any]:
    return [repr(row) for row in table.to_pylist()]


def _as_json(outcome: Outcome) -> str:
    tables = [table.to_pylist() for table in outcome[:3]]
    return json.dumps([*tables, {name: values.to_pylist() for name, values in outcome.facts.items()}])
