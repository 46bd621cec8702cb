"""The database of a workspace, whose changes are in the journal before they are committed."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Table,
    Text,
    cast,
    delete,
    func,
    insert,
    inspect,
    select,
    type_coerce,
    update,
)

from posttrain.store.database import RECOVER, Database, UtcDateTime, insert_new
from posttrain.store.errors import LostDatabaseError
from posttrain.store.journal import Change, Journal
from posttrain.store.label_tables import accounts, audit, guidelines, label_answers, label_batches, label_items
from posttrain.store.tables import artifacts, canaries, deployments, journal, names, rounds, run_inputs, runs, tags

log = logging.getLogger("posttrain")

JOURNALED = (
    *(artifacts, runs, run_inputs, rounds, deployments, canaries, names, tags),
    *(accounts, audit, guidelines, label_batches, label_items, label_answers),
)
"""The tables whose rows the journal holds; a row comes after those that it refers to.

Leases and tokens are left out: after a loss, people sign in again and are given items afresh.
"""

NOT_JOURNALED = {(artifacts.name, "meta")}
"""Columns that the journal leaves out: the artifact's manifest has them."""

_ONLY = journal.c.id == 1


class JournaledDatabase(Database):
    """Writes rows, and the same changes to a journal before each commit.

    Args:
        url: SQLAlchemy's URL of the database.
        create: True to create missing tables.
        write: False refuses writing transactions.
        journal: The journal; None for none.

    Raises:
        LostDatabaseError: the journal holds work that the database has lost.
    """

    def __init__(self, url: str, *, create: bool = False, write: bool = True, journal: Journal | None = None) -> None:
        self.journal = journal
        super().__init__(url, create=create, write=write)
        if journal is None:
            return
        try:
            self._compare_with_journal(journal)
        except BaseException:
            self.close()
            raise

    def insert_row(self, table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
        """Inserts a row; returns its primary key by column."""
        with self.transaction() as connection:
            statement = insert(table).values(values).returning(*table.primary_key.columns)
            key = dict(connection.execute(statement).mappings().one())
            self._note(table, key, {**_empty_row(table), **values, **key})
            return key

    def insert_rows(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Inserts many rows with the same columns; returns their primary keys in the order of the rows."""
        if not rows:
            return []
        with self.transaction() as connection:
            number = table.autoincrement_column
            if number is not None:
                # Numbered before, as an INSERT that returns the numbers of so many rows takes several times as long.
                numbers = _next_numbers(connection, number, len(rows))
                rows = [{**row, number.name: next_number} for row, next_number in zip(rows, numbers, strict=True)]
            connection.execute(insert(table), rows)
            keys = [{column.name: row[column.name] for column in table.primary_key.columns} for row in rows]
            for key, row in zip(keys, rows, strict=True):
                self._note(table, key, {**_empty_row(table), **row})
            return keys

    def insert_new_row(self, table: Table, values: Mapping[str, Any]) -> None:
        """Inserts a row unless one with the same key is there."""
        with self.transaction() as connection:
            if insert_new(connection, table, dict(values)):
                self._note(table, values, {**_empty_row(table), **values})

    def update_rows(self, table: Table, condition: ColumnElement[bool], values: Mapping[str, Any]) -> int:
        """Sets columns of all rows that meet the condition; returns how many."""
        with self.transaction() as connection:
            statement = update(table).where(condition).values(values).returning(*table.primary_key.columns)
            keys = [dict(key) for key in connection.execute(statement).mappings()]
            for key in keys:
                self._note(table, key, values)
            return len(keys)

    def delete_rows(self, table: Table, condition: ColumnElement[bool]) -> None:
        """Removes all rows that meet the condition."""
        with self.transaction() as connection:
            statement = delete(table).where(condition).returning(*table.primary_key.columns)
            for key in connection.execute(statement).mappings().all():
                self._note(table, dict(key), None)

    @contextmanager
    def savepoint(self) -> Iterator[Connection]:
        """Begins a part of a transaction that an exception undoes alone, while the transaction continues."""
        with self.transaction() as connection:
            noted = len(self._changes)
            try:
                with connection.begin_nested():
                    yield connection
            except BaseException:
                del self._changes[noted:]
                raise

    def count_changes(self) -> int:
        """Returns the number of changes that this thread's transaction has noted for the journal so far."""
        return len(self._changes)

    def count_rows(self) -> dict[str, int]:
        """Counts the rows of each journaled table."""
        with self.reading() as connection:
            return {table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in JOURNALED}

    def position(self) -> int:
        """Returns the number of the last committed transaction.

        Raises:
            LostDatabaseError: the database does not know it.
        """
        with self.reading() as connection:
            has_table = inspect(connection).has_table(journal.name)
            number = connection.scalar(select(journal.c.number).where(_ONLY)) if has_table else None
        if number is None:
            raise LostDatabaseError("has lost tables or rows", where=self.location, fix=RECOVER)
        return int(number)

    def _note(self, table: Table, key: Mapping[str, Any], values: Mapping[str, Any] | None) -> None:
        changed = None if values is None else journal_values(table, values)
        self._changes.append((table.name, [key[column.name] for column in table.primary_key.columns], changed))

    def _before_commit(self, connection: Connection) -> None:
        if self.journal is None or not self._changes:
            return
        # Last of all, as other processes wait for this row until the commit.
        following = update(journal).where(_ONLY).values(number=journal.c.number + 1).returning(journal.c.number)
        number = connection.scalar(following)
        if number is None:
            raise LostDatabaseError("has lost rows", where=self.location, fix=RECOVER)
        self.journal.append(number, self._changes)

    def _compare_with_journal(self, journal_file: Journal) -> None:
        # The journal is read before the database, which others may write to: it cannot be ahead then.
        last = journal_file.last()
        position = self.position()
        if last is not None and last.number > position + 1:
            count = last.number - position
            what = f"lacks the last {count} changes that {journal_file.path} holds"
            raise LostDatabaseError(what, where=self.location, fix=RECOVER)
        if self.writable and last is not None and self._needs_snapshot(last.number, last.snapshot, position):
            self._write_snapshot(journal_file)

    def _needs_snapshot(self, last: int, is_snapshot: bool, position: int) -> bool:
        """Returns True if the journal does not hold all rows."""
        return last < position or (last > position and is_snapshot)

    def _write_snapshot(self, journal_file: Journal) -> None:
        with self.transaction() as connection:
            # Checked again under the lock, as another process may have written since.
            connection.execute(select(journal.c.number).where(_ONLY).with_for_update())
            end, position = journal_file.last(), self.position()
            if end is None or not self._needs_snapshot(end.number, end.snapshot, position):
                return
            rows = [
                (table.name, list(key), values)
                for table in JOURNALED
                for key, values in read_rows(connection, table).items()
            ]
            if not rows:
                return
            log.warning("%s ends before the database does; writing all rows into it", journal_file.path)
            connection.execute(update(journal).where(_ONLY).values(number=position + 1))
            journal_file.append(position + 1, rows, snapshot=True)

    @property
    def _changes(self) -> list[Change]:
        changes: list[Change] = self._open.changes
        return changes


def _next_numbers(connection: Connection, column: Column[Any], count: int) -> Sequence[int]:
    """Returns the numbers of the next rows, which no other transaction is given."""
    if connection.dialect.name == "postgresql":
        sequence = func.pg_get_serial_sequence(column.table.name, column.name)
        numbers = select(func.nextval(sequence)).select_from(func.generate_series(1, count).alias("rows"))
        return sorted(connection.scalars(numbers))
    # Others that write wait for the end of this transaction.
    last: int = connection.scalar(select(func.coalesce(func.max(column), 0))) or 0
    return range(last + 1, last + 1 + count)


def _empty_row(table: Table) -> dict[str, Any]:
    # A column that was not given is NULL, and the journal says so: a value that stands there later is damage.
    return {column.name: None for column in table.columns}


def journal_values(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's columns as the journal holds them."""
    return {
        name: json_value(table.columns[name], value)
        for name, value in values.items()
        if (table.name, name) not in NOT_JOURNALED
    }


def json_value(column: Column[Any], value: Any) -> Any:
    """Returns a column's value as the journal holds it; equal values give equal results on every database.

    Keys of JSON keep their order, as the first metric of a round is its main one.
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(column.type, JSON) and value is not None:
        # A text, since metrics may hold NaN, which a line of the journal cannot. Twice, as keys become texts first.
        return json.dumps(json.loads(json.dumps(value)))
    return value


def read_rows(connection: Connection, table: Table) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Reads a table's rows by their primary key as the journal holds them; a value that cannot be read, as it is."""
    columns = [column for column in table.columns if (table.name, column.name) not in NOT_JOURNALED]
    texts = [_as_text(connection, column) for column in columns]
    rows = {}
    for raw in connection.execute(select(*texts)):
        row = {column.name: _parsed(column, value) for column, value in zip(columns, raw, strict=True)}
        rows[tuple(row[column.name] for column in table.primary_key.columns)] = row
    return rows


def _as_text(connection: Connection, column: Column[Any]) -> ColumnElement[Any]:
    # As texts: one value that is not JSON or not a time must not hide all other rows.
    if isinstance(column.type, JSON) and connection.dialect.name == "postgresql":
        # Its driver parses JSON by itself, after which the text "1" and the number 1 look alike.
        return cast(column, Text)
    return type_coerce(column, Text) if isinstance(column.type, JSON | UtcDateTime) else column


def _parsed(column: Column[Any], value: Any) -> Any:
    if not isinstance(value, str):
        return json_value(column, value)
    try:
        if isinstance(column.type, JSON):
            return json_value(column, json.loads(value))
        if isinstance(column.type, UtcDateTime):
            time = datetime.fromisoformat(value)
            return json_value(column, time if time.tzinfo else time.replace(tzinfo=UTC))
    except ValueError:
        return value
    return value
