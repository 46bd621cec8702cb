"""Calls ``label.webhook`` when a batch is ready or done, and for alarms: after the commit, until it succeeds."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import exists, func, select

from posttrain.store.database import insert_new, utc_now
from posttrain.store.errors import StorageError, UserError, WorkError
from posttrain.store.label_tables import label_batches, label_events, label_items
from posttrain.store.metadata import Metadata
from posttrain.store.webhook import post_json

log = logging.getLogger("posttrain")

Alarms = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the alarms of a quality report."""

BATCH_READY, BATCH_DONE, ALARM = "batch ready", "batch done", "alarm"

TIMEOUT = 10.0
"""Seconds that the server may take to answer a call."""

_MAX_ATTEMPTS = 12  # the last one about five hours after the first
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 7200.0  # seconds
_POLL_SECONDS = 1.0
_ALARM_SECONDS = 300.0  # a report on many answers takes seconds of a processor
# Batches of the time before there was a webhook, or a database was rebuilt, are not news.
_NEWS = timedelta(days=1)


def note_alarms(metadata: Metadata, alarms: Iterable[Mapping[str, Any]]) -> None:
    """Notes alarms of a quality report to be sent, each at most once a day.

    Args:
        alarms: As `posttrain.label.quality.findings.Finding.as_dict` has them.
    """
    for alarm in alarms:
        name = f"{utc_now():%Y-%m-%d} {alarm['kind']}: {', '.join(alarm['annotators'])}"
        _note(metadata, ALARM, name[:300], {"alarm": dict(alarm)})


def note_batches(metadata: Metadata) -> None:
    """Notes events of the batches that are new, or decided as a whole, and were not noted yet.

    From the rows themselves: whatever writes them, and whenever it is killed, no event is lost and none is early.
    """
    batch, item = label_batches.c, label_items.c
    since = utc_now() - _NEWS
    asked = (item.batch == batch.name) & item.expected.is_(None)
    undecided = asked & item.status.in_(("open", "review"))
    # A batch is closed only when its answers are taken up; the process that takes them up needs to know before.
    done = (batch.finished_at >= since) | (
        batch.finished_at.is_(None) & exists().where(asked) & ~exists().where(undecided)
    )
    for event, condition in ((BATCH_READY, batch.created_at >= since), (BATCH_DONE, done)):
        noted = select(label_events.c.target).where(label_events.c.event == event)
        query = select(label_batches).where(condition, batch.name.not_in(noted)).order_by(batch.created_at, batch.name)
        with metadata.reading() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        for row in rows:
            _note(metadata, event, row["name"], {"batch": _batch_detail(metadata, row)})


def deliver_due(metadata: Metadata, url: str, stop: threading.Event | None = None) -> int:
    """Calls the webhook for each event that is due; returns how many calls succeeded.

    A call that fails is due again after 15 s, 20 s, 40 s and so on, up to 12 times.

    Args:
        stop: Ends the work after the call in progress.
    """
    delivered = 0
    while (stop is None or not stop.is_set()) and (event := _claim(metadata)):
        body = {
            "id": event["id"],
            "event": event["event"],
            "at": event["created_at"].isoformat(timespec="seconds"),
            **event["detail"],
        }
        error = post_json(url, body, TIMEOUT)
        if error is not None:
            log.warning("label.webhook failed: %s", error)
        with metadata.transaction() as connection:
            status = "failed" if error else "done"
            connection.execute(label_events.update().where(label_events.c.id == event["id"]).values(status=status))
        delivered += error is None
    return delivered


@contextmanager
def webhook_calls(
    metadata: Metadata, url: str | None, alarms: Alarms | None = None, last_seconds: float = 5.0
) -> Iterator[None]:
    """Calls the webhook from a thread of its own while the body works; errors are logged and never raised.

    Args:
        url: The webhook; None for none.
        alarms: Returns the alarms that there are now; called at the end, and before every few minutes.
        last_seconds: Longest time to wait at the end for calls in progress; the next command makes what is left.
    """
    if url is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_work, args=(metadata, url, alarms, stop), name="label.webhook", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(last_seconds)


def _work(metadata: Metadata, url: str, alarms: Alarms | None, stop: threading.Event) -> None:
    ended, looked = False, time.monotonic()
    while not ended:
        # Once more after the end of the work, whose last step may have been the news.
        ended = stop.wait(_POLL_SECONDS)
        try:
            note_batches(metadata)
            deliver_due(metadata, url)
            if alarms is not None and (ended or time.monotonic() - looked > _ALARM_SECONDS):
                looked = time.monotonic()
                note_alarms(metadata, alarms())
                deliver_due(metadata, url)
        except (UserError, StorageError, WorkError) as error:
            log.warning("label.webhook: %s", error)
        except Exception:
            log.exception("label.webhook")


def _note(metadata: Metadata, event: str, target: str, detail: dict[str, Any]) -> bool:
    now = utc_now()
    row = {"event": event, "target": target, "detail": detail, "status": "pending", "attempts": 0}
    with metadata.transaction() as connection:
        return insert_new(connection, label_events, {**row, "created_at": now, "due_at": now})


def _claim(metadata: Metadata) -> dict[str, Any] | None:
    """Returns the next event that is due, after moving on its time so that no other process calls for it, too."""
    table = label_events.c
    due = table.status.in_(("pending", "failed")) & (table.due_at <= utc_now()) & (table.attempts < _MAX_ATTEMPTS)
    query = select(label_events).where(due).order_by(table.id).limit(1)
    # Read before the writing transaction: a process that polls must not keep writers waiting for nothing.
    with metadata.reading() as connection:
        if connection.execute(query).first() is None:
            return None
    with metadata.transaction() as connection:
        event = connection.execute(query.with_for_update(skip_locked=True)).mappings().first()
        if event is None:
            return None
        attempts = event["attempts"] + 1
        values = {"attempts": attempts, "due_at": utc_now() + _wait(attempts)}
        connection.execute(label_events.update().where(table.id == event["id"]).values(values))
        return dict(event)


def _wait(attempts: int) -> timedelta:
    # Longer than a call takes: until it ends, this time keeps other processes away from the event.
    seconds = min(_FIRST_WAIT * 2 ** (attempts - 1), _LONGEST_WAIT)
    return timedelta(seconds=max(seconds, TIMEOUT + 5))


def _batch_detail(metadata: Metadata, batch: Mapping[str, Any]) -> dict[str, Any]:
    in_batch = (label_items.c.batch == batch["name"]) & label_items.c.expected.is_(None)
    query = select(label_items.c.status, func.count()).where(in_batch).group_by(label_items.c.status)
    with metadata.reading() as connection:
        counts = {row[0]: row[1] for row in connection.execute(query)}
    return {
        "name": batch["name"],
        "round": batch["round"],
        "kind": batch["kind"],
        "items": sum(counts.values()),
        "open": counts.get("open", 0) + counts.get("review", 0),
        "created_at": _text(batch["created_at"]),
        "finished_at": _text(batch["finished_at"]),
    }


def _text(at: datetime | None) -> str | None:
    return at.isoformat(timespec="seconds") if at else None
