"""Mistakes of the call, work that fails, defects: one line each, and a traceback only where it is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import WorkError

Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "No such command 'trian'."),
        (["--nonsense"], "No such option: --nonsense"),
        (["run", "--nonsense"], "No such option: --nonsense"),
        (["run", "--round", "1"], "No such option: --round (Possible options: --rounds)"),
        (["run", "--rounds"], "--rounds"),
        (["run", "--rounds", "many"], "Invalid value for '--rounds'"),
        (["run", "--rounds", "-1"], "Invalid value for '--rounds'"),
        (["run", "extra"], "extra"),
        (["show"], "Missing argument"),
        (["data", "nonsense"], "No such command 'nonsense'."),
        (["select", "--n", "0"], "Invalid value for '--n'"),
    ],
)
def test_a_wrong_call(posttrain: Call, arguments: list[str], says: str) -> None:
    assert says in posttrain(*arguments).mistake


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--until", "trian"], "--until: no stage `trian`; one of collect"),
        (["show", "nothing"], "nothing here is called `nothing`"),
        (["show", "7"], "there is no round 7; posttrain status"),
        (["select", "--strategy", "entrpy"], "did you mean `entropy`?"),
        (["eval", "--model", "pool@v1"], "--model: `pool@v1` is no model of this workspace"),
        (["models", "promote", "pool@v1"], "`pool@v1` is no model"),
        (["models", "promote", "nothing"], "nothing here is called `nothing`"),
        (["models", "show", "nothing"], "nothing here is called `nothing`"),
        (["data", "show", "pool@v9"], "pool@v9"),
        (["data", "show", "champion"], "champion"),
        (["data", "diff", "pool@v1", "nothing"], "nothing"),
        (["data", "add", "nothing.csv"], "nothing.csv"),
        (["data", "add", "nothing.csv", "--to", "tset"], "--to: no set `tset`; pool or labelled"),
        (["data", "export", "pool@v1", "nowhere/x.csv"], "no such folder"),
        (["data", "export", "pool@v1", "x.docx"], "`.docx` is not a supported format"),
        (["report", "nowhere/x.html"], "nowhere: there is no such folder; make it first"),
        (["report", "nowhere/x.svg"], "nowhere: there is no such folder; make it first"),
        (["report", "."], ".: is a folder; name a file, such as report.html"),
        (["label", "export", "x.csv"], "no round waits for labels; posttrain status"),
        (["label", "import", "x.csv"], "no round waits for labels; posttrain status"),
    ],
)
def test_a_wrong_argument(
    posttrain: Call,
    finished_workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in posttrain(*arguments, "-w", finished_workspace).mistake
    assert list(tmp_path.iterdir()) == []


def test_models_export_writes_over_nothing(posttrain: Call, finished_workspace: Path, tmp_path: Path) -> None:
    assert "exists already" in posttrain("models", "export", "champion", tmp_path, "-w", finished_workspace).mistake


@pytest.mark.parametrize("verb", [["run"], ["status"], ["show", "champion"], ["config", "check"]])
def test_no_workspace(posttrain: Call, tmp_path: Path, verb: list[str]) -> None:
    line = posttrain(*verb, "-w", tmp_path).mistake
    assert line == f"{tmp_path}: no posttrain.yaml here; posttrain init {tmp_path}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["status"], ["show", "champion"], ["models", "list"], ["report"]])
def test_nothing_has_run_yet(posttrain: Call, small: Any, verb: list[str]) -> None:
    root = small()
    assert posttrain(*verb, "-w", root).mistake == f"{root}: nothing has run here yet; posttrain run -w {root}"
    assert not (root / ".posttrain").exists()


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        (["models", "rollback"], "no earlier champion"),
        (["eval"], "there is no champion yet"),
        (["select"], "there is no champion yet"),
        (["models", "export", "champion", "x"], "nothing here is called `champion`"),
    ],
)
def test_too_early(posttrain: Call, small: Any, verb: list[str], says: str) -> None:
    root = small()
    posttrain("run", "-w", root, "--until", "collect")
    assert says in posttrain(*verb, "-w", root).mistake


def test_work_that_fails(posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise WorkError("training diverged\nat step 3")

    root = small(rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.stages.train.Train.execute", fails)
        ended = posttrain("run", "-w", root)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.splitlines()[-1] == "posttrain: training diverged at step 3"
    assert posttrain("run", "-w", root).code == 0


def test_a_defect(posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> Any:
        raise ZeroDivisionError("one [red]over[/] nothing")

    monkeypatch.setattr("posttrain.cli.run.loop_status", breaks)
    root = small()
    posttrain("init", root)
    (root / ".posttrain").mkdir()
    monkeypatch.setattr("posttrain.cli.run.print_rounds", breaks)
    ended = posttrain("run", "-w", root, "--until", "collect")
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "posttrain: ZeroDivisionError: one [red]over[/] nothing; --debug shows where"
    ended = posttrain("--debug", "run", "-w", root, "--until", "collect")
    assert ended.code == 1
    assert "Traceback (most recent call last):" in ended.err
    assert "in breaks" in ended.err


def test_debug_shows_where_a_users_mistake_was_found(posttrain: Call, tmp_path: Path) -> None:
    ended = posttrain("--debug", "status", "-w", tmp_path)
    assert ended.code == 2
    assert "Traceback (most recent call last):" in ended.err
    assert ended.err.splitlines()[-1].endswith(f"posttrain init {tmp_path}")


@pytest.mark.slow
def test_ctrl_c(posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    root = small(rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.stages.train.Train.execute", stopped)
        ended = posttrain("run", "-w", root)
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "stopped; the same command resumes from here"
    assert "Traceback" not in ended.err
    assert posttrain("run", "-w", root).code == 0
