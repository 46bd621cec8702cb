"""Queries on the names of artifacts, with versions and tags, such as ``support@v3`` or ``support@v2.3.1``."""

from dataclasses import replace

from sqlalchemy import func, select

from posttrain.store.database import lock_table, utc_now
from posttrain.store.errors import UserError
from posttrain.store.journaled_database import JournaledDatabase
from posttrain.store.rows import NamedVersion
from posttrain.store.tables import artifacts, names, tags


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
