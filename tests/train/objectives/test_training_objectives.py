"""Objectives of each kind through ``posttrain.train.train``: the loss falls, and the output loads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.packing import pack, packs
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.data import loader
from posttrain.train.objectives import reference
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name it.", labels=["card", "refund", "top up"])
# Metrics that must rise while the loss falls, so that the objective itself is learned.
RISES = {
    **dict.fromkeys(("dpo", "orpo", "kto"), "rewards/margins"),
    "reward": "rewards/accuracies",
    "classification": "accuracy",
    "distill": "agreement",
}


def config_of(objective: str, teacher: Path, **options: Any) -> TrainConfig:
    distill = {"name": "distill", "teacher": str(teacher), "divergence": "none" if "hidden" in objective else "reverse"}
    values = {
        "objective": distill if "distill" in objective else objective,
        "precision": "float32",
        "epochs": 5,
        "batch_size": 4,
        "shuffle": False,
        "micro_batch_tokens": 4096,
        "learning_rate": 3e-3,
        "schedule": {"name": "constant", "warmup": 0.0},
        "checkpoint": {"every_seconds": None},
    }
    return TrainConfig.read(values | options, "test")


def train_objective(
    records_of_shape: Any, model: Path, config: TrainConfig, out: Path, name: str = "out"
) -> tuple[Any, list[Any]]:
    records = records_of_shape(config.spec.shape)
    meta = train(model, records, config, TASK, seed=0, out=out / name, scratch=out / f"{name}-scratch")
    return meta, json.loads((out / name / "training.json").read_text())


# That the loss of each objective falls is in its contract: `test_built_in_objectives`.
@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo", "kto", "reward", "classification", "distill"])
def test_the_loss_falls_and_the_output_loads(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any, objective: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    meta, steps = train_objective(records_of_shape, tiny_model, config_of(objective, other_model), tmp_path)
    assert meta["steps"] == len(steps) == 10
    before, after = ([step["loss"] for step in steps[part]] for part in (slice(0, 2), slice(-2, None)))
    assert sum(after) < 0.8 * sum(before) if sum(before) > 0 else sum(after) < sum(before) - 0.1
    if name := RISES.get(objective):
        assert steps[-1]["metrics"][name] > steps[0]["metrics"][name]
    model_class = (
        AutoModelForSequenceClassification if objective in ("reward", "classification") else AutoModelForCausalLM
    )
    _, loading = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"], "no weights of the objective remain"


@pytest.mark.parametrize("objective", ["dpo", "reward", "hidden distill"])
def test_an_adapter_learns_the_objective(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any, objective: str
) -> None:
    config = config_of(objective, other_model, method="lora", epochs=8, learning_rate=1e-2, lora={"rank": 4})
    _, steps = train_objective(records_of_shape, tiny_model, config, tmp_path)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_reference_uses_the_micro_batches_of_the_training(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the log-probabilities depend on the micro-batch; with equal ones the first loss is exact."""
    rows_read: dict[str, list[list[int]]] = {"reference": [], "loader": []}

    def record_rows(name: str, function: Any) -> Any:
        def recorded(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            rows_read[name] += [item.ids[0].tolist() for item in (result if isinstance(result, list) else [result])]
            return result

        return recorded

    monkeypatch.setattr(reference, "pack", record_rows("reference", pack))
    monkeypatch.setattr(loader, "packs", record_rows("loader", packs))
    options = {"precision": "bfloat16", "shuffle": True, "micro_batch_tokens": 150, "epochs": 1, "learning_rate": 1e-30}
    _, steps = train_objective(records_of_shape, tiny_model, config_of("dpo", other_model, **options), tmp_path)
    assert len(rows_read["loader"]) > len(steps) > 1
    assert rows_read["reference"] == rows_read["loader"]
    assert [step["loss"] for step in steps] == pytest.approx([math.log(2)] * len(steps), abs=1e-7)


def test_a_classifier_learns_its_labels(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any
) -> None:
    from transformers import AutoModelForSequenceClassification

    train_objective(records_of_shape, tiny_model, config_of("classification", other_model, epochs=20), tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    from posttrain.models.classifier import load_classifier

    lm = load_classifier(tmp_path / "out", TASK, "float32", TASK.label_set)
    for record in records_of_shape("class").to_pylist():
        ids = torch.tensor([lm.prompt_ids(record["prompt"])])
        with torch.no_grad():
            assert model.config.id2label[int(model(input_ids=ids).logits.argmax())] == record["completion"]


def test_a_saved_reward_model_trains_further(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any
) -> None:
    config = config_of("reward", other_model)
    first, _ = train_objective(records_of_shape, tiny_model, config, tmp_path)
    second, _ = train_objective(records_of_shape, tmp_path / "out", config, tmp_path, "again")
    assert second["first_loss"] < 0.5 * first["first_loss"]


def test_the_losses_do_not_depend_on_micro_batches(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any
) -> None:
    result = []
    for tokens in (1, 10_000, "auto"):
        config = config_of("dpo", other_model, micro_batch_tokens=tokens, epochs=2)
        result.append(train_objective(records_of_shape, tiny_model, config, tmp_path, f"out{tokens}")[1])
    losses = [[step["loss"] for step in steps] for steps in result]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "shape", "message"),
    [
        ("dpo", "completion", "it is not a pair of a chosen and a rejected answer"),
        ("kto", "completion", "it is not an answer with a label true or false"),
        ("classification", "labelled", "no label `card lost` in task.labels"),
    ],
)
def test_records_of_another_shape_are_refused(
    tiny_model: Path, other_model: Path, tmp_path: Path, records_of_shape: Any, objective: str, shape: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(
            tiny_model,
            records_of_shape(shape),
            config_of(objective, other_model),
            TASK,
            seed=0,
            out=tmp_path / "out",
            scratch=tmp_path / "s",
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
