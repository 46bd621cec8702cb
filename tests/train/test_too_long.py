"""`train.too_long`: records longer than the limit are cut, or left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.training_set import TrainingSet, read_training_set

LONG = {1, 4}


def training_set(folder: Path, answer: str = "fine", **settings: Any) -> TrainingSet:
    """Six records, of which those in LONG have a prompt of a hundred words, and their number as a weight."""
    path = folder / "records.jsonl"
    rows = [
        {"prompt": "how is it " * (100 if number in LONG else 1) + str(number), "completion": answer, "w": number}
        for number in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = TrainConfig.read({"max_length": 64, **settings}, "train")
    return read_training_set("tiny", concat(list(read(path))), config, TaskConfig(), folder / "scratch", np.arange(6.0))


def test_long_records_are_cut_by_default(tmp_path: Path) -> None:
    data = training_set(tmp_path)
    assert len(data.units) == 6
    assert len(data.units.cut) == len(LONG)
    assert data.too_long == []


def test_long_records_are_left_out(tmp_path: Path) -> None:
    cut, data = training_set(tmp_path), training_set(tmp_path, too_long="drop")
    assert data.too_long == cut.units.cut
    assert len(data.units) == 4
    assert data.units.cut == []
    kept = [row for row in range(6) if row not in LONG]
    assert data.records.difficulties is not None
    assert data.records.difficulties.tolist() == kept
    assert data.units[:] == [cut.units[row] for row in kept]


def test_weights_are_those_of_the_records_that_stay(tmp_path: Path) -> None:
    data = training_set(tmp_path, too_long="drop", weight="w")
    assert len(data.weightless) == 1
    assert data.records.weights is not None
    assert data.records.weights.tolist() == pytest.approx([2 * 3 / 10, 3 * 3 / 10, 5 * 3 / 10])


def test_an_answer_that_leaves_no_room_is_left_out_too(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        training_set(tmp_path, "word " * 100)
    with pytest.raises(UserError, match=r"^train\.max_length: all 6 records are longer than 64 tokens; raise it"):
        training_set(tmp_path, "word " * 100, too_long="drop")


def test_pairs_of_equal_answers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rows = [{"prompt": str(number), "chosen": "good", "rejected": "bad ", "w": number} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    records = concat(list(read(path)))
    # As a step does that rewrites answers.
    worse = pa.array(["bad", "good", "bad", "good"])
    equal = records.set_column(records.schema.get_field_index("rejected"), "rejected", worse)
    config = TrainConfig.read({"objective": "dpo", "weight": "w"}, "train")
    data = read_training_set("tiny", equal, config, TaskConfig(), tmp_path / "scratch", np.arange(4.0))
    assert data.identical == [records["id"][1].as_py(), records["id"][3].as_py()]
    assert (len(data.units), len(data.weightless)) == (1, 1)
    assert data.records.difficulties is not None
    assert data.records.difficulties.tolist() == [2]
    with pytest.raises(UserError, match=r"its chosen and its rejected answer are the same, as in all others"):
        read_training_set("tiny", equal.take([1, 3]), config, TaskConfig(), tmp_path / "scratch", np.arange(2.0))
