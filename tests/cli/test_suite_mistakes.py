"""Every verb that measures refuses a broken suite in one line, with exit code 2, before any work."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
Tree = Callable[[Path], dict[str, str]]
BROKEN = {"scorer": "python", "function": "broken_for_this_test:score"}


@pytest.mark.parametrize("verb", [["config", "check"], ["run"], ["eval"], ["select"]])
@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ({"data": "none.csv"}, "evaluate.suites.extra.data: no such file: none.csv; check the path"),
        (BROKEN, "NameError: name 'undefined' is not defined ({root}/broken_for_this_test.py:2); fix it"),
    ],
)
def test_a_broken_suite_is_refused(
    small: Any,
    finished_workspace: Path,
    posttrain: Call,
    tree: Tree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    suite: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    root = tmp_path / "copy"
    shutil.copytree(finished_workspace, root, symlinks=True)
    small.configure(root, evaluate={"suites": {"test": {}, "extra": suite}})
    (root / "broken_for_this_test.py").write_text("limit = 3\nscore = undefined\n")
    before = tree(root)
    assert message.format(root=root) in posttrain(*verb, "-w", root).mistake
    assert tree(root) == before


def test_a_suite_may_use_a_function_of_the_workspace(
    small: Any, finished_workspace: Path, posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    root = tmp_path / "copy"
    shutil.copytree(finished_workspace, root, symlinks=True)
    suite = {"scorer": "python", "function": "scores_in_the_workspace:length"}
    small.configure(root, evaluate={"suites": {"test": {}, "extra": suite}})
    (root / "scores_in_the_workspace.py").write_text("def length(answer, expected, prompt):\n    return len(answer)\n")
    assert posttrain("config", "check", "-w", root).code == 0
    assert posttrain("eval", "-w", root, "--json").json["metrics"]["extra"] >= 0
