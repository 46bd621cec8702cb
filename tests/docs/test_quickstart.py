"""The quickstart's commands run in order and print the quoted output."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Walk = Callable[[str, Path], list[tuple[str, list[str]]]]


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory, walk: Walk) -> tuple[Path, list[tuple[str, list[str]]]]:
    """The folder in which the page's commands ran, and the outputs that the page quotes."""
    folder = tmp_path_factory.mktemp("empty")
    return folder, walk("quickstart.md", folder)


def test_the_quickstart_ends_with_a_rollback_to_an_earlier_champion(page_run: tuple[Path, object]) -> None:
    folder, _ = page_run
    command = [str(Path(sys.executable).with_name("posttrain")), "status", "-w", str(folder / "support"), "--json"]
    state = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [entry["decision"] for entry in state["rounds"]] == ["baseline", "deploy", "deploy"]
    assert [entry["labels"] for entry in state["rounds"]] == [0, 16, 32]
    accuracies = [entry["metrics"]["accuracy"] for entry in state["rounds"]]
    assert accuracies == sorted(accuracies)
    assert state["champion"]["round"] == 1
    assert (folder / "support" / "release" / "config.json").is_file()
    assert '<figure class="chart">' in (folder / "support" / "report.html").read_text(encoding="utf-8")


def test_the_commands_of_the_quickstart_print_the_quoted_output(
    page_run: tuple[Path, list[tuple[str, list[str]]]],
) -> None:
    _, quoted = page_run
    assert len(quoted) >= 5
    assert not [wrong for _, wrong in quoted if wrong]
