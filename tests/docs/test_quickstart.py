"""The commands of the quickstart and, in its workspace, of the recovery page print the quoted output."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import posttrain

Quoted = list[tuple[str, list[str]]]
Walk = Callable[[str, Path], Quoted]


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory, walk: Walk) -> tuple[Path, Quoted]:
    """The folder in which the page's commands ran, and the outputs that the page quotes."""
    folder = tmp_path_factory.mktemp("empty")
    return folder, walk("quickstart.md", folder)


@pytest.mark.each_change
def test_the_quickstart_ends_with_a_rollback_to_an_earlier_champion(page_run: tuple[Path, Quoted]) -> None:
    folder, _ = page_run
    state = posttrain.Workspace(folder / "support").status()
    assert [entry["decision"] for entry in state["rounds"]] == ["baseline", "deploy", "deploy"]
    assert [entry["labels"] for entry in state["rounds"]] == [0, 16, 32]
    accuracies = [entry["metrics"]["accuracy"] for entry in state["rounds"]]
    assert accuracies == sorted(accuracies)
    assert state["champion"]["round"] == 1
    assert (folder / "support" / "release" / "config.json").is_file()
    assert '<figure class="chart">' in (folder / "support" / "report.html").read_text(encoding="utf-8")


@pytest.mark.each_change
def test_the_commands_of_the_quickstart_print_the_quoted_output(page_run: tuple[Path, Quoted]) -> None:
    _, quoted = page_run
    assert len(quoted) >= 5
    assert not [wrong for _, wrong in quoted if wrong]


def test_the_commands_of_the_recovery_page_print_the_quoted_output(
    page_run: tuple[Path, Quoted], tmp_path: Path, run: Callable[[str, Path], str], walk: Walk
) -> None:
    shutil.copytree(page_run[0] / "support", tmp_path / "support", symlinks=True)
    quoted = walk("recovery.md", tmp_path)
    assert len(quoted) == 3
    assert not [wrong for _, wrong in quoted if wrong]
    for name in ("support", "restored"):
        assert "no damage" in run(f"posttrain verify -w {name}", tmp_path)
