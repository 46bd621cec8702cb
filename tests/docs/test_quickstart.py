"""The quickstart's commands run in order, and what it says they print is what they print."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Walk = Callable[[str, Path], list[tuple[str, list[str]]]]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, walk: Walk) -> tuple[Path, list[tuple[str, list[str]]]]:
    """The folder of the walk, and the quoted outputs."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples" / "support", folder / "examples" / "support")
    return folder, walk("quickstart.md", folder)


def test_the_walk_ends_with_a_champion_that_was_rolled_back_to(walked: tuple[Path, object]) -> None:
    folder, _ = walked
    command = [str(Path(sys.executable).with_name("posttrain")), "status", "-w", str(folder / "support"), "--json"]
    state = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [entry["decision"] for entry in state["rounds"]] == ["baseline", "deploy", "deploy"]
    assert [entry["labels"] for entry in state["rounds"]] == [0, 16, 32]
    accuracies = [entry["metrics"]["accuracy"] for entry in state["rounds"]]
    assert accuracies == sorted(accuracies)
    assert state["champion"]["round"] == 1
    assert (folder / "support" / "release" / "config.json").is_file()
    assert "<svg" in (folder / "support" / "curve.svg").read_text(encoding="utf-8")


def test_the_quoted_output_is_what_the_commands_print(walked: tuple[Path, list[tuple[str, list[str]]]]) -> None:
    _, quoted = walked
    assert len(quoted) >= 5
    assert not [untrue for _, untrue in quoted if untrue]
