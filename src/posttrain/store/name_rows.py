"""Names and their versions, such as the dataset ``support@v3``."""

from sqlalchemy import func, insert, select

from posttrain.store.clock import now
from posttrain.store.database import Database, lock_table
from posttrain.store.records import Named
from posttrain.store.tables import artifacts, names


class NameRows(Database):
    """Versions count from 1 under each name and never change."""

    def name_artifact(self, name: str, artifact_id: str, parent: str | None = None) -> int:
        """Give an artifact the next version of ``name``, or return the one that it has.

        Args:
            parent: the artifact that this one grew from.

        Raises:
            LookupError: the database does not know the artifact or its parent.
        """
        with self.transaction() as connection:
            lock_table(connection, names)
            wanted = {artifact_id, parent} - {None}
            known = set(connection.scalars(select(artifacts.c.id).where(artifacts.c.id.in_(wanted))))
            if unknown := wanted - known:
                raise LookupError(f"no artifact {', '.join(sorted(map(str, unknown)))}")
            same = select(names.c.version).where(names.c.name == name, names.c.artifact_id == artifact_id)
            version: int | None = connection.scalar(same)
            if version is not None:
                return version
            latest = connection.scalar(select(func.max(names.c.version)).where(names.c.name == name))
            version = (latest or 0) + 1
            row = {
                "name": name,
                "version": version,
                "artifact_id": artifact_id,
                "parent": parent,
                "created_at": now(),
            }
            connection.execute(insert(names).values(row))
            return version

    def named(self, name: str, version: int | None = None) -> str | None:
        """The artifact behind a version of a name (None: the latest), or None if there is none."""
        found = [row for row in self.names(name) if version is None or row.version == version]
        return found[-1].artifact_id if found else None

    def names(self, name: str | None = None) -> list[Named]:
        """Versions of one name or of all, by name and version."""
        query = select(names).order_by(names.c.name, names.c.version)
        if name is not None:
            query = query.where(names.c.name == name)
        with self.reading() as connection:
            return [Named(**row) for row in connection.execute(query).mappings()]
