"""The selection page's commands run in order, print what it says, and its tables name what the code has."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.select.scores.registry import SCORES
from posttrain.select.selectors.registry import SELECTORS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "select.md").read_text(encoding="utf-8")

Quoted = list[tuple[str, list[str]]]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, walk: Callable[[str, Path], Quoted]) -> tuple[Path, Quoted]:
    """Where the page's commands were run, and the outputs that it quotes."""
    folder = tmp_path_factory.mktemp("select")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder, walk("select.md", folder)


def test_the_quoted_output_is_what_the_commands_print(walked: tuple[Path, Quoted]) -> None:
    _, quoted = walked
    assert len(quoted) >= 3
    assert not [untrue for _, untrue in quoted if untrue]


def test_the_values_can_be_used_as_it_says(walked: tuple[Path, Quoted]) -> None:
    folder, _ = walked
    header, *rows = (folder / "values.csv").read_text(encoding="utf-8").splitlines()
    assert {"id", "value", "standard_error", "weight"} <= set(header.split(","))
    assert len(rows) == 40


def _named(heading: str) -> set[str]:
    table = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_tables_name_every_strategy_and_score() -> None:
    assert _named("Strategy") == set(SELECTORS)
    assert _named("Score") == set(SCORES)
