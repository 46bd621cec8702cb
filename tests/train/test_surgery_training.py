"""Trainings with gradient surgery: steps against transformers' own gradients, micro-batches, kills, and bad input."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.models import packing
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train import stage
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.optim import loss_scale
from posttrain.train.optim.gradient_surgery import pcgrad
from posttrain.train.stage import train
from posttrain.train.trainer import Trainer

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
TOPICS = "abcabbacab"
SGD = {"name": "sgd", "weight_decay": 0.0}
Run = Callable[..., list[dict[str, Any]]]


class Killed(BaseException):
    """Stands for the death of the process."""


def with_settings(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig.read(config.model_dump() | {"micro_batch_tokens": 4096} | changes, "train")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def topics(records: pa.Table) -> pa.Table:
    """The ten records, of three tasks."""
    meta = [json.dumps({"topic": topic, "one": "x", "score": row}) for row, topic in enumerate(TOPICS)]
    return records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(meta))


@pytest.fixture
def run(tiny_model: Path, topics: pa.Table, config: TrainConfig, tmp_path: Path) -> Run:
    """``run("name", surgery={...})``: trains by topic, and returns the values of every step."""

    def train_with(name: str, surgery: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
        settings = with_settings(config, surgery={"by": "topic"} | surgery, **changes)
        out, scratch = tmp_path / name, tmp_path / f"{name}-scratch"
        train(tiny_model, topics, settings, TASK, seed=3, out=out, scratch=scratch)
        steps: list[dict[str, Any]] = json.loads((out / "training.json").read_text())
        return steps

    return train_with


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensor.detach().double().flatten().numpy() for tensor in tensors])


def task_gradients(lm: LanguageModel, examples: Sequence[Any], topics: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 [T, N], the gradient of each task's mean loss a token; and [T], its share of the tokens.

    By transformers' own forward pass, one example at a time.
    """
    weights = [weight for weight in lm.model.parameters() if weight.requires_grad]
    gradients, counts = [], []
    for topic in sorted(set(topics)):
        total, count = np.zeros(sum(weight.numel() for weight in weights)), 0
        for example, own in zip(examples, topics, strict=True):
            if own == topic:
                lm.model.zero_grad()
                ids, targets = torch.tensor([example.ids]), torch.tensor(example.supervised[1:])
                log_probs = lm.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                (-log_probs.gather(-1, ids[0, 1:, None])[:, 0][targets].sum()).backward()
                total += flat([w.new_zeros(w.shape) if w.grad is None else w.grad for w in weights])
                count += int(targets.sum())
        gradients.append(total / count)
        counts.append(count)
    lm.model.zero_grad()
    return np.stack(gradients), np.array(counts) / sum(counts)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_follows_the_papers_direction(
    fresh: Callable[..., LanguageModel], config: TrainConfig, tmp_path: Path, adapted: bool
) -> None:
    """One step of plain SGD over all records moves the weights by the rate times the reference's direction.

    Three tasks answer the same prompts otherwise, and the model has learned their mean: what is left is in conflict.
    """
    lm = fresh()
    prompts = ("my card is gone", "hello", "where is my money")
    answers, topics = ("refund", "card lost", "top up", "refund"), "abcb" * len(prompts)
    examples = [lm.encode([{"role": "user", "content": prompt}], answer) for prompt in prompts for answer in answers]
    settings = with_settings(config, epochs=40, batch_size=12, lora={"rank": 4})
    if adapted:
        torch.manual_seed(4)
        lm = add_adapter(lm, settings.lora)
    objective = SftObjective([[example] for example in examples], settings)
    Trainer(lm, objective, settings, 7, tmp_path / "mean").train()

    gradients, shares = task_gradients(lm, examples, topics)
    gram = gradients @ gradients.T
    expected = pcgrad(gram, shares, np.random.default_rng([7, 0, 0, 0, 0, 0, 2])) @ gradients
    trained = [weight for weight in lm.model.parameters() if weight.requires_grad]
    before = flat(trained)
    changes = {"learning_rate": 1.0, "clip": None, "optimizer": SGD, "schedule": {"name": "constant", "warmup": 0.0}}
    surgery = {"method": "pcgrad", "by": "topic"}
    settings = with_settings(config, epochs=1, batch_size=12, micro_batch_tokens=130, surgery=surgery, **changes)
    (step,) = Trainer(lm, objective, settings, 7, tmp_path, kinds={"topic": list(topics)}).train()
    moved = before - flat(trained)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(moved / scale, expected / scale, atol=1e-4)
    assert step.grad_norm == pytest.approx(float(np.linalg.norm(expected)), rel=1e-4)
    lengths = np.sqrt(gram.diagonal())
    cosines = (gram / np.outer(lengths, lengths))[np.triu_indices(3, 1)]
    assert cosines.min() < -0.1
    assert step.metrics["gradient_cosine"] == pytest.approx(cosines.mean(), abs=1e-4)
    assert step.metrics["gradient_conflicts"] == (cosines < 0).mean()
    losses = [step.metrics[f"loss/{topic}"] for topic in "abc"]
    assert step.loss == pytest.approx(float(shares @ losses), rel=1e-5)


def test_one_task_is_plain_training_to_the_bit(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run("plain", {})
    with caplog.at_level(logging.WARNING, "posttrain"):
        run("surgery", {"method": "pcgrad", "by": "one"})
    assert contents(tmp_path / "surgery") == contents(tmp_path / "plain")
    assert "all records are of one task, `x`: train.surgery changes nothing" in caplog.text


def test_the_result_does_not_depend_on_micro_batches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses, norms and cosines, but for rounding, in any cut, packed or padded."""
    settings = {"surgery": {"method": "pcgrad"}, "batch_size": 10, "epochs": 4}
    whole = run("whole", **settings)
    parts = run("parts", **settings, micro_batch_tokens=1)
    monkeypatch.setattr(packing, "has_full_attention", lambda *_: False)
    padded = run("padded", **settings, micro_batch_tokens=130)
    names = ("loss/a", "loss/b", "loss/c", "gradient_cosine", "gradient_conflicts")
    assert len({step["metrics"]["gradient_cosine"] for step in whole}) == 4
    for other in (parts, padded):
        for step, expected in zip(other, whole, strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=2e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
            for name in names:
                assert step["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-4, abs=2e-4)


def test_surgery_differs_from_plain_training(run: Run) -> None:
    losses = {run(method, {"method": method}, batch_size=10)[-1]["loss"] for method in ("none", "pcgrad")}
    assert len(losses) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {
            "surgery": {"method": "pcgrad"},
            "precision": "bfloat16",
            "phases": [{"epochs": 2, "curriculum": {"name": "adaptive", "start": 0.4, "every": 2}}],
        },
        {
            "surgery": {"method": "pcgrad"},
            "method": "lora",
            "lora": {"rank": 4, "dropout": 0.3},
        },
    ],
    ids=["pcgrad-bfloat16-adaptive", "pcgrad-lora"],
)
def test_a_kill_at_every_step_does_not_change_the_output(
    run: Run, checkpointed: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Each process does one step and dies in the second micro-batch of the next, between two tasks."""
    changes = {"batch_size": 5, "checkpoint": checkpointed.checkpoint.model_dump()} | changes
    run("whole", **changes)
    save, loss = Checkpoints.save, SftObjective.loss
    saved, passes = 0, 0

    def count_saves(self: Checkpoints, step: int, checkpoint: Checkpoint) -> None:
        nonlocal saved, passes
        saved, passes = saved + 1, 0
        save(self, step, checkpoint)

    def die(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal passes
        passes += 1
        if saved and passes == 2:
            raise Killed
        return loss(self, lm, packed, rows)

    kills = 0
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", count_saves)
        patch.setattr(SftObjective, "loss", die)
        while True:
            saved, passes = 0, 0
            torch.manual_seed(99)  # a new process has other generator states
            try:
                run("parts", **changes)
                break
            except Killed:
                kills += 1
    assert kills == 3
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("method", "settings"), [("pcgrad", {}), ("none", {"micro_batch_tokens": 130})])
def test_memory_that_runs_out_amid_a_step_restarts_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, settings: dict[str, Any]
) -> None:
    """In the second step's second task or micro-batch, when there are gradients already."""
    loss, passes, failing = SftObjective.loss, 0, 0

    def fail_once(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal passes
        passes += 1
        if passes == failing:
            raise torch.OutOfMemoryError("planted")
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", fail_once)
    expected = run("clean", {"method": method}, batch_size=10, **settings)
    in_a_step = passes // len(expected)
    assert in_a_step > 1
    failing = passes + in_a_step + 2
    steps = run("short", {"method": method}, batch_size=10, **settings)
    assert "out of memory at step 1" in caplog.text
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=2e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx([step["grad_norm"] for step in expected], rel=2e-4)


def test_an_overflow_of_one_task_in_float16_skips_the_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, passes = SftObjective.loss, 0

    def overflow_once(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal passes
        result = loss(self, lm, packed, rows)
        passes += 1
        if passes == 4:  # the second step's first task
            result.sum.register_hook(lambda gradient: gradient * float("inf"))
        return result

    monkeypatch.setattr(SftObjective, "loss", overflow_once)
    monkeypatch.setattr(loss_scale, "INITIAL", 1024.0)
    settings = {"batch_size": 10, "epochs": 4, "precision": "float16"}
    steps = run("float16", {"method": "pcgrad"}, **settings)
    assert [step["grad_norm"] is None for step in steps] == [False, True, False, False]
    assert [step["update_ratio"] is None for step in steps] == [False, True, False, False]
    assert [step["loss_scale"] for step in steps] == [1024.0, 1024.0, 512.0, 512.0]
    other = run("float32", {"method": "pcgrad"}, **settings | {"precision": "float32"})
    assert steps[0]["grad_norm"] == pytest.approx(other[0]["grad_norm"], rel=0.05), "norms are without the scale"
    cosine = other[0]["metrics"]["gradient_cosine"]
    assert steps[0]["metrics"]["gradient_cosine"] == pytest.approx(cosine, abs=0.02)


def test_a_reference_is_read_in_the_micro_batches_of_the_training(
    tiny_model: Path, topics: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    """So that the first step's loss is ln 2, without the rounding of another cut."""
    rejected = pa.array(["another answer"] * 10)
    pairs = topics.set_column(topics.schema.get_field_index("rejected"), "rejected", rejected)
    settings = with_settings(config, objective="dpo", surgery={"method": "pcgrad", "by": "topic"}, epochs=1)
    train(tiny_model, pairs, settings, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "scratch")
    first = json.loads((tmp_path / "out" / "training.json").read_text())[0]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-7)
    assert first["metrics"]["rewards/margins"] == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"surgery": {"method": "pcgrad", "by": "nowhere"}}, r"it has no `nowhere`; .* in train\.surgery\.by"),
        ({"surgery": {"method": "pcgrad", "by": "score"}}, r"train\.surgery\.by: every record has another `score`, .*"),
        ({"surgery": {"method": "pcgrad"}, "batch_size": 1}, r"give a step a batch_size of 2 or more"),
        ({"surgery": {"method": "pcgard"}}, r"train: `surgery\.method`: "),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: str
) -> None:
    monkeypatch.setattr(stage, "_load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=error):
        run("out", **changes)
