"""The artifacts that the database knows, and what made and used them."""

from typing import Any

from sqlalchemy import RowMapping, delete, select, update

from posttrain.store.artifacts import Artifact
from posttrain.store.clock import now
from posttrain.store.database import Database, insert_new
from posttrain.store.errors import UserError
from posttrain.store.records import ArtifactRow
from posttrain.store.tables import artifacts, names, runs, tags


class ArtifactRows(Database):
    """Artifacts by id and kind."""

    def add_artifact(self, artifact: Artifact) -> None:
        """Make a committed artifact known; nothing happens if it is."""
        row = {
            "id": artifact.id,
            "kind": artifact.kind,
            "meta": artifact.meta,
            "size": artifact.size,
            "files": len(artifact.files),
            "created_at": now(),
        }
        with self.transaction() as connection:
            insert_new(connection, artifacts, row)

    def artifact(self, id: str) -> ArtifactRow | None:
        """The artifact's row, or None."""
        with self.reading() as connection:
            row = connection.execute(select(artifacts).where(artifacts.c.id == id)).mappings().first()
        return _artifact(row) if row else None

    def artifacts(self, kind: str | None = None) -> list[ArtifactRow]:
        """All artifacts (of a kind), by id."""
        query = select(artifacts).order_by(artifacts.c.id)
        if kind is not None:
            query = query.where(artifacts.c.kind == kind)
        with self.reading() as connection:
            return [_artifact(row) for row in connection.execute(query).mappings()]

    def forget_artifact(self, id: str) -> None:
        """Remove an artifact's row; the runs that made it, and what grew from it, stay and no longer lead to it."""
        with self.transaction() as connection:
            connection.execute(update(names).where(names.c.parent == id).values(parent=None))
            connection.execute(update(runs).where(runs.c.output == id).values(output=None, sealed=None))
            connection.execute(delete(artifacts).where(artifacts.c.id == id))

    def resolve(self, text: str) -> str:
        """The full id that ``text`` stands for.

        Args:
            text: an id of an artifact or a run, the beginning of one (with or without its kind), or
                ``name@v3``, ``name@v2.3.1`` or ``name@tag``.

        Raises:
            UserError: nothing, or more than one thing, is meant.
        """
        found = self._named(text) or self._beginning(text)
        if not found:
            fix = "posttrain models list, posttrain data list and posttrain show N (a round) say what there is"
            raise UserError(f"nothing here is called `{text}`", fix=fix)
        if len(found) > 1:
            shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            raise UserError(f"`{text}` could be {shown}", fix="give more of the id")
        return found[0]

    def _named(self, text: str) -> list[str]:
        name, separator, said = text.rpartition("@")
        if not separator:
            return []
        query = select(names.c.artifact_id).where(names.c.name == name)
        if not said.startswith("v") or not said[1:2].isdigit():
            at = select(tags.c.version).where(tags.c.name == name, tags.c.tag == said).scalar_subquery()
            query = query.where(names.c.version == at)
        elif said[1:].isascii() and said[1:].isdigit() and len(said) < 10:
            query = query.where(names.c.version == int(said[1:]))
        else:
            query = query.where(names.c.semantic == said[1:])
        with self.reading() as connection:
            return list(connection.scalars(query))

    def _beginning(self, text: str) -> list[str]:
        if not text:
            return []
        found: list[str] = []
        with self.reading() as connection:
            for column in (artifacts.c.id, runs.c.id):
                with_kind = column.startswith(text, autoescape=True)
                without_kind = column.contains(f"-{text}", autoescape=True)
                found += connection.scalars(select(column).where(with_kind | without_kind))
        if text in found:
            return [text]
        # SQLite's LIKE takes upper and lower case for the same.
        return sorted(id for id in found if id.startswith(text) or id.partition("-")[2].startswith(text))


def _artifact(row: RowMapping) -> ArtifactRow:
    values: dict[str, Any] = dict(row)
    return ArtifactRow(**values)
