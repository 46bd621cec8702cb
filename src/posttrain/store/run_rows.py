"""Runs: every execution of a stage, with its inputs and its outcome."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, insert, select, update

from posttrain import __version__
from posttrain.store.clock import now
from posttrain.store.database import Database
from posttrain.store.environment import environment
from posttrain.store.records import Run
from posttrain.store.tables import run_inputs, runs


class RunRows(Database):
    """Runs in the order of their start."""

    def start_run(
        self,
        stage: str,
        key: str,
        *,
        round: int | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> Run:
        """Record that a stage begins, with the code and the machine it runs on."""
        id = f"run-{uuid.uuid4().hex[:16]}"
        row = {
            "id": id,
            "stage": stage,
            "key": key,
            "arm": self.arm,
            "round": round,
            "status": "running",
            "seed": seed,
            "config": dict(config or {}),
            "code_version": __version__,
            "environment": environment(),
            "started_at": now(),
            "detail": {},
        }
        given = [{"run_id": id, "name": name, "artifact_id": value} for name, value in (inputs or {}).items()]
        with self.transaction() as connection:
            connection.execute(insert(runs).values(row))
            if given:
                connection.execute(insert(run_inputs), given)
            return _one(connection, runs.c.id == id)

    def seal_run(self, run_id: str, artifact_id: str, seconds: float | None = None) -> None:
        """Record the artifact that a run is about to publish, so that a kill then does not lose its work."""
        self._update(run_id, sealed=artifact_id, seconds=seconds)

    def sealed_runs(self, key: str) -> list[Run]:
        """Runs under ``key`` that sealed an artifact (their output) and did not finish, latest first."""
        unfinished = (runs.c.key == key) & runs.c.sealed.is_not(None) & (runs.c.status != "done")
        with self.reading() as connection:
            rows = connection.execute(select(runs).where(unfinished).order_by(runs.c.number.desc())).mappings().all()
            return _with_inputs(connection, [{**row, "output": row["sealed"]} for row in rows])

    def finish_run(
        self,
        run_id: str,
        output: str | None = None,
        detail: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> Run:
        """Mark a run done; ``output`` is an artifact that `add_artifact` made known."""
        return self._end(run_id, "done", output=output, detail=detail, seconds=seconds, error=None)

    def fail_run(self, run_id: str, error: str, seconds: float | None = None) -> Run:
        """Mark a run failed."""
        return self._end(run_id, "failed", seconds=seconds, error=error.replace("\x00", ""))

    def wait_run(self, run_id: str, what: str, seconds: float | None = None) -> Run:
        """Mark a run as waiting for ``what``, one line."""
        return self._end(run_id, "waiting", seconds=seconds, error=what)

    def fail_interrupted(self) -> int:
        """Mark the runs of killed processes failed; only for who holds the lock. Returns how many."""
        query = update(runs).where(runs.c.status == "running")
        with self.transaction() as connection:
            values = {"status": "failed", "error": "interrupted", "finished_at": now()}
            return connection.execute(query.values(values)).rowcount

    def finished_run(self, key: str) -> Run | None:
        """The latest finished run under ``key``."""
        found = self._select((runs.c.key == key) & (runs.c.status == "done"))
        return found[-1] if found else None

    def run(self, id: str) -> Run | None:
        """The run, or None."""
        found = self._select(runs.c.id == id)
        return found[0] if found else None

    def runs(self, *, round: int | None = None, stage: str | None = None, status: str | None = None) -> list[Run]:
        """Runs of this arm, oldest first, of a round, a stage and a status where given."""
        given = {"arm": self.arm, "round": round, "stage": stage, "status": status}
        return self._select(*(runs.c[name] == value for name, value in given.items() if value is not None))

    def producers(self, artifact_id: str) -> list[Run]:
        """Finished runs that made the artifact, oldest first."""
        return self._select(runs.c.output == artifact_id, runs.c.status == "done")

    def consumers(self, artifact_id: str) -> list[Run]:
        """Runs, finished or not, that took the artifact as an input, oldest first."""
        takers = select(run_inputs.c.run_id).where(run_inputs.c.artifact_id == artifact_id)
        return self._select(runs.c.id.in_(takers))

    def _select(self, *conditions: ColumnElement[bool]) -> list[Run]:
        with self.reading() as connection:
            rows = connection.execute(select(runs).where(*conditions).order_by(runs.c.number)).mappings().all()
            return _with_inputs(connection, rows)

    def _end(self, run_id: str, status: str, **values: Any) -> Run:
        if values.get("detail") is None:
            values.pop("detail", None)
        else:
            values["detail"] = dict(values["detail"])
        if values.get("seconds") is None:
            values.pop("seconds", None)
        with self.transaction() as connection:
            self._update(run_id, status=status, finished_at=now(), **values)
            return _one(connection, runs.c.id == run_id)

    def _update(self, run_id: str, **values: Any) -> None:
        with self.transaction() as connection:
            if not connection.execute(update(runs).where(runs.c.id == run_id).values(values)).rowcount:
                raise LookupError(f"no run {run_id}")


def _one(connection: Connection, condition: ColumnElement[bool]) -> Run:
    return _with_inputs(connection, connection.execute(select(runs).where(condition)).mappings().all())[0]


def _with_inputs(connection: Connection, rows: Iterable[Mapping[str, Any] | RowMapping]) -> list[Run]:
    found = [dict(row) for row in rows]
    inputs: dict[str, dict[str, str]] = {row["id"]: {} for row in found}
    if found:
        wanted = select(run_inputs).order_by(run_inputs.c.run_id, run_inputs.c.name)
        if len(found) <= 100:  # a longer list of ids is slower than all rows
            wanted = wanted.where(run_inputs.c.run_id.in_(list(inputs)))
        for run_id, name, artifact_id in connection.execute(wanted):
            if run_id in inputs:
                inputs[run_id][name] = artifact_id
    unseen = ("number", "sealed", "arm")
    return [
        Run(inputs=inputs[row["id"]], **{name: value for name, value in row.items() if name not in unseen})
        for row in found
    ]
