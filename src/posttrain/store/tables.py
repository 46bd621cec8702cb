"""The metadata database's tables. A change here needs a new file in ``migrations/versions``."""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from posttrain.store.database import UtcDateTime
from posttrain.store.rows import ACTIONS, CANARY_STATUSES, HOOK_STATUSES, ROUND_STATUSES, RUN_STATUSES

# Names of constraints must not be left to the database: a migration could not drop one whose name it does not know.
schema = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

run_inputs = Table(
    "run_inputs",
    schema,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(200), primary_key=True),
    # No foreign key: an input may lie outside the store, such as a file known by its digest.
    Column("artifact_id", String(200), nullable=False, index=True),
)

names = Table(
    "names",
    schema,
    Column("name", String(200), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("artifact_id", ForeignKey("artifacts.id"), nullable=False),
    Column("parent", ForeignKey("artifacts.id")),
    Column("created_at", UtcDateTime, nullable=False),
    Column("semantic", String(40)),
    Column("note", Text),
    UniqueConstraint("name", "artifact_id"),
    Index("ix_names_semantic", "name", "semantic", unique=True),
)

tags = Table(
    "tags",
    schema,
    Column("name", String(200), primary_key=True),
    Column("tag", String(200), primary_key=True),
    Column("version", Integer, nullable=False),
)


def json_column(name: str, nullable: bool = False) -> Column[Any]:
    """Returns a JSON column that stores None as NULL."""
    # Without it None would be stored as the JSON text `null`, which `IS NULL` does not match.
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _arm_column(primary_key: bool = False) -> Column[Any]:
    """Returns the column with a row's loop: "" for the main one, else the name of a comparison arm."""
    # "" and not NULL: a primary key holds no NULL, and NULL equals nothing in a condition.
    return Column("arm", String(40), primary_key=primary_key, nullable=False, server_default="")


def one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Returns the constraint that a column holds one of ``values``."""
    return CheckConstraint(f"{column} IN ({', '.join(repr(value) for value in values)})", name=column)


artifacts = Table(
    "artifacts",
    schema,
    Column("id", String(100), primary_key=True),
    Column("kind", String(80), nullable=False, index=True),
    json_column("meta"),
    Column("size", BigInteger, nullable=False),
    Column("files", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

runs = Table(
    "runs",
    schema,
    # Runs are ordered by this, not by time: clocks of two hosts differ, and one may be set back.
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(40), nullable=False, unique=True),
    Column("stage", String(80), nullable=False),
    Column("key", String(64), nullable=False, index=True),
    _arm_column(),
    Column("round", Integer, index=True),
    Column("status", String(10), nullable=False, index=True),
    Column("seed", BigInteger, nullable=False),
    json_column("config"),
    # The artifact about to be published. No foreign key: its row is inserted only once it is there.
    Column("sealed", String(100)),
    Column("output", ForeignKey("artifacts.id"), index=True),
    Column("code_version", String(80), nullable=False),
    json_column("environment"),
    Column("worker", String(40)),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("seconds", Float),
    json_column("detail"),
    Column("error", Text),
    one_of("status", RUN_STATUSES),
)

rounds = Table(
    "rounds",
    schema,
    _arm_column(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("status", String(10), nullable=False),
    Column("champion_before", String(100)),
    Column("candidate", String(100)),
    json_column("decision", nullable=True),
    json_column("detail"),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("seconds", Float),
    one_of("status", ROUND_STATUSES),
)

deployments = Table(
    "deployments",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _arm_column(),
    Column("model_id", String(100), nullable=False),
    Column("round", Integer),
    Column("action", String(10), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("hook", String(10), nullable=False),
    one_of("action", ACTIONS),
    one_of("hook", HOOK_STATUSES),
)

canaries = Table(
    "canaries",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _arm_column(),
    Column("model_id", String(100), nullable=False),
    Column("champion_id", String(100), nullable=False),
    Column("deployment_id", Integer, nullable=False),
    Column("share", Float, nullable=False),
    Column("status", String(12), nullable=False),
    Column("reason", Text, nullable=False),
    Column("conclusion", Text),
    json_column("detail"),
    Column("created_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("hook", String(10), nullable=False),
    one_of("status", CANARY_STATUSES),
    one_of("hook", HOOK_STATUSES),
)

# One row. Beside the tables and not in the journal alone: it says which of the journal's transactions committed.
journal = Table(
    "journal",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
)
