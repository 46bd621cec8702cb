"""Workspaces with rows in every table, and the rows as the journal holds them."""

from posttrain.store.journal import JOURNALED, Rows, read_rows
from posttrain.store.workspace import Workspace


def fill(workspace: Workspace) -> None:
    """Writes rows into each table, with artifacts that exist."""
    metadata, parent = workspace.metadata, None
    for number in range(3):
        with workspace.artifacts.temporary_folder() as folder:
            (folder / "file").write_bytes(b"%d" % number)
            artifact = workspace.artifacts.commit(folder, "model", {"n": number})
        run = metadata.start_run("train", f"key {number}", round=number, inputs={"source": str(parent)})
        with metadata.transaction():
            metadata.add_artifact(artifact)
            metadata.finish_run(run.id, artifact.id, {"tasks": {"train": 1e-7}}, 1.5)
        metadata.fail_run(metadata.start_run("score", f"key {number}").id, "boom")
        metadata.open_round(number, parent)
        metadata.update_round(
            number, status="done", candidate=artifact.id, detail={"metrics": {"rouge_l": 0.1, "latency_p50": 1}}
        )
        metadata.add_deployment(artifact.id, round=number, action="promote")
        metadata.name_artifact("model", artifact.id, parent)
        parent = artifact.id
    metadata.tag("model", 2, "production")


def all_rows(workspace: Workspace) -> Rows:
    """Reads every row."""
    with workspace.metadata.reading() as connection:
        return {table.name: read_rows(connection, table) for table in JOURNALED}
