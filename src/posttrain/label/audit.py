"""The log of changes: who changed what and when, and how it was before and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from posttrain.store.database import utc_now
from posttrain.store.label_tables import audit
from posttrain.store.metadata import Metadata

# The longest text that the log keeps of each side of a change: a guideline may be long.
_LONGEST = 2000


@dataclass(frozen=True)
class Change:
    """An entry of the audit log.

    Attributes:
        actor: Name of the account that made the change; ``terminal`` for the command line.
        target: What was changed, such as an account's name.
    """

    number: int
    at: datetime
    actor: str
    action: str
    target: str
    before: Any
    after: Any


def record_change(
    metadata: Metadata, actor: str, action: str, target: str, before: Any = None, after: Any = None
) -> None:
    """Adds an entry to the audit log; call it in the transaction of the change."""
    row = {
        "at": utc_now(),
        "actor": actor[:80],
        "action": action,
        "target": target[:200],
        "before": _shorten(before),
        "after": _shorten(after),
    }
    metadata.insert_row(audit, row)


def list_changes(
    metadata: Metadata,
    *,
    before: int | None = None,
    count: int = 100,
    actor: str | None = None,
    action: str | None = None,
) -> list[Change]:
    """Returns entries of the audit log, newest first.

    Args:
        before: Only entries with a lower number, to read on.
        actor: Only changes of this account.
        action: Only changes of this kind.
    """
    query = select(audit).order_by(audit.c.number.desc()).limit(count)
    if before is not None:
        query = query.where(audit.c.number < before)
    if actor is not None:
        query = query.where(audit.c.actor == actor)
    if action is not None:
        query = query.where(audit.c.action == action)
    with metadata.reading() as connection:
        return [Change(**row) for row in connection.execute(query).mappings()]


def list_actions(metadata: Metadata) -> list[str]:
    """Returns the kinds of changes that the log has, sorted."""
    with metadata.reading() as connection:
        return sorted(connection.scalars(select(audit.c.action).distinct()))


def _shorten(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shorten(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten(inner) for inner in value]
    return value[:_LONGEST] if isinstance(value, str) else value
