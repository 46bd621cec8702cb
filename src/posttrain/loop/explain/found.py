"""Where in a workspace a record stands."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.evaluate.artifact import read_evaluation
from posttrain.loop.history import carried_dataset, finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.stages.evaluation import suite_records
from posttrain.loop.turn import Turn
from posttrain.store.errors import UserError
from posttrain.store.records import Run

Kind = Literal["evaluated", "training", "pool"]

_SHORTEST = 4


@dataclass(frozen=True)
class Found:
    """A record and the kind of set that it is in; of several the first of `Kind`.

    Attributes:
        record: its row of RECORD.
        suite: the name of the suite, where it is evaluated.
        prediction: its row of the champion's predictions there; None where the suite's sample leaves it out.
    """

    kind: Kind
    record: dict[str, Any]
    suite: str | None = None
    prediction: dict[str, Any] | None = None


def find(turn: Turn, text: str) -> Found:
    """The record whose id, or whose input's id, begins with ``text``.

    Raises:
        UserError: nothing has run yet, the text is too short, or it names no record or records of several inputs.
    """
    if Registry(turn.workspace).champion is None or not finished_rounds(turn.workspace):
        raise UserError("there is no champion yet", fix="posttrain run")
    if len(text) < _SHORTEST:
        raise UserError(f"`{text}` is too short", fix=f"give at least {_SHORTEST} characters of the id")
    evaluation = last_evaluation(turn)
    found = [
        (kind, suite, row)
        for kind, suite, table in _tables(turn, evaluation)
        for row in table.filter(_begins(table, text)).to_pylist()
    ]
    if not found:
        fix = "posttrain select lists ids of the pool, posttrain show train@v1 those of a training set"
        raise UserError(f"no record here is called `{text}`", fix=fix)
    if (several := len({row["input_id"] for _, _, row in found})) > 1:
        raise UserError(f"`{text}` could be records of {several} inputs", fix="give more of the id")
    kind, suite, record = found[0]
    if kind == "pool":  # its label has another id, being of the answer too
        learned = turn.dataset(carried_dataset(turn.workspace)).records
        same = learned.filter(compute.equal(learned["input_id"], record["input_id"])).to_pylist()
        kind, record = ("training", same[0]) if same else (kind, record)
    if kind != "evaluated" or suite is None or evaluation is None:
        return Found(kind, record)
    table = read_evaluation(turn.path(str(evaluation.output)))[suite].predictions
    rows = table.filter(compute.equal(table["id"], record["id"])).to_pylist()
    return Found(kind, record, suite, rows[0] if rows else None)


def last_evaluation(turn: Turn) -> Run | None:
    """The run that last measured the champion; None where a later change left none."""
    champion = Registry(turn.workspace).in_service
    runs = [run for run in turn.workspace.metadata.runs(stage="evaluate", status="done") if run.output]
    mine = [run for run in runs if run.inputs.get("model") == champion]
    return max(mine, key=lambda run: run.started_at, default=None)


def last_pool(turn: Turn) -> str:
    """The id of the pool that the last round with one had."""
    pools = [entry.detail["pool"] for entry in finished_rounds(turn.workspace)]
    return str(pools[-1])


def _tables(turn: Turn, evaluation: Run | None) -> Iterator[tuple[Kind, str | None, pa.Table]]:
    if evaluation is not None:
        test = turn.workspace.artifacts.get(evaluation.inputs["test"])
        measured = read_evaluation(turn.path(str(evaluation.output)))
        for name, suite in turn.config.evaluate.suites.items():
            if name in measured:
                yield "evaluated", name, suite_records(turn, suite, test)
    yield "training", None, turn.dataset(carried_dataset(turn.workspace)).records
    yield "pool", None, turn.dataset(last_pool(turn)).records


def _begins(table: pa.Table, text: str) -> pa.ChunkedArray:
    return compute.or_(compute.starts_with(table["id"], text), compute.starts_with(table["input_id"], text))
