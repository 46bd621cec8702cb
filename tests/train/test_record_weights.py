"""Trainings with record weights: their outputs, and invalid weights."""

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


def with_weights(records: pa.Table, weights: Sequence[Any], **columns: Any) -> pa.Table:
    meta = [json.dumps({"worth": weight, **columns}) for weight in weights]
    return records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(meta))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def run_training(tiny_model: Path, config: TrainConfig, tmp_path: Path) -> Any:
    """``run_training(records, **changes)``: the output folder and the summary."""
    number = iter(range(100))

    def run(records: pa.Table, **changes: Any) -> tuple[Path, dict[str, Any]]:
        run_config = TrainConfig.read(
            config.model_dump() | {"micro_batch_tokens": 4096, "weight": "worth"} | changes, ""
        )
        out = tmp_path / f"out-{next(number)}"
        meta = train(tiny_model, records, run_config, TASK, seed=3, out=out, scratch=tmp_path / f"{out.name}-scratch")
        return out, meta

    return run


def same_weights(first: Path, second: Path) -> bool:
    """Compares the weights of two trainings, up to float32's rounding; models are saved in bfloat16."""
    first_weights, second_weights = (load_file(folder / "model.safetensors") for folder in (first, second))
    return all(
        torch.allclose(first_weights[name].float(), second_weights[name].float(), rtol=1e-2, atol=1e-4)
        for name in first_weights
    )


def test_a_weight_of_zero_removes_the_record(run_training: Any, records: pa.Table) -> None:
    out, meta = run_training(with_weights(records, WEIGHTS))
    rows = [row for row, weight in enumerate(WEIGHTS) if weight]
    out_without, meta_without = run_training(with_weights(records, WEIGHTS).take(pa.array(rows)))
    assert contents(out) == contents(out_without)
    assert meta.pop("weightless") == [records["id"][row].as_py() for row in (2, 5)]
    assert meta == meta_without
    assert meta["examples"] == 8


def test_only_relative_weights_matter(run_training: Any, records: pa.Table) -> None:
    unweighted, _ = run_training(records, weight=None)
    assert contents(run_training(with_weights(records, [0.125] * 10))[0]) == contents(unweighted)
    weighted, _ = run_training(with_weights(records, WEIGHTS))
    assert contents(run_training(with_weights(records, [weight * 8 for weight in WEIGHTS]))[0]) == contents(weighted)
    assert not same_weights(run_training(with_weights(records, [weight or 1 for weight in WEIGHTS]))[0], unweighted), (
        "the weights matter"
    )


def test_a_weight_of_two_repeats_the_record(run_training: Any, records: pa.Table) -> None:
    """Steps of all records, with one record repeated or with a weight of two."""
    rows = pa.array([*range(10), 4])
    repeated, _ = run_training(with_weights(records, [1] * 10).take(rows), batch_size=11)
    weighted, _ = run_training(with_weights(records, [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]), batch_size=10)
    losses = [
        [step["loss"] for step in json.loads((out / "training.json").read_text())] for out in (repeated, weighted)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert same_weights(repeated, weighted)


def test_weights_do_not_depend_on_micro_batches_or_padding(
    run_training: Any, records: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = "dpo"
    weighted = with_weights(records, WEIGHTS)
    weighted = weighted.set_column(
        weighted.schema.get_field_index("rejected"), "rejected", pa.array(["no, not at all"] * 10)
    )
    expected, meta = run_training(weighted, objective=objective)
    single, _ = run_training(weighted, objective=objective, micro_batch_tokens=1)
    assert same_weights(expected, single)
    monkeypatch.setattr(packing, "has_full_attention", lambda *_: False)
    padded, padded_meta = run_training(weighted, objective=objective)
    assert same_weights(expected, padded)
    assert padded_meta["last_loss"] == pytest.approx(meta["last_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5, 1], "f:2: record .*2: its weight `worth` is -0.5; give it a finite one, 0 or more"),
        ([1, 1, math.inf], "f:3: record .*3: its weight `worth` is inf"),
        ([1, math.nan, 1], "f:2: record .*2: it has no number `worth` but `nan`; .* in train.weight"),
        ([1, "much", 1], "f:2: record .*2: it has no number `worth` but `much`"),
        ([1, 1, None], "f:3: record .*3: it has no number `worth` but `None`"),
        ([0, 0, 0], "train.weight: every record's weight `worth` is 0"),
    ],
)
def test_invalid_weights_are_refused(run_training: Any, records: pa.Table, weights: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_training(with_weights(records.slice(0, 3), weights))
    assert "\n" not in str(caught.value)


def test_mistakes_are_reported_before_a_model_is_loaded(
    run_training: Any, records: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(stage, "load_model", fail)
    with pytest.raises(UserError, match=r"it has no number `value` but `None`; .*train\.weight.*`worth`"):
        run_training(with_weights(records, WEIGHTS, topic="a"), weight="value")
    with pytest.raises(UserError, match=r"train\.weight: kto has no weights of records"):
        run_training(with_weights(records, WEIGHTS, label=True), objective="kto")
