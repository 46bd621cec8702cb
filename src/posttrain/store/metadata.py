"""Queries on the metadata database: artifacts, their names, and the runs that made them."""

import os
import platform
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, func, or_, select

from posttrain import __version__
from posttrain.store.artifacts import Artifact
from posttrain.store.database import lock_table, utc_now
from posttrain.store.errors import UserError
from posttrain.store.journaled_database import JournaledDatabase
from posttrain.store.rounds import CanaryQueries, DeploymentQueries, RoundQueries
from posttrain.store.rows import ArtifactRow, Deployment, NamedVersion, Round, Run
from posttrain.store.tables import artifacts, names, rounds, run_inputs, runs, tags

__all__ = ["ArtifactRow", "Deployment", "Metadata", "NamedVersion", "Round", "Run"]

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "pyarrow")


class ArtifactQueries(JournaledDatabase):
    """Artifacts by id and kind."""

    def add_artifact(self, artifact: Artifact) -> None:
        """Inserts a committed artifact's row, unless it is there."""
        row = {
            "id": artifact.id,
            "kind": artifact.kind,
            "meta": artifact.meta,
            "size": artifact.size,
            "files": len(artifact.files),
            "created_at": utc_now(),
        }
        self.insert_new_row(artifacts, row)

    def artifact(self, id: str) -> ArtifactRow | None:
        """Returns the artifact's row, or None."""
        with self.reading() as connection:
            row = connection.execute(select(artifacts).where(artifacts.c.id == id)).mappings().first()
        return _artifact_row(row) if row else None

    def artifacts(self, kind: str | None = None) -> list[ArtifactRow]:
        """Returns all artifacts (of a kind), by id."""
        query = select(artifacts).order_by(artifacts.c.id)
        if kind is not None:
            query = query.where(artifacts.c.kind == kind)
        with self.reading() as connection:
            return [_artifact_row(row) for row in connection.execute(query).mappings()]

    def forget_artifact(self, id: str) -> None:
        """Removes an artifact's row; the runs that made it, and its descendants, stay and no longer refer to it."""
        with self.transaction():
            # References first: the database refuses to delete a row that another one refers to.
            self.update_rows(names, names.c.parent == id, {"parent": None})
            self.update_rows(runs, runs.c.output == id, {"output": None, "sealed": None})
            self.delete_rows(artifacts, artifacts.c.id == id)

    def resolve(self, text: str) -> str:
        """Returns the full id that ``text`` stands for.

        Args:
            text: An id of an artifact or a run, the beginning of one (with or without its kind), or
                ``name@v3``, ``name@v2.3.1`` or ``name@tag``.

        Raises:
            UserError: ``text`` matches no id, or more than one.
        """
        ids = self._ids_by_name(text) or self._ids_by_prefix(text)
        if not ids:
            fix = "see posttrain models list, posttrain data list and posttrain show N (a round)"
            raise UserError(f"nothing here is called `{text}`", fix=fix)
        if len(ids) > 1:
            listed = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
            raise UserError(f"`{text}` could be {listed}", fix="give more of the id")
        return ids[0]

    def _ids_by_name(self, text: str) -> list[str]:
        name, separator, version = text.rpartition("@")
        if not separator:
            return []
        query = select(names.c.artifact_id).where(names.c.name == name)
        # A tag may begin with a v too, such as `verified`: only a v before a digit is a version.
        if not version.startswith("v") or not version[1:2].isdigit():
            at = select(tags.c.version).where(tags.c.name == name, tags.c.tag == version).scalar_subquery()
            query = query.where(names.c.version == at)
        # PostgreSQL refuses integers of more than 32 bits, and `isdigit` is true for digits that `int` does not read.
        elif version[1:].isascii() and version[1:].isdigit() and len(version) < 10:
            query = query.where(names.c.version == int(version[1:]))
        else:
            query = query.where(names.c.semantic == version[1:])
        with self.reading() as connection:
            return list(connection.scalars(query))

    def _ids_by_prefix(self, text: str) -> list[str]:
        if not text:
            return []
        ids: list[str] = []
        with self.reading() as connection:
            for column in (artifacts.c.id, runs.c.id):
                with_kind = column.startswith(text, autoescape=True)
                without_kind = column.contains(f"-{text}", autoescape=True)
                ids += connection.scalars(select(column).where(with_kind | without_kind))
        if text in ids:
            return [text]  # a whole id is meant, even if it begins another
        # Filtered again: SQLite's LIKE does not distinguish upper from lower case.
        return sorted(id for id in ids if id.startswith(text) or id.partition("-")[2].startswith(text))


class NameQueries(JournaledDatabase):
    """Names artifacts: versions count from 1 under each name and never change; a tag can move between them."""

    def name_artifact(
        self,
        name: str,
        artifact_id: str,
        parent: str | None = None,
        *,
        semantic: str | None = None,
        note: str | None = None,
    ) -> int:
        """Gives an artifact the next version of ``name``, or returns the version that it already has.

        Args:
            parent: The artifact that this one grew from.
            semantic: Semantic version such as ``2.3.1``.

        Raises:
            LookupError: the database does not know the artifact or its parent.
            UserError: another artifact has this semantic version.
        """
        with self.transaction() as connection:
            # Two processes that name at once would both read the same highest version and try to insert the next.
            lock_table(connection, names)
            # Checked here, as SQLite's own message about a broken foreign key does not say which one.
            ids = {artifact_id, parent} - {None}
            rows = set(connection.scalars(select(artifacts.c.id).where(artifacts.c.id.in_(ids))))
            if unknown := ids - rows:
                raise LookupError(f"no artifact {', '.join(sorted(map(str, unknown)))}")
            same = select(names.c.version).where(names.c.name == name, names.c.artifact_id == artifact_id)
            version: int | None = connection.scalar(same)
            if version is not None:
                return version
            same_semantic = select(names.c.artifact_id).where(names.c.name == name, names.c.semantic == semantic)
            if semantic is not None and (other := connection.scalar(same_semantic)):
                raise UserError(f"{name}@v{semantic} is {other} already", fix="give another version")
            latest = connection.scalar(select(func.max(names.c.version)).where(names.c.name == name))
            version = (latest or 0) + 1
            row = {
                "name": name,
                "version": version,
                "artifact_id": artifact_id,
                "parent": parent,
                "created_at": utc_now(),
                "semantic": semantic,
                "note": note,
            }
            self.insert_row(names, row)
            return version

    def named(self, name: str, version: int | None = None) -> str | None:
        """Returns the artifact of a version of a name (None: the latest), or None if there is none."""
        versions = [row for row in self.names(name) if version is None or row.version == version]
        return versions[-1].artifact_id if versions else None

    def names(self, name: str | None = None) -> list[NamedVersion]:
        """Returns the versions of one name or of all, by name and version."""
        query, tagged = select(names).order_by(names.c.name, names.c.version), select(tags).order_by(tags.c.tag)
        if name is not None:
            query, tagged = query.where(names.c.name == name), tagged.where(tags.c.name == name)
        with self.reading() as connection:
            versions = [NamedVersion(**row) for row in connection.execute(query).mappings()]
            tags_of: dict[tuple[str, int], tuple[str, ...]] = {}
            for row in connection.execute(tagged).mappings():
                key = row["name"], row["version"]
                tags_of[key] = (*tags_of.get(key, ()), row["tag"])
        return [replace(version, tags=tags_of.get((version.name, version.version), ())) for version in versions]

    def tag(self, name: str, version: int, tag: str) -> None:
        """Points ``name@tag`` to a version, and no longer to another."""
        with self.transaction() as connection:
            lock_table(connection, tags)
            # Delete and insert, as the two databases spell an upsert differently; the transaction makes it one step.
            self.delete_rows(tags, (tags.c.name == name) & (tags.c.tag == tag))
            self.insert_row(tags, {"name": name, "tag": tag, "version": version})

    def forget_version(self, name: str, version: int) -> None:
        """Removes a version of a name, and its tags; the artifact stays."""
        with self.transaction():
            for table in (tags, names):
                self.delete_rows(table, (table.c.name == name) & (table.c.version == version))


class RunQueries(JournaledDatabase):
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
        worker: str | None = None,
    ) -> Run:
        """Records that a stage begins, with its code version and the machine.

        Args:
            worker: Id of the process in `posttrain.store.workers`.
        """
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
            "worker": worker,
            "started_at": utc_now(),
            "detail": {},
        }
        input_rows = [{"run_id": id, "name": name, "artifact_id": value} for name, value in (inputs or {}).items()]
        with self.transaction() as connection:
            self.insert_row(runs, row)
            for input_row in input_rows:
                self.insert_row(run_inputs, input_row)
            return _select_run(connection, runs.c.id == id)

    def seal_run(self, run_id: str, artifact_id: str, seconds: float | None = None) -> None:
        """Records the artifact that a run is about to publish, so that a kill right after it loses no work."""
        self._update(run_id, sealed=artifact_id, seconds=seconds)

    def sealed_runs(self, key: str) -> list[Run]:
        """Returns the runs under ``key`` that sealed an artifact (their output) but did not finish, latest first."""
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
        """Marks a run done; ``output`` is an artifact that `add_artifact` has inserted."""
        return self._end(run_id, "done", output=output, detail=detail, seconds=seconds, error=None)

    def fail_run(self, run_id: str, error: str, seconds: float | None = None) -> Run:
        """Marks a run failed."""
        # PostgreSQL's text holds no NUL, which a message about a binary file may quote.
        return self._end(run_id, "failed", seconds=seconds, error=error.replace("\x00", ""))

    def wait_run(self, run_id: str, reason: str, seconds: float | None = None) -> Run:
        """Marks a run as waiting; ``reason`` is one line."""
        return self._end(run_id, "waiting", seconds=seconds, error=reason)

    def fail_runs(self, ids: Collection[str], error: str) -> int:
        """Marks runs failed that are still running; returns how many."""
        values = {"status": "failed", "error": error, "finished_at": utc_now()}
        return self.update_rows(runs, (runs.c.status == "running") & runs.c.id.in_(ids), values) if ids else 0

    @contextmanager
    def lock_runs(self) -> Iterator[None]:
        """Begins a transaction in which no other process starts a run."""
        with self.transaction() as connection:
            lock_table(connection, runs)
            yield

    def running(self, key: str | None = None) -> list[Run]:
        """Returns the runs of all arms that have not ended, or those under ``key``, oldest first.

        The process of one may have been killed.
        """
        return self._select(runs.c.status == "running", *([] if key is None else [runs.c.key == key]))

    def finished_run(self, key: str) -> Run | None:
        """Returns the latest finished run under ``key``."""
        finished = self._select((runs.c.key == key) & (runs.c.status == "done"))
        return finished[-1] if finished else None

    def finished_keys(self) -> set[str]:
        """Returns the keys of this arm's finished runs, and of all its runs in finished rounds."""
        done = select(rounds.c.number).where(rounds.c.arm == self.arm, rounds.c.status == "done")
        keys = select(runs.c.key).where(runs.c.arm == self.arm, or_(runs.c.status == "done", runs.c.round.in_(done)))
        with self.reading() as connection:
            return set(connection.scalars(keys))

    def run(self, id: str) -> Run | None:
        """Returns the run, or None."""
        runs_of_id = self._select(runs.c.id == id)
        return runs_of_id[0] if runs_of_id else None

    def runs(self, *, round: int | None = None, stage: str | None = None, status: str | None = None) -> list[Run]:
        """Returns this arm's runs, oldest first, filtered by round, stage and status."""
        filters = {"arm": self.arm, "round": round, "stage": stage, "status": status}
        return self._select(*(runs.c[name] == value for name, value in filters.items() if value is not None))

    def producers(self, artifact_id: str) -> list[Run]:
        """Returns the finished runs that made the artifact, oldest first."""
        return self._select(runs.c.output == artifact_id, runs.c.status == "done")

    def consumers(self, artifact_id: str) -> list[Run]:
        """Returns the runs, finished or not, with the artifact as an input, oldest first."""
        run_ids = select(run_inputs.c.run_id).where(run_inputs.c.artifact_id == artifact_id)
        return self._select(runs.c.id.in_(run_ids))

    def _select(self, *conditions: ColumnElement[bool]) -> list[Run]:
        with self.reading() as connection:
            rows = connection.execute(select(runs).where(*conditions).order_by(runs.c.number)).mappings().all()
            return _with_inputs(connection, rows)

    def _end(self, run_id: str, status: str, **values: Any) -> Run:
        # Removed rather than written as NULL: an earlier value, such as the seconds of `seal_run`, must survive.
        if values.get("detail") is None:
            values.pop("detail", None)
        else:
            values["detail"] = dict(values["detail"])
        if values.get("seconds") is None:
            values.pop("seconds", None)
        with self.transaction() as connection:
            self._update(run_id, status=status, finished_at=utc_now(), **values)
            return _select_run(connection, runs.c.id == run_id)

    def _update(self, run_id: str, **values: Any) -> None:
        if not self.update_rows(runs, runs.c.id == run_id, values):
            raise LookupError(f"no run {run_id}")


class Metadata(ArtifactQueries, NameQueries, RunQueries, RoundQueries, DeploymentQueries, CanaryQueries):
    """Reads and writes all rows of a workspace. Each method is a transaction, or joins the one that it is called in:

    ``with metadata.transaction(): metadata.add_artifact(...); metadata.finish_run(...)``
    """


def _artifact_row(row: RowMapping) -> ArtifactRow:
    values: dict[str, Any] = dict(row)
    return ArtifactRow(**values)


def _select_run(connection: Connection, condition: ColumnElement[bool]) -> Run:
    return _with_inputs(connection, connection.execute(select(runs).where(condition)).mappings().all())[0]


def _with_inputs(connection: Connection, rows: Iterable[Mapping[str, Any] | RowMapping]) -> list[Run]:
    run_rows = [dict(row) for row in rows]
    inputs: dict[str, dict[str, str]] = {row["id"]: {} for row in run_rows}
    if run_rows:
        query = select(run_inputs).order_by(run_inputs.c.run_id, run_inputs.c.name)
        if len(run_rows) <= 100:  # a longer list of ids is slower than all rows
            query = query.where(run_inputs.c.run_id.in_(list(inputs)))
        for run_id, name, artifact_id in connection.execute(query):
            if run_id in inputs:
                inputs[run_id][name] = artifact_id
    internal = ("number", "sealed", "arm")
    return [
        Run(inputs=inputs[row["id"]], **{name: value for name, value in row.items() if name not in internal})
        for row in run_rows
    ]


def environment() -> dict[str, Any]:
    """Returns Python's and packages' versions, platform, processors and host of this process."""
    return dict(_environment())  # a copy, as the cached one must not change with a caller's


@cache
def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "host": platform.node(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
