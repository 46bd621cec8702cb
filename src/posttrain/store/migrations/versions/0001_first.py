"""Artifacts, runs, rounds, deployments and names."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("id", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(80), nullable=False),
        sa.Column("meta", sa.JSON, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("files", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_artifacts"),
    )
    op.create_index("ix_artifacts_kind", "artifacts", ["kind"])

    op.create_table(
        "runs",
        sa.Column("number", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("stage", sa.String(80), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("round", sa.Integer),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("sealed", sa.String(100)),
        sa.Column("output", sa.String(100)),
        sa.Column("code_version", sa.String(80), nullable=False),
        sa.Column("environment", sa.JSON, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("seconds", sa.Float),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("number", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
        sa.ForeignKeyConstraint(["output"], ["artifacts.id"], name="fk_runs_output"),
        sa.CheckConstraint("status IN ('running', 'done', 'failed', 'waiting')", name=op.f("ck_runs_status")),
    )
    for column in ("key", "round", "status", "output"):
        op.create_index(f"ix_runs_{column}", "runs", [column])

    op.create_table(
        "run_inputs",
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("artifact_id", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", name="pk_run_inputs"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_inputs_run_id", ondelete="CASCADE"),
    )
    op.create_index("ix_run_inputs_artifact_id", "run_inputs", ["artifact_id"])

    op.create_table(
        "rounds",
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("champion_before", sa.String(100)),
        sa.Column("candidate", sa.String(100)),
        sa.Column("decision", sa.JSON),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("seconds", sa.Float),
        sa.PrimaryKeyConstraint("number", name="pk_rounds"),
        sa.CheckConstraint("status IN ('open', 'waiting', 'done')", name=op.f("ck_rounds_status")),
    )

    op.create_table(
        "deployments",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("model_id", sa.String(100), nullable=False),
        sa.Column("round", sa.Integer),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("hook", sa.String(10), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deployments"),
        sa.CheckConstraint("action IN ('baseline', 'promote', 'rollback')", name=op.f("ck_deployments_action")),
        sa.CheckConstraint("hook IN ('pending', 'done', 'failed', 'none')", name=op.f("ck_deployments_hook")),
    )

    op.create_table(
        "names",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("artifact_id", sa.String(100), nullable=False),
        sa.Column("parent", sa.String(100)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_names"),
        sa.UniqueConstraint("name", "artifact_id", name="uq_names_name"),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name="fk_names_artifact_id"),
        sa.ForeignKeyConstraint(["parent"], ["artifacts.id"], name="fk_names_parent"),
    )
