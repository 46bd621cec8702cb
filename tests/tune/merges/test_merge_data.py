"""Records for merge methods: which are drawn, and merging on files in Python."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from model_family import family, merge_file  # noqa: F401

from posttrain.data.records.record import RECORD
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.tune.merges.data import draw_examples, merge_on_data, with_data


def table(answers: list[str | None]) -> pa.Table:
    rows = [
        {**dict.fromkeys(RECORD.names), "prompt": [{"role": "user", "content": f"p{number}"}], "completion": answer}
        for number, answer in enumerate(answers)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD)


def test_examples_are_drawn_by_the_seed_in_their_order_and_only_with_answers() -> None:
    records = table([None if number % 3 == 0 else str(number) for number in range(60)])
    drawn = draw_examples(records, 10, 0, "data")
    numbers = [int(answer) for _, answer in drawn]
    assert len(numbers) == 10
    assert numbers == sorted(set(numbers))
    assert all(number % 3 for number in numbers)
    assert drawn[0][0] == [{"role": "user", "content": f"p{numbers[0]}"}]
    assert draw_examples(records, 10, 0, "data") == drawn != draw_examples(records, 10, 1, "data")
    assert len(draw_examples(records, 256, 0, "data")) == 40
    with pytest.raises(UserError, match="data: no record has an answer"):
        draw_examples(table([None, None]), 10, 0, "data")


def test_files_are_for_all_models_or_one_a_model() -> None:
    recipe = Recipe.read({"models": ["a", "b"], "data": "old"}, "recipe")
    assert with_data(recipe, []).data_files() == ["old"]
    assert with_data(recipe, ["new"]).data_files() == ["new"]
    assert with_data(recipe, ["x", "y"]).data_files() == ["x", "y"]
    with pytest.raises(UserError, match="3 files for 2 models"):
        with_data(recipe, ["x", "y", "z"])


@pytest.mark.slow
def test_merging_on_a_file_in_python(family: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "one", "completion": "two"}))
    models = [family / "a", family / "b"]
    result = merge_on_data(models, tmp_path / "out", data="data.jsonl", root=tmp_path, method="regmean", alpha=0.5)
    description = merge_file(result.folder)
    assert description["recipe"]["parameters"] == {"alpha": 0.5}  # type: ignore[index]
    assert [entry["examples"] for entry in description["statistics"]] == [1, 1]  # type: ignore[attr-defined]
