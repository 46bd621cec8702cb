"""Records that a file names."""

from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.step import Step
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
    def step(self, table: pa.Table, tmp_path: Path) -> Step:
        file = tmp_path / "ids.txt"
        file.write_text(f"\n{table['id'][1].as_py()}\n", encoding="utf-8")
        return Drop(file=str(file))

    def test_an_id_takes_one_record(self, step: Step, table: pa.Table) -> None:
        result = apply_step(step, table)
        assert reasons(result) == {2: "named"}
        assert result.rejected["detail"].to_pylist() == ["ids.txt names it in line 2"]


def test_the_id_of_an_input_takes_all_its_records(table: pa.Table, tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    file.write_text(f"input_id,harmful\n{table['input_id'][0].as_py()},true\n", encoding="utf-8")
    assert lines(apply_step(Drop(file=str(file)), table).kept) == [3, 4]


def test_only_rows_that_are_said_to_do_harm_count(table: pa.Table, tmp_path: Path) -> None:
    ids = table["id"].to_pylist()
    file = tmp_path / "ids.jsonl"
    file.write_text(f'{{"id": "{ids[0]}", "harmful": false}}\n{{"id": "{ids[2]}", "harmful": true}}\n')
    assert lines(apply_step(Drop(file=str(file)), table).rejected) == [3]
    assert lines(apply_step(Drop(file=str(file), only=None), table).rejected) == [1, 3]


def test_the_key_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    keys = []
    for name, content in (("a.txt", "1"), ("b.txt", "1"), ("b.txt", "2")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        keys.append(Drop(file=name).located(tmp_path).key())
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ids.csv", "name\nx\n", "ids.csv:2: names no record"),
        ("ids.csv", "id,harmful\nx,perhaps\n", "ids.csv:2: `harmful` is `perhaps`"),
        ("ids.xls", "x", "`.xls` is not a format we read"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as wrong:
        Drop(file=name).located(tmp_path).check()
    assert says in str(wrong.value)
    with pytest.raises(UserError, match=r"there is no .*gone\.txt"):
        Drop(file="gone.txt").located(tmp_path).check()
