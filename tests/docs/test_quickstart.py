"""The quickstart's commands run in order, and what it says they print is what they print."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[str, Path], str]
ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory, run: Run) -> tuple[Path, list[tuple[str, str]]]:
    """The folder of the walk, and for every quoted output the block and what the commands before it printed."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples" / "support", folder / "examples" / "support")
    printed = ""
    quoted = []
    for kind, text in FENCE.findall((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")):
        if kind == "text":
            quoted.append((text, printed))
            continue
        printed = run(text, folder)
    return folder, quoted


def test_the_walk_ends_with_a_champion_that_was_rolled_back_to(walk: tuple[Path, list[tuple[str, str]]]) -> None:
    folder, _ = walk
    command = [str(Path(sys.executable).with_name("posttrain")), "status", "-w", str(folder / "support"), "--json"]
    state = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [entry["decision"] for entry in state["rounds"]] == ["baseline", "deploy", "deploy"]
    assert [entry["labels"] for entry in state["rounds"]] == [0, 32, 64]
    accuracies = [entry["metrics"]["accuracy"] for entry in state["rounds"]]
    assert accuracies == sorted(accuracies)
    assert state["champion"]["round"] == 1
    assert (folder / "support" / "release" / "config.json").is_file()
    assert "<svg" in (folder / "support" / "curve.svg").read_text(encoding="utf-8")


def test_the_quoted_output_is_what_the_commands_print(walk: tuple[Path, list[tuple[str, str]]]) -> None:
    _, quoted = walk
    assert len(quoted) >= 5
    for block, printed in quoted:
        lines = {_shape(line) for line in printed.splitlines()}
        for line in block.splitlines():
            assert _shape(line) in lines, f"`{line}` is not in what was printed:\n{printed}"


def _shape(line: str) -> str:
    """A line with its numbers, ids, folders and column widths left out, as these differ between machines."""
    line = re.sub(r"\b([a-z]+)-[0-9a-f]{16}\b", r"\1-ID", line)
    line = re.sub(r"\S+/(?=support/\.posttrain)", "", line)
    return " ".join(re.sub(r"[+-]?\d+(\.\d+)?", "#", line).split())
