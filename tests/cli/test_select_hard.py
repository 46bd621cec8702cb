"""``posttrain select hard``: the hardest records, and pairs with hard negatives for a training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.reading.reader import read
from posttrain.data.records.provenance import record_kinds
from posttrain.data.records.record import concat

Call = Callable[..., Any]


def inputs_of(workspace: Path, posttrain: Call, name: str) -> set[str]:
    rows = posttrain("data", "show", name, "--limit", 1000, "-w", workspace, "--json").json["records"]
    return {row["input_id"] for row in rows}


@pytest.mark.slow
def test_the_hardest_records_are_above_the_percentile(finished_copy: Path, posttrain: Call) -> None:
    listing = posttrain("select", "hard", "-w", finished_copy, "--percentile", 0, "--json").json
    assert listing["counts"] == {"training": 24, "pool": 36, "test": 20}
    for name, measure in (("training", "loss"), ("pool", "entropy"), ("test", "loss")):
        values = [row[measure] for row in listing[name]]
        # Above the 0th percentile are all but the least.
        assert len(values) == listing["counts"][name] - 1
        assert values == sorted(values, reverse=True)
        rows = posttrain("select", "hard", "-w", finished_copy, "--percentile", 75, "--json").json[name]
        assert rows == listing[name][: len(rows)]
        assert len(rows) == listing["counts"][name] // 4
    assert {row["id"] for row in listing["training"]} < {
        row["id"]
        for row in posttrain("data", "show", "train", "--limit", 99, "-w", finished_copy, "--json").json["records"]
    }
    text = posttrain("select", "hard", "-w", finished_copy, "--n", 2).out
    assert "training: 3 of 24 records have a higher loss than percentile 90" in " ".join(text.split())
    assert "0 of 24" in posttrain("select", "hard", "-w", finished_copy, "--percentile", 100).out


@pytest.mark.slow
def test_pairs_train_with_dpo_and_hold_no_test_record(finished_copy: Path, posttrain: Call, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    command = ("select", "hard", "-w", finished_copy, "--pairs", file)
    result = posttrain(*command, "--json").json
    pairs = concat(list(read(file)))
    assert result["pairs"] == pairs.num_rows > 0
    confused = {tuple(pair["labels"]) for pair in result["confused"]}
    assert {tuple(sorted((row["completion"], row["rejected"]))) for row in pairs.to_pylist()} <= confused
    assert all(json.loads(meta)["hard_negative"]["confused"] for meta in pairs["meta"].to_pylist())
    inputs = set(pairs["input_id"].to_pylist())
    assert inputs <= inputs_of(finished_copy, posttrain, "train")
    assert not inputs & inputs_of(finished_copy, posttrain, "test")
    champion = finished_copy / ".posttrain" / "champion"
    out = tmp_path / "dpo"
    train = ("train", "--model", champion, "--objective", "dpo", "--data", file, "--out", out)
    assert posttrain(*train, "--set", "train.epochs=1").code == 0
    assert set(record_kinds(pairs["meta"])) == {"hard_negatives"}
    assert "the file exists already" in posttrain(*command).mistake


def test_mistakes_of_hard_are_refused_in_one_line(
    small: Any, finished_copy: Path, posttrain: Call, tmp_path: Path
) -> None:
    pairs = ("--pairs", tmp_path / "pairs.jsonl")
    assert "--percentile" in posttrain("select", "hard", "-w", finished_copy, "--percentile", 101).mistake
    assert (
        "pairs have no percentile"
        in posttrain("select", "hard", "-w", finished_copy, "--percentile", 5, *pairs).mistake
    )
    assert "use .jsonl" in posttrain("select", "hard", "-w", finished_copy, "--pairs", tmp_path / "pairs.txt").mistake
    assert "no model has been trained yet" in posttrain("select", "hard", "-w", small("new")).mistake
    small.configure(finished_copy, task={"labels": None})
    assert "free text has none" in posttrain("select", "hard", "-w", finished_copy, *pairs).mistake
    assert not (tmp_path / "pairs.jsonl").exists()
