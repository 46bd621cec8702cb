"""Drop removes the records that a file names."""

from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of


@pytest.fixture
def table() -> pa.Table:
    return table_of(
        {"prompt": "a", "completion": "x"},
        {"prompt": "a", "completion": "y"},
        {"prompt": "b", "completion": "x"},
        "c",
    )


class TestDrop(StepContract):
    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    @pytest.fixture
    def step(self, table: pa.Table, tmp_path: Path) -> DataStep:
        file = tmp_path / "ids.txt"
        file.write_text(f"\n{table['id'][1].as_py()}\n", encoding="utf-8")
        return Drop(file=str(file))

    def test_an_id_drops_one_record(self, step: DataStep, table: pa.Table) -> None:
        result = apply_step(step, table)
        assert reasons(result) == {2: "named"}
        assert result.rejected["detail"].to_pylist() == ["ids.txt names it in line 2"]


def test_an_input_id_drops_all_its_records(table: pa.Table, tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    file.write_text(f"input_id,harmful\n{table['input_id'][0].as_py()},true\n", encoding="utf-8")
    assert lines(apply_step(Drop(file=str(file)), table).kept) == [3, 4]


def test_only_rows_marked_harmful_are_dropped(table: pa.Table, tmp_path: Path) -> None:
    ids = table["id"].to_pylist()
    file = tmp_path / "ids.jsonl"
    file.write_text(f'{{"id": "{ids[0]}", "harmful": false}}\n{{"id": "{ids[2]}", "harmful": true}}\n')
    assert lines(apply_step(Drop(file=str(file)), table).rejected) == [3]
    assert lines(apply_step(Drop(file=str(file), only=None), table).rejected) == [1, 3]


def test_the_key_holds_the_content_not_the_path(tmp_path: Path) -> None:
    keys = []
    for name, content in (("a.txt", "1"), ("b.txt", "1"), ("b.txt", "2")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        keys.append(Drop(file=name).located(tmp_path).key())
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ids.csv", "name\nx\n", "ids.csv:2: names no record"),
        ("ids.csv", "id,harmful\nx,perhaps\n", "ids.csv:2: `harmful` is `perhaps`"),
        ("ids.xls", "x", "`.xls` is not a format we read"),
    ],
)
def test_invalid_and_missing_files_raise(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        Drop(file=name).located(tmp_path).check()
    assert message in str(error.value)
    with pytest.raises(UserError, match=r"there is no .*gone\.txt"):
        Drop(file="gone.txt").located(tmp_path).check()
