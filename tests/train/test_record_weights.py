"""Trainings whose records count more or less: what they end in, and what cannot be a weight."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from posttrain.models import packing
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train import stage
from posttrain.train.config import TrainConfig
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
WEIGHTS = [1, 0.25, 0, 3, 1, 0, 0.5, 2, 1, 1]


def with_weights(records: pa.Table, weights: Sequence[Any], **more: Any) -> pa.Table:
    meta = [json.dumps({"worth": weight, **more}) for weight in weights]
    return records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(meta))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def trained(tiny_model: Path, config: TrainConfig, tmp_path: Path) -> Any:
    """``trained(records, **changes)``: the folder that it ends in, and what it counts."""
    number = iter(range(100))

    def run(records: pa.Table, **changes: Any) -> tuple[Path, dict[str, Any]]:
        changed = TrainConfig.read(config.model_dump() | {"micro_batch_tokens": 4096, "weight": "worth"} | changes, "")
        out = tmp_path / f"out-{next(number)}"
        meta = train(tiny_model, records, changed, TASK, seed=3, out=out, scratch=tmp_path / f"{out.name}-scratch")
        return out, meta

    return run


def near(one: Path, other: Path) -> bool:
    """Whether two trainings moved the weights alike, to float32's rounding; models are kept in bfloat16."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(torch.allclose(mine[name].float(), theirs[name].float(), rtol=1e-2, atol=1e-4) for name in mine)


def test_a_record_without_weight_is_not_there(trained: Any, records: pa.Table) -> None:
    out, meta = trained(with_weights(records, WEIGHTS))
    kept = [row for row, weight in enumerate(WEIGHTS) if weight]
    alone, without = trained(with_weights(records, WEIGHTS).take(pa.array(kept)))
    assert contents(out) == contents(alone)
    assert meta.pop("weightless") == [records["id"][row].as_py() for row in (2, 5)]
    assert meta == without
    assert meta["examples"] == 8


def test_only_relations_matter(trained: Any, records: pa.Table) -> None:
    plain, _ = trained(records, weight=None)
    assert contents(trained(with_weights(records, [0.125] * 10))[0]) == contents(plain)
    weighted, _ = trained(with_weights(records, WEIGHTS))
    assert contents(trained(with_weights(records, [weight * 8 for weight in WEIGHTS]))[0]) == contents(weighted)
    assert not near(trained(with_weights(records, [weight or 1 for weight in WEIGHTS]))[0], plain), "they do matter"


def test_a_record_that_counts_twice(trained: Any, records: pa.Table) -> None:
    """In steps of all records, in which one stands twice or counts twice."""
    order = pa.array([*range(10), 4])
    twice, _ = trained(with_weights(records, [1] * 10).take(order), batch_size=11)
    counted, _ = trained(with_weights(records, [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]), batch_size=10)
    losses = [[step["loss"] for step in json.loads((out / "training.json").read_text())] for out in (twice, counted)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert near(twice, counted)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_however_rows_are_laid_out(
    trained: Any, records: pa.Table, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    weighted = with_weights(records, WEIGHTS)
    if objective == "dpo":
        weighted = weighted.set_column(
            weighted.schema.get_field_index("rejected"), "rejected", pa.array(["no, not at all"] * 10)
        )
    whole, meta = trained(weighted, objective=objective)
    cut, _ = trained(weighted, objective=objective, micro_batch_tokens=1)
    assert near(whole, cut)
    monkeypatch.setattr(packing, "has_full_attention", lambda *_: False)
    padded, counted = trained(weighted, objective=objective)
    assert near(whole, padded)
    assert counted["last_loss"] == pytest.approx(meta["last_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, -0.5, 1], "f:2: record .*2: its weight `worth` is -0.5; give it a finite one, 0 or more"),
        ([1, 1, math.inf], "f:3: record .*3: its weight `worth` is inf"),
        ([1, math.nan, 1], "f:2: record .*2: it has no number `worth` but `nan`; .* in train.weight"),
        ([1, "much", 1], "f:2: record .*2: it has no number `worth` but `much`"),
        ([1, 1, None], "f:3: record .*3: it has no number `worth` but `None`"),
        ([0, 0, 0], "train.weight: every record's weight `worth` is 0"),
    ],
)
def test_what_is_no_weight(trained: Any, records: pa.Table, weights: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        trained(with_weights(records.slice(0, 3), weights))
    assert "\n" not in str(caught.value)


def test_mistakes_are_said_before_a_model_is_loaded(
    trained: Any, records: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(stage, "load_model", never)
    with pytest.raises(UserError, match=r"it has no number `value` but `None`; .*train\.weight.*`worth`"):
        trained(with_weights(records, WEIGHTS, topic="a"), weight="value")
    with pytest.raises(UserError, match=r"train\.weight: kto has no weights of records"):
        trained(with_weights(records, WEIGHTS, label=True), objective="kto")
