"""Rounds that train on pairs with hard negatives, and batches from the boundary of confused labels."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import load_config
from posttrain.loop.score_files import BATCH, CASES, HARD_CASES, HARD_RECORDS, SCORES
from posttrain.loop.stages.negatives import pair_records
from posttrain.select.hard_cases import TRAINING_KIND
from posttrain.select.hard_negatives import confused_labels
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

OpenLoop = Any
PAIRS = {
    "select": {"hard_negatives": True},
    "train": {"objective": "orpo", "epochs": 2, "learning_rate": 4.0e-3, "precision": "float32"},
}


def table_at(loop: OpenLoop, id: str) -> pa.Table:
    return parquet.read_table(loop.store.artifacts.path(id) / "records.parquet")


@pytest.mark.slow
def test_rounds_train_on_pairs_of_their_own_records(small: Any, begun_loop: Callable[..., OpenLoop]) -> None:
    loop = begun_loop(**PAIRS)
    loop.run(1)
    loop.run(until="train")
    for number in (1, 2):
        detail = loop.metadata.rounds()[number].detail
        own, pairs = table_at(loop, detail["dataset"]), table_at(loop, detail["outputs"]["negatives"])
        assert own["rejected"].null_count == own.num_rows == 12 * number
        assert pairs["input_id"].equals(own["input_id"])
        assert pairs["completion"].equals(own["completion"])
        assert set(pairs["rejected"].to_pylist()) <= set(small.labels)
        marks = [json.loads(meta)["hard_negative"] for meta in pairs["meta"].to_pylist()]
        label_of = dict(zip(own["id"].to_pylist(), own["completion"].to_pylist(), strict=True))
        for mark, chosen, rejected in zip(
            marks, pairs["completion"].to_pylist(), pairs["rejected"].to_pylist(), strict=True
        ):
            assert label_of[mark["of"]] == rejected != chosen
        # No input of a test record, and none that is not in the training set, takes part.
        assert not set(pairs["input_id"].to_pylist()) & set(table_at(loop, detail["test"])["input_id"].to_pylist())
        train = loop.metadata.runs(stage="train", round=number)[-1]
        assert train.inputs["dataset"] == detail["outputs"]["negatives"]
        if number == 1:
            assert detail["next_parent"] == detail["dataset"], "the next round builds on the labels alone"
        inputs = loop.metadata.runs(stage="negatives", round=number)[-1].inputs
        assert "test" not in inputs
        evaluated = inputs.get("evaluation")
        if number == 1:
            assert evaluated is None, "the base model's errors say nothing"
            assert not any(mark["confused"] for mark in marks)
        else:
            errors = next(iter(read_evaluation(loop.store.artifacts.path(evaluated)).values())).predictions
            confused = confused_labels(errors, small.labels)
            for mark, pair in zip(marks, pairs.select(["completion", "rejected"]).to_pylist(), strict=True):
                assert mark["confused"] == (tuple(sorted(pair.values())) in confused)
            assert any(mark["confused"] for mark in marks)
    assert [named.text for named in loop.metadata.names("pairs")] == ["pairs@v1", "pairs@v2"]


@pytest.mark.slow
def test_a_loop_without_the_key_makes_no_pairs(begun_loop: Callable[..., OpenLoop]) -> None:
    loop = begun_loop()
    loop.run(1, until="negatives")
    assert "output negatives" not in loop.metadata.rounds()[1].detail
    assert not loop.metadata.runs(stage="negatives")


@pytest.mark.slow
def test_hard_training_and_pool_records_are_focused_on(
    small: Any, copied_loop: OpenLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.score.HIGH_LOSS_PERCENTILE", 75.0)
    kinds = [TRAINING_KIND, "high_entropy", "boundary"]
    loop = copied_loop
    select = {"hard_cases": kinds, "focus": 0.5, "strategy": "entropy"}
    small.configure(loop.root, select=select)
    loop.run(3, until="select")
    detail = loop.metadata.rounds()[3].detail
    folder = loop.store.artifacts.path(detail["scores"])
    [score_run] = [run for run in loop.metadata.runs(stage="score") if run.output == detail["scores"]]
    cases = json.loads((folder / CASES).read_text())
    train = table_at(loop, score_run.inputs["train"])
    assert len(cases) == 6 == len(np.load(folder / HARD_CASES)), "a quarter of the 24 training records"
    assert {case["id"] for case in cases} <= set(train["id"].to_pylist())
    hard = json.loads((folder / HARD_RECORDS).read_text())
    scores = parquet.read_table(folder / SCORES, columns=["id", "entropy"]).to_pylist()
    limit = np.percentile([row["entropy"] for row in scores], 75)
    assert {row["id"] for row in scores if row["entropy"] > limit} == {
        id for id, why in hard.items() if why.startswith("entropy above the pool's 75th percentile")
    }
    errors = next(iter(read_evaluation(loop.store.artifacts.path(score_run.inputs["evaluation"])).values())).predictions
    between = [why.split("between ")[1] for why in hard.values() if "between" in why]
    assert between
    for why in between:
        first, second = why.split("`")[1::2]
        assert tuple(sorted((first, second))) in confused_labels(errors, small.labels)
    batch = parquet.read_table(loop.store.artifacts.path(detail["selection"]) / BATCH).to_pylist()
    focused = [row for row in batch if row["reason"] == "focus"]
    assert focused
    assert any(hard[row["id"]] in row["why"] for row in focused if row["id"] in hard)
    assert not any(sentence in row["why"] for row in batch if row["id"] not in hard for sentence in hard.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": {"hard_negatives": True}}, "select.hard_negatives: `sft` does not train on pairs"),
        ({**PAIRS, "task": {"labels": None}}, "select.hard_negatives: .* free text has none"),
        ({**PAIRS, "task": {"labels": ["card"]}}, "a label set needs at least two labels"),
        ({"select": {"hard_cases": ["bondary"]}}, "boundary"),
        ({"select": {"hard_cases": ["boundary"]}, "task": {"labels": None}}, "select.hard_cases.* free text has none"),
    ],
)
def test_impossible_settings_are_refused(small: Any, changes: dict[str, Any], message: str) -> None:
    root = small(**changes)
    with pytest.raises(UserError, match=message):
        load_config(root)


def test_a_set_of_one_label_gets_pairs_all_the_same() -> None:
    records = table_of(*({"prompt": f"message {n}", "completion": "b"} for n in range(3)))
    pairs = pair_records(records, np.eye(3), ["a", "b"], {("a", "b"): 2})
    assert pairs["rejected"].to_pylist() == ["a"] * 3
    assert json.loads(pairs["meta"][0].as_py())["hard_negative"] == {"confused": False, "of": None, "similarity": None}
    empty = pair_records(records.slice(0, 0), np.zeros((0, 3)), ["a", "b"], {})
    assert empty.num_rows == 0


def test_a_pair_of_people_stays_as_it_is() -> None:
    rows = [{"prompt": "x", "completion": "a", "rejected": "c"}, {"prompt": "y", "completion": "b"}]
    records = table_of(*({**row, "source": "f", "line": n} for n, row in enumerate(rows)))
    pairs = pair_records(records, np.eye(2), ["a", "b", "c"], {})
    assert pairs.slice(0, 1).equals(records.slice(0, 1))
    assert pairs["rejected"].to_pylist() == ["c", "a"]
