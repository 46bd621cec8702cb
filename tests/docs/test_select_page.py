"""The selection page's commands run in order and print the quoted output, and its tables match the code."""

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
def page_run(tmp_path_factory: pytest.TempPathFactory, walk: Callable[[str, Path], Quoted]) -> tuple[Path, Quoted]:
    """The folder in which the page's commands ran, and the outputs that the page quotes."""
    folder = tmp_path_factory.mktemp("select")
    return folder, walk("select.md", folder)


def test_the_commands_of_the_selection_page_print_the_quoted_output(page_run: tuple[Path, Quoted]) -> None:
    _, quoted = page_run
    assert len(quoted) >= 3
    assert not [wrong for _, wrong in quoted if wrong]


def test_the_file_of_values_has_its_columns(page_run: tuple[Path, Quoted]) -> None:
    folder, _ = page_run
    header, *rows = (folder / "values.csv").read_text(encoding="utf-8").splitlines()
    assert {"id", "value", "standard_error", "weight"} <= set(header.split(","))
    assert len(rows) == 40


def _table_names(heading: str) -> set[str]:
    table = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_tables_name_every_strategy_and_score() -> None:
    assert _table_names("Strategy") == set(SELECTORS)
    assert _table_names("Score") == set(SCORES)
