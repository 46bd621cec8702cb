"""A workspace to back up, and what its backups are compared by."""

from pathlib import Path

from filled import fill

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import inbox_problems
from posttrain.store.backup import BackupReport, create_backup
from posttrain.store.backup_repository import create_repository, open_repository
from posttrain.store.config import StoreConfig
from posttrain.store.restore import RestoreReport, choose_backup, restore_backup
from posttrain.store.verify import verify_artifacts, verify_database
from posttrain.store.workspace import Workspace

DEFAULT = StoreConfig()


CONFIG = "model: tiny\ndata: {pool: [pool.csv], test: sets/*.csv}\n"


def write_workspace(folder: Path) -> Path:
    """Writes a workspace with rows in each table, files of every kind, and feedback in an open and a sealed segment."""
    root = folder / "workspace"
    with Workspace.create(root) as workspace:
        fill(workspace)
        workspace.link_champion(workspace.metadata.deployments()[-1].model_id)
    files = {
        "posttrain.yaml": CONFIG,
        "pool.csv": "text\n" + "a line\n" * 200_000,  # large enough to be an artifact of its own
        "sets/test.csv": "text,label\n",
        "labels/round-1.csv": "id,prompt,label\n1,a,b\n",
        "data/labelled/feedback-000001-labelled.jsonl": "{}\n",
        "selector.py": "VALUE = 1\n",
        "unrelated.bin": "0",
        ".posttrain/metrics/key.jsonl": '{"step": 1}\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    with Inbox(root / ".posttrain" / "inbox", segment_bytes=300) as inbox:
        for number in range(6):
            inbox.append(feedback(number)).result()
    return root


def feedback(number: int) -> Feedback:
    return Feedback.model_validate(
        {"id": f"id-{number}", "prompt": f"question {number}", "completion": "a", "rating": "up"}
    )


def back_up(root: Path, location: str) -> BackupReport:
    with Workspace.open(root, write=False) as workspace, create_repository(location, workspace.home) as target:
        return create_backup(workspace, target)


def restore(
    location: str,
    root: Path,
    config: StoreConfig = DEFAULT,
    id: str | None = None,
    **options: bool,
) -> RestoreReport:
    with open_repository(location, root / ".posttrain") as source:
        return restore_backup(source, choose_backup(source, id, location), root, lambda: config, **options)


def content(root: Path) -> dict[str, bytes]:
    """Every file that a restored workspace shares with the one that was backed up, by its name."""
    names = (
        [path for path in root.rglob("*") if path.is_file() and ".posttrain" not in path.parts]
        + list((root / ".posttrain" / "artifacts").rglob("*.*"))
        + [path for path in (root / ".posttrain" / "inbox").rglob("*") if path.suffix not in ("", ".lock", ".json")]
        + list((root / ".posttrain" / "metrics").rglob("*"))
    )
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in names if path.is_file()}


def assert_sound(root: Path, config: StoreConfig = DEFAULT) -> None:
    with Workspace.open(root, config) as workspace, workspace.lock():
        rows = {row.id: row for row in workspace.metadata.artifacts()}
        assert verify_artifacts(workspace.artifacts, rows) == []
        journal = workspace.metadata.journal
        assert journal is not None
        assert verify_database(workspace.metadata, journal) == []
        assert list(inbox_problems(workspace.home / "inbox")) == []


def fill_more(workspace: Workspace) -> None:
    """Writes a row after all others."""
    run = workspace.metadata.start_run("train", "another key")
    workspace.metadata.fail_run(run.id, "boom")
    assert workspace.metadata.runs()[-1].id == run.id  # by its number


def damage_artifact(root: Path) -> str:
    """Damages one of the workspace's artifacts; returns its id."""
    file = next(iter(sorted((root / ".posttrain" / "artifacts").glob("model-*/file"))))
    file.chmod(0o644)
    file.write_bytes(b"damaged")
    return file.parent.name
