"""The data page's commands run in order and print the quoted output, and its tables match the code."""

import re
import runpy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.steps.registry import STEPS
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.recipe import parse_step
from posttrain.store.workspace import Workspace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")

PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

Quoted = list[tuple[str, list[str]]]


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory, walk: Callable[[str, Path], Quoted]) -> tuple[Path, Quoted]:
    """The folder in which the page's commands ran, and the outputs that the page quotes."""
    folder = tmp_path_factory.mktemp("data")
    return folder, walk("data.md", folder)


def test_the_commands_of_the_data_page_print_the_quoted_output(page_run: tuple[Path, Quoted]) -> None:
    _, quoted = page_run
    assert len(quoted) >= 6
    assert not [wrong for _, wrong in quoted if wrong]


def test_adding_building_at_once_and_python_give_the_same_version(
    page_run: tuple[Path, Quoted], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = page_run
    block = next(block for block in PYTHON if "in-python" in block)
    (folder / "call.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(folder)
    runpy.run_path("call.py")
    with Workspace.open(folder) as workspace:
        ids = {workspace.metadata.named(name) for name in ("support@v1.1.0", "at-once@v1.0.0", "in-python@v1.0.0")}
    assert len(ids) == 1


def test_report_export_and_training_write_their_files(page_run: tuple[Path, Quoted]) -> None:
    folder, _ = page_run
    assert '<figure class="chart">' in (folder / "support.html").read_text(encoding="utf-8")
    assert len((folder / "train.jsonl").read_text(encoding="utf-8").splitlines()) == 5
    assert (folder / "trained" / "model.safetensors").is_file()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (5, 2)])
def test_ranks_read_each_row_once_when_their_number_changes(tmp_path: Path, before: int, after: int) -> None:
    (code,) = [block for block in PYTHON if "world_size" in block]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    file = str(tmp_path / "train.parquet")
    pq.write_table(pa.table({"id": range(29)}), file)
    read: list[int] = []
    first = [list(islice(names["batches"](file, rank, before), 2)) for rank in range(before)]
    assert {batches[-1][1] for batches in first} == {16}
    rest = [list(names["batches"](file, rank, after, done=16)) for rank in range(after)]
    for rank in first + rest:
        read += [row["id"] for rows, _ in rank for row in rows]
    assert sorted(read) == list(range(29))


def test_the_feedback_is_in_the_last_version(page_run: tuple[Path, Quoted]) -> None:
    folder, _ = page_run
    with Workspace.open(folder) as workspace:
        assert [name.text for name in workspace.metadata.names("support")][-1] == "support@v1.2.0"


def test_the_generated_parts_are_up_to_date() -> None:
    for page, text in runpy.run_path(str(ROOT / "docs" / "update.py"))["pages"]().items():
        assert page.read_text(encoding="utf-8") == text, "run: python docs/update.py"


def test_the_table_has_every_step_with_its_scope_and_records() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| [^|]+ \| (\w+) \| ([\w ]+) \|", PAGE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(STEPS)
    for name, anchor, scope, records in rows:
        step = STEPS[name]
        assert anchor == name
        assert scope == ("one" if issubclass(step, RowStep) else "all"), name
        assert records == ("training" if step.training_only else "every record"), name
        assert f"\n### {name}\n" in PAGE


def test_the_sets_of_the_loop_use_the_listed_steps() -> None:
    sentence = PAGE.partition("In the loop")[2].partition("\n\n")[0].partition("test records go through")
    hidden = {name for name, step in STEPS.items() if step.needs_answers and not step.training_only}
    assert set(re.findall(r"`(\w+)`", sentence[0])) == {"decontaminate", *hidden}
    assert set(re.findall(r"`(\w+)`", sentence[2])) == {name for name, step in STEPS.items() if step.evaluation}


@pytest.mark.parametrize("name", STEPS)
def test_every_default_of_the_page_is_accepted(name: str) -> None:
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0].partition("`method: ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| ", section, re.MULTILINE)
    assert {key.partition(".")[0] for key, _ in rows} == set(STEPS[name].model_fields)
    if any(default == "required" for _, default in rows) or name == "quality":
        return
    assert parse_step(name).model_dump() == STEPS[name]().model_dump()
