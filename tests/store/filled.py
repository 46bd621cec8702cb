"""Workspaces with rows in every table, and the rows as the journal holds them."""

from posttrain.store.database import utc_now
from posttrain.store.journal import Rows
from posttrain.store.journaled_database import JOURNALED, read_rows
from posttrain.store.label_tables import accounts, audit, guidelines, label_answers, label_batches, label_items
from posttrain.store.metadata import Metadata
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
        champion = metadata.add_deployment(artifact.id, round=number, action="promote")
        metadata.add_canary(artifact.id, champion=champion, share=0.1, reason="try", detail={}, hook="none")
        metadata.name_artifact("model", artifact.id, parent)
        parent = artifact.id
    metadata.tag("model", 2, "production")
    fill_label_tables(metadata)


def fill_label_tables(metadata: Metadata) -> None:
    """Writes rows into each journaled table of labelling."""
    now = utc_now()
    with metadata.reading() as connection:
        number = len(read_rows(connection, label_batches))
    name = f"round-{number}"
    metadata.insert_row(accounts, {"name": f"anna-{number}", "role": "annotator", "created_at": now})
    metadata.update_rows(accounts, accounts.c.name == f"anna-{number}", {"paused": "a rest"})
    metadata.insert_row(
        audit, {"at": now, "actor": "root", "action": "pause", "target": "anna", "before": None, "after": {"x": 1}}
    )
    metadata.insert_row(guidelines, {"version": number + 1, "text": "#", "author": "root", "created_at": now})
    batch = {"name": name, "kind": "choice", "labels": ["b", "a"], "settings": {"overlap": 1}, "status": "open"}
    metadata.insert_row(label_batches, {**batch, "created_at": now})
    item = {"batch": name, "priority": 0.5, "content": {"text": "?"}, "wanted": 1, "answered": 0, "checked": False}
    items = metadata.insert_rows(label_items, [{**item, "record": record, "status": "open"} for record in "abc"])
    answer = {"annotator": "anna", "status": "answered", "answer": "a", "guideline": number + 1, "created_at": now}
    metadata.insert_rows(label_answers, [{**answer, "item": key["id"]} for key in items])


def all_rows(workspace: Workspace) -> Rows:
    """Reads every row."""
    with workspace.metadata.reading() as connection:
        return {table.name: read_rows(connection, table) for table in JOURNALED}
