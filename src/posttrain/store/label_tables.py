"""The metadata database's tables for labelling: accounts, guidelines, and the queue's batches, items and answers.

A change here needs a new file in ``migrations/versions``.
"""

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    text,
)

from posttrain.store.database import UtcDateTime
from posttrain.store.rows import ANSWER_STATUSES, BATCH_STATUSES, HOOK_STATUSES, ITEM_STATUSES, ROLES, TOKEN_KINDS
from posttrain.store.tables import json_column, one_of, schema

accounts = Table(
    "accounts",
    schema,
    # Also the name in `label_answers.annotator`; a model that labels has an account of the role `model`.
    Column("name", String(80), primary_key=True),
    Column("role", String(10), nullable=False),
    # Argon2's encoded hash; NULL for an account that signs in by a one-time link, and for a model.
    Column("password_hash", Text),
    Column("created_at", UtcDateTime, nullable=False),
    # Why this account is given no items for the time being, in a sentence to its person; NULL: it is given items.
    Column("paused", Text),
    # Closed accounts stay, since answers name them.
    Column("closed_at", UtcDateTime),
    one_of("role", ROLES),
)

# Sessions, API tokens, invitations and one-time links. Only a hash of the secret is stored.
tokens = Table(
    "tokens",
    schema,
    Column("hash", String(64), primary_key=True),
    Column("kind", String(10), nullable=False),
    # NULL for an invitation, whose account does not exist yet.
    Column("account", ForeignKey("accounts.name"), index=True),
    Column("role", String(10), nullable=False),
    Column("note", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    one_of("kind", TOKEN_KINDS),
)

audit = Table(
    "audit",
    schema,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", UtcDateTime, nullable=False),
    # Not a foreign key: a refused login may name an account that does not exist.
    Column("actor", String(80), nullable=False, index=True),
    Column("action", String(40), nullable=False),
    Column("target", String(200), nullable=False),
    json_column("before", nullable=True),
    json_column("after", nullable=True),
)

guidelines = Table(
    "guidelines",
    schema,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    Column("author", String(80), nullable=False),
    Column("note", Text),
    Column("created_at", UtcDateTime, nullable=False),
)

label_batches = Table(
    "label_batches",
    schema,
    # Such as `round-3`, or the name that an import gives.
    Column("name", String(200), primary_key=True),
    Column("round", Integer),
    # The selection's artifact; NULL for an import.
    Column("selection", String(200)),
    # The shape of an answer: see `posttrain.label.answer_kinds`.
    Column("kind", String(20), nullable=False),
    # The closed label set; NULL for open-ended answers.
    json_column("labels", nullable=True),
    # The section `label.queue` as it was, and the seed: a change of the config leaves open batches as they are.
    json_column("settings"),
    Column("status", String(10), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    one_of("status", BATCH_STATUSES),
)

label_items = Table(
    "label_items",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("batch", ForeignKey("label_batches.name"), nullable=False),
    Column("record", String(100), nullable=False),
    # Of two open items the one with the higher priority is shown first.
    Column("priority", Float, nullable=False),
    # What is shown: prompt (turns), candidates or the model's answer, metadata.
    json_column("content"),
    # The model's answer, its confidence and its name; NULL for none.
    json_column("suggestion", nullable=True),
    # Why the record was selected, in words.
    Column("reason", Text),
    # The right answer of a gold item; NULL for an item whose answer is asked for.
    json_column("expected", nullable=True),
    # Answers wanted: the overlap, one more after a disagreement or for a check.
    Column("wanted", Integer, nullable=False),
    # Answers given, without skips and undone ones. Redundant, so that the next item is found by an index.
    Column("answered", Integer, nullable=False, server_default="0"),
    # Drawn to be answered a second time, to check the first answer.
    Column("checked", Boolean, nullable=False, server_default=text("false")),
    Column("status", String(10), nullable=False),
    # The final answer, how it was reached (single, majority, posterior, review, model), by whom, the note.
    json_column("resolution", nullable=True),
    Index("ix_label_items_next", "status", "batch", "priority"),
    Index("ix_label_items_record", "batch", "record"),
    one_of("status", ITEM_STATUSES),
)

label_answers = Table(
    "label_answers",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("item", ForeignKey("label_items.id"), nullable=False),
    Column("annotator", String(80), nullable=False, index=True),
    # answered, skipped, flagged
    Column("status", String(10), nullable=False),
    # NULL for a skipped item.
    json_column("answer", nullable=True),
    # Why it was skipped or flagged, or a remark.
    Column("note", Text),
    # Seconds from showing the item to the answer; NULL where unknown.
    Column("seconds", Float),
    # The suggested answer as this annotator saw it, which may be planted; NULL where none was shown.
    json_column("suggestion", nullable=True),
    # Confidence of a model's answer; NULL for people.
    Column("confidence", Float),
    # The guideline's version that it was given under; 0 before there was one.
    Column("guideline", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # When its annotator took it back; such a row no longer counts.
    Column("undone_at", UtcDateTime),
    # At most one answer that counts, whatever happens at the same time.
    Index(
        "ix_label_answers_item",
        "item",
        "annotator",
        unique=True,
        sqlite_where=text("undone_at IS NULL"),
        postgresql_where=text("undone_at IS NULL"),
    ),
    one_of("status", ANSWER_STATUSES),
)

# An item is lent to an annotator until the lease ends, so that others are given other items meanwhile.
label_leases = Table(
    "label_leases",
    schema,
    Column("item", ForeignKey("label_items.id", ondelete="CASCADE"), primary_key=True),
    Column("annotator", String(80), primary_key=True, index=True),
    Column("started_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False),
)

# Calls of `label.webhook`, each made until it succeeds. Not journaled: after a loss, old events are of no use.
label_events = Table(
    "label_events",
    schema,
    # Sent along, so that the receiver knows a call that is made twice.
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("event", String(20), nullable=False),
    # The batch, or a name of the alarm: an event of one target happens once.
    Column("target", String(300), nullable=False),
    json_column("detail"),
    Column("status", String(10), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", UtcDateTime, nullable=False),
    # Not called before this time; moved on before each call, so that two processes do not call at once.
    Column("due_at", UtcDateTime, nullable=False),
    Index("ix_label_events_target", "event", "target", unique=True),
    Index("ix_label_events_due", "status", "due_at"),
    one_of("status", HOOK_STATUSES),
)
