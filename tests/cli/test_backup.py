"""A workspace that is restored from a backup of a running loop ends as the loop did."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

pytestmark = pytest.mark.slow

Call = Callable[..., Any]


def result(posttrain: Call, root: Path) -> Any:
    """The rounds without times and places."""
    status = posttrain("status", "-w", root, "--json").json
    return [
        {name: entry[name] for name in ("round", "candidate", "decision", "metrics") if name in entry}
        for entry in status["rounds"]
    ] + [status["champion"]["id"] if isinstance(status["champion"], dict) else status["champion"]]


@pytest.mark.long
def test_backups_of_a_running_loop_end_as_the_loop_does(posttrain: Call, small: Any, tmp_path: Path) -> None:
    root, location = small(rounds=1), f"{tmp_path / 'backups'}/"
    loop = forked.start(["run"], root, tmp_path / "run.log")
    while loop.is_alive():
        if (root / ".posttrain" / "format.json").exists():
            assert posttrain("backup", location, "-w", root).code == 0
        time.sleep(0.1)  # the loop needs a processor too
    assert loop.exitcode == 0
    expected = result(posttrain, root)
    backups = posttrain("restore", location, "--list", "--json").json
    assert len({backup["rows"] for backup in backups}) > 3, "the loop was not caught at work"
    copy, id = tmp_path / "copy", backups[len(backups) // 2]["id"]
    assert posttrain("restore", location, "--backup", id, "-w", copy).code == 0
    assert posttrain("verify", "-w", copy).code == 0
    assert posttrain("run", "-w", copy).code == 0
    assert result(posttrain, copy) == expected


def test_mistakes_are_one_line(posttrain: Call, finished_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "nothing").mkdir()
    one = tmp_path / "one.tar"
    assert posttrain("backup", one, "-w", finished_copy).code == 0
    mistakes = {
        ("backup", one, "-w", finished_copy): "the file exists already",
        ("backup", tmp_path / "folder", "-w", finished_copy): "the folder holds something else",
        ("backup", tmp_path / "none" / "x.tar", "-w", finished_copy): "there is no such folder",
        ("backup", f"{tmp_path / 'text.tar'}/", "-w", finished_copy): "a file has the folder's path",
        ("backup", "ftpx://a/b", "-w", finished_copy): "is not known",
        ("backup", tmp_path / "x.tar", "-w", tmp_path / "nothing"): "nothing is stored here yet",
        ("restore", one, "-w", finished_copy): "there is a workspace already",
        ("restore", tmp_path / "none", "-w", tmp_path / "new"): "there is no such file or folder",
        ("restore", tmp_path / "text.tar", "-w", tmp_path / "new"): "backup",
        ("restore", tmp_path / "nothing", "-w", tmp_path / "new"): "holds no backup",
        ("restore", one, "--backup", "none", "-w", tmp_path / "new"): "holds no backup `none`",
        ("restore", one, "--list", "--replace"): "exclude each other",
        ("restore", one, "--damaged", "-w", tmp_path / "nothing" / "deeper"): "no workspace here",
    }
    for arguments, mistake in mistakes.items():
        assert mistake in posttrain(*arguments).mistake, arguments
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "nothing" / "deeper").exists()


def test_the_workspace_s_own_artifacts_are_no_place(posttrain: Call, small: Any, tmp_path: Path) -> None:
    root = small(store={"artifacts": f"file://{tmp_path / 'artifacts'}"}, rounds=1)
    assert posttrain("run", "-w", root, "--until", "collect").code == 0
    mistake = posttrain("backup", f"file://{tmp_path / 'artifacts'}/", "-w", root).mistake
    assert "is the workspace's own artifact store" in mistake
    assert "is the workspace's own" in posttrain("backup", f"{tmp_path / 'artifacts'}/", "-w", root).mistake


def test_no_place_lies_in_the_workspace_s_own_folder(posttrain: Call, finished_copy: Path) -> None:
    """`restore --replace` would rename the backups together with it."""
    for name in ("backups/", "one.tar", "artifacts", "../.posttrain/x/"):
        location = finished_copy / ".posttrain" / name
        location = f"{location}/" if name.endswith("/") else location
        assert "lies in the workspace's .posttrain" in posttrain("backup", location, "-w", finished_copy).mistake
        assert not (finished_copy / ".posttrain" / "backups").exists()


def test_a_store_behind_a_variable_is_no_place(
    posttrain: Call, small: Any, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "s3://posttrain/own")
    root = small(store={"artifacts": "${PLACE}"}, rounds=1)
    assert posttrain("run", "-w", root, "--until", "collect").code == 0
    assert "is the workspace's own artifact store" in posttrain("backup", "s3://posttrain/own/", "-w", root).mistake


def test_damage_is_printed_with_exit_code_1(posttrain: Call, finished_copy: Path, tmp_path: Path) -> None:
    location = tmp_path / "backups"
    assert posttrain("backup", f"{location}/", "-w", finished_copy).code == 0
    model = next(iter(sorted((finished_copy / ".posttrain" / "artifacts").glob("model-*"))))
    shutil.rmtree(model)
    without = posttrain("backup", tmp_path / "one.tar", "-w", finished_copy)
    assert without.code == 1
    assert f"not in the backup: artifact {model.name} is missing" in without.out
    restored = posttrain("restore", tmp_path / "one.tar", "-w", tmp_path / "new")
    assert (restored.code, f"missing: {model.name}" in restored.out) == (1, True)
    report = posttrain("restore", location, "--damaged", "-w", finished_copy, "--json")
    assert (report.code, report.json) == (0, {"restored": [model.name], "missing": []})
    assert (
        posttrain("restore", location, "--damaged", "-w", finished_copy).out
        == "no artifact and no feedback is damaged\n"
    )
    assert posttrain("verify", "-w", finished_copy).code == 0
