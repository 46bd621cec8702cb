import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from posttrain.models.generator import greedy_answers
from posttrain.models.language_model import load_language_model
from posttrain.models.likelihood import answer_log_likelihoods
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.stage import train
from posttrain.train.trainer import Trainer

MakeRecords = Callable[..., pa.Table]
TASK = TaskConfig(system="Name the intent.", max_new_tokens=12)


@pytest.mark.slow
def test_the_output_has_the_hugging_face_layout(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config.model_copy(update={"epochs": 25})
    meta = train(tiny_model, records, config, TASK, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", use_safetensors=True)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    lm = load_language_model(tmp_path / "out", TASK)
    prompts = [record["prompt"] for record in records.to_pylist()]
    answers = [answer.text for answer in greedy_answers(lm, prompts)]
    assert answers == records["completion"].to_pylist(), "the model learned its records"
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [step["step"] for step in log] == list(range(75))
    assert meta["first_loss"] == log[0]["loss"]


def test_the_summary_counts_records_steps_and_tokens(
    tiny_model: Path, make_records: MakeRecords, config: TrainConfig, tmp_path: Path
) -> None:
    rows = make_records([("hi", "x"), ("my card is gone", "card lost"), ("long " * 40, "refund")])
    config = config.model_copy(update={"max_length": 100, "batch_size": 2, "epochs": 3})
    meta = train(tiny_model, rows, config, TaskConfig(), seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    # A turn is its mark, its bytes and its stop token; the assistant's mark is part of the prompt.
    lengths = [1 + 2 + 1 + 1 + 1 + 1, 1 + 15 + 1 + 1 + 9 + 1, 100]
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    last = [step for step in log if step["epoch"] == 2]
    assert meta == {
        "examples": 3,
        "cut": 1,
        "cut_records": [rows["id"][2].as_py()],
        "steps": 6,
        "skipped_steps": 0,
        "tokens": 3 * sum(lengths),
        "supervised_tokens": 3 * (2 + 10 + 7),
        "first_loss": log[0]["loss"],
        "last_loss": pytest.approx(sum(step["loss"] * step["supervised_tokens"] for step in last) / 19),
        "decisions": [],
    }


def test_nan_losses_do_not_count_in_the_summary(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Trainer.train

    def train_with_nans(self: Trainer) -> list[StepValues]:
        return [replace(step, loss=2.0 if step.step == 4 else math.nan) for step in fit(self)]

    monkeypatch.setattr(Trainer, "train", train_with_nans)
    meta = train(tiny_model, records, config, TASK, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    assert (meta["first_loss"], meta["last_loss"]) == (None, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sft", "simpo"])
def test_the_last_loss_does_not_depend_on_the_size_of_a_step(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, objective: str
) -> None:
    """The mean over tokens or pairs does not depend on the steps, here of 4, 4 and 2 records of different lengths."""
    rejected = pa.array([f"{'no ' * (row % 4)}x{row}" for row in range(len(records))])
    pairs = records.set_column(records.schema.get_field_index("rejected"), "rejected", rejected)

    def last_loss(size: int) -> float:
        changes = {"batch_size": size, "epochs": 1, "learning_rate": 1e-12}
        changes["objective"] = TrainConfig.model_validate({"objective": objective}).objective
        out, scratch = tmp_path / str(size), tmp_path / f"{size}-s"
        meta = train(tiny_model, pairs, config.model_copy(update=changes), TASK, seed=0, out=out, scratch=scratch)
        return float(meta["last_loss"])

    assert last_loss(4) == pytest.approx(last_loss(10), rel=1e-5)


def test_the_first_loss_is_the_models_likelihood_of_the_answers(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    """Training and evaluation compute the same likelihood."""
    config = config.model_copy(update={"batch_size": 100, "epochs": 1})
    meta = train(tiny_model, records, config, TASK, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    lm = load_language_model(tiny_model, TASK, "float32")
    rows = records.to_pylist()
    sums, counts = answer_log_likelihoods(lm, [row["prompt"] for row in rows], [row["completion"] for row in rows])
    assert meta["first_loss"] == pytest.approx(-sums.sum() / counts.sum(), rel=1e-5)
    assert meta["supervised_tokens"] == counts.sum()


@pytest.mark.slow
def test_the_output_depends_only_on_seed_and_records(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    def weights(name: str, seed: int) -> bytes:
        train(tiny_model, records, config, TASK, seed=seed, out=tmp_path / name, scratch=tmp_path / f"{name}-s")
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = weights("a", 0)
    torch.manual_seed(12345)
    assert weights("b", 0) == first
    assert weights("c", 1) != first


def test_plain_texts_are_learned(
    tiny_model: Path, make_records: MakeRecords, config: TrainConfig, tmp_path: Path
) -> None:
    rows = make_records([(None, "to be or not to be"), (None, "ab"), ("hi", "x")])
    meta = train(tiny_model, rows, config, TaskConfig(), seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    # A text's first token has no context to be predicted from; its stop token is predicted.
    assert meta["supervised_tokens"] == 2 * (18 + 2 + 2)
    assert meta["last_loss"] < meta["first_loss"]


def test_long_records_are_learned(
    tiny_model: Path, make_records: MakeRecords, config: TrainConfig, tmp_path: Path
) -> None:
    """Long enough for the fused attention, and for rows that each fill a micro-batch."""
    rows = make_records([("word " * length, "refund") for length in (3, 60, 70)])
    config = config.model_copy(update={"micro_batch_tokens": 300})
    meta = train(tiny_model, rows, config, TaskConfig(), seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    assert meta["cut"] == 0
    assert meta["last_loss"] < meta["first_loss"]


@pytest.mark.slow
def test_an_empty_training_set_is_refused(
    tiny_model: Path, make_records: MakeRecords, config: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no labelled record to train on"):
        train(tiny_model, make_records([]), config, TASK, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([("hi", "x"), ("hi", None)], {}, "it has no answer"),
        ([("hi", "x"), ("hi", "refund please")], {"max_length": 10}, "its answer leaves no room"),
        ([("hi", "x")], {"method": "lora", "lora": {"targets": ["nothing"]}}, "nothing"),
    ],
)
def test_training_mistakes_are_one_line_errors(
    tiny_model: Path, make_records: MakeRecords, tmp_path: Path, rows: object, settings: dict[str, object], message: str
) -> None:
    config = TrainConfig.read(settings, "posttrain.yaml")
    with pytest.raises(UserError, match=message) as caught:
        train(tiny_model, make_records(rows), config, TASK, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("learning_rate", 0), ("precision", "int8"), ("clip", 0), ("max_length", 7)],
)
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"`{key}`"):
        TrainConfig.read({key: value}, "posttrain.yaml")


@pytest.mark.long
def test_the_real_model_learns_its_records(smollm2: Path, make_records: MakeRecords, tmp_path: Path) -> None:
    """Its first loss is that of transformers for the tokens of the complete conversation."""
    pairs = [
        ("I lost my card", "lost_or_stolen_card"),
        ("Where is my refund?", "request_refund"),
        ("My card has not arrived", "card_arrival"),
        ("How do I top up?", "top_up_by_card_charge"),
    ]
    task = TaskConfig(system="Name the intent.")
    config = TrainConfig(
        epochs=2,
        batch_size=8,
        learning_rate=1e-4,
        precision="float32",
        schedule={"name": "constant", "warmup": 0.0},
        checkpoint={"every_seconds": None},
    )
    meta = train(smollm2, make_records(pairs), config, task, seed=0, out=tmp_path / "out", scratch=tmp_path / "s")
    log = [step["loss"] for step in json.loads((tmp_path / "out" / "training.json").read_text())]
    assert meta["steps"] == len(log) == 2
    assert log[1] < 0.8 * log[0]
    lm = load_language_model(smollm2, task, "float32")
    total, count = 0.0, 0
    for prompt, answer in pairs:
        turns = [{"role": "system", "content": "Name the intent."}, {"role": "user", "content": prompt}]
        conversation = [*turns, {"role": "assistant", "content": answer}]
        start, end = (
            lm.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (
                lm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True),
                lm.tokenizer.apply_chat_template(conversation, tokenize=False).rstrip("\n"),
            )
        )
        ids = torch.tensor([end])
        labels = torch.tensor([[-100] * len(start) + end[len(start) :]])
        with torch.no_grad():
            total += float(lm.model(input_ids=ids, labels=labels).loss) * (len(end) - len(start))
        count += len(end) - len(start)
    assert meta["supervised_tokens"] == 2 * count
    assert log[0] == pytest.approx(total / count, abs=1e-3)
