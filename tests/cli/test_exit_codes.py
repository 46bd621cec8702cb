"""Wrong calls, failed work and defects give one line each, and a traceback only with ``--debug``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import WorkError

Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'."),
        (["--nonsense"], "No such option: --nonsense"),
        (["run", "--nonsense"], "No such option: --nonsense"),
        (
            ["train", "--num-train-epochs", "1"],
            "No such option: --num-train-epochs; settings are given by --set KEY=VALUE: did you mean `train.epochs`?",
        ),
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
def test_unknown_verbs_and_options_are_refused(posttrain: Call, arguments: list[str], message: str) -> None:
    assert message in posttrain(*arguments).mistake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--until", "trian"], "--until: no stage `trian`; one of collect"),
        (["show", "nothing"], "nothing here is called `nothing`"),
        (["show", "7"], "there is no round 7; posttrain status"),
        (["select", "--strategy", "entrpy"], "did you mean `entropy`?"),
        (["eval", "--model", "pool@v1"], "--model: `pool@v1` is not a model; posttrain models list"),
        (["models", "promote", "pool@v1"], "`pool@v1` is not a model"),
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
        (["label", "import", "x.csv"], "x.csv: there is no such file"),
    ],
)
def test_unusable_arguments_are_refused(
    posttrain: Call,
    finished_workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in posttrain(*arguments, "-w", finished_workspace).mistake
    assert list(tmp_path.iterdir()) == []


def test_models_export_overwrites_nothing(posttrain: Call, finished_workspace: Path, tmp_path: Path) -> None:
    assert "exists already" in posttrain("models", "export", "champion", tmp_path, "-w", finished_workspace).mistake


@pytest.mark.parametrize("verb", [["run"], ["status"], ["show", "champion"], ["config", "check"]])
def test_a_folder_without_a_workspace_is_refused(posttrain: Call, tmp_path: Path, verb: list[str]) -> None:
    line = posttrain(*verb, "-w", tmp_path).mistake
    assert line == f"{tmp_path}: no posttrain.yaml here; posttrain init {tmp_path}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["status"], ["show", "champion"], ["models", "list"], ["report"]])
def test_verbs_that_read_need_a_run(posttrain: Call, small: Any, verb: list[str]) -> None:
    root = small()
    assert posttrain(*verb, "-w", root).mistake == f"{root}: nothing has run here yet; posttrain run -w {root}"
    assert not (root / ".posttrain").exists()


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (["models", "rollback"], "no earlier champion"),
        (["eval"], "there is no champion yet"),
        (["select"], "there is no champion yet"),
        (["models", "export", "champion", "x"], "nothing here is called `champion`"),
    ],
)
def test_verbs_that_need_a_champion_refuse_an_early_workspace(
    posttrain: Call, small: Any, verb: list[str], message: str
) -> None:
    root = small()
    posttrain("run", "-w", root, "--until", "collect")
    assert message in posttrain(*verb, "-w", root).mistake


def test_failed_work_exits_with_1_and_one_line(posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*arguments: Any) -> Any:
        raise WorkError("training diverged\nat step 3, see https://me:hidden@host/x")

    root = small(rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.stages.train.Train.execute", diverge)
        outcome = posttrain("run", "-w", root)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.splitlines()[-1] == "posttrain: training diverged at step 3, see https://me:***@host/x"


def test_a_defect_exits_with_1_and_names_the_debug_option(
    posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*arguments: Any) -> Any:
        raise ZeroDivisionError("one [red]over[/] nothing")

    monkeypatch.setattr("posttrain.cli.status.loop_status", breaks)
    root = small()
    posttrain("init", root)
    (root / ".posttrain").mkdir()
    monkeypatch.setattr("posttrain.cli.run.print_rounds", breaks)
    outcome = posttrain("run", "-w", root, "--until", "collect")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "posttrain: ZeroDivisionError: one [red]over[/] nothing; --debug shows where"
    outcome = posttrain("--debug", "run", "-w", root, "--until", "collect")
    assert outcome.code == 1
    assert "Traceback (most recent call last):" in outcome.err
    assert "in breaks" in outcome.err


def test_debug_shows_the_traceback_of_a_mistake(posttrain: Call, tmp_path: Path) -> None:
    outcome = posttrain("--debug", "status", "-w", tmp_path)
    assert outcome.code == 2
    assert "Traceback (most recent call last):" in outcome.err
    assert outcome.err.splitlines()[-1].endswith(f"posttrain init {tmp_path}")


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_the_run_resumes(
    posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    root = small(rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.stages.train.Train.execute", interrupt)
        outcome = posttrain("run", "-w", root)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "stopped; the same command resumes from here"
    assert "Traceback" not in outcome.err
    assert posttrain("run", "-w", root).code == 0
