"""The commands of the recovery page back up and restore, find damage, repair it and rebuild the database."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_commands_print_the_quoted_output(
    tmp_path: Path, run: Callable[[str, Path], str], walk: Callable[[str, Path], list[tuple[str, list[str]]]]
) -> None:
    run("posttrain init support --example", tmp_path)
    run("posttrain run -w support", tmp_path)
    run("python support/fill.py support/labels/round-1.csv", tmp_path)
    run("posttrain run -w support", tmp_path)
    quoted: Any = walk("recovery.md", tmp_path)
    assert len(quoted) == 3
    assert not [wrong for _, wrong in quoted if wrong]
    for name in ("support", "restored"):
        assert "no damage" in run(f"posttrain verify -w {name}", tmp_path)
