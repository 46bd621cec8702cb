"""``posttrain train``: a model from a file of records."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.train.trainer import Trainer

pytestmark = pytest.mark.slow

Call = Callable[..., Any]

ROWS = [
    {"prompt": "my card is gone", "completion": "card lost", "rejected": "refund"},
    {"prompt": "where is my money", "completion": "refund", "rejected": "card lost"},
    {"prompt": "i was charged twice", "completion": "refund", "rejected": "top up"},
    {"prompt": "how do i top up", "completion": "top up", "rejected": "refund"},
]
SMALL = ("--model", "tiny", "--set", "train.epochs=3", "--set", "train.batch_size=2")
METRICS = {
    "step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "seconds", "tokens_per_second", "memory_bytes"
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return write(tmp_path / "answers.jsonl", [{k: row[k] for k in ("prompt", "completion")} for row in ROWS])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["rejected"]} for r in ROWS]
    return write(tmp_path / "pairs.jsonl", rows)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_it_writes_the_model_the_config_and_the_steps(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", out)
    assert outcome.code == 0, outcome
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).chat_template
    steps = lines(out)
    assert [step["step"] for step in steps] == list(range(6))
    assert steps[0].keys() >= METRICS
    assert steps[-1]["loss"] < steps[0]["loss"]
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["micro_batch_tokens"] >= max(step["tokens"] for step in steps)
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["train"]["epochs"], config["train"]["schedule"]["name"]) == (3, "cosine")
    assert config["train"]["micro_batch_tokens"] == summary["micro_batch_tokens"]
    again = posttrain("train", *SMALL, "--data", answers, "--out", out)
    assert (again.code, "is done" in again.err) == (0, True)
    assert lines(out) == steps
    # The written config repeats the training.
    twin = posttrain("train", "--config", out / "config.yaml", "--out", tmp_path / "twin")
    assert twin.code == 0, twin
    assert (tmp_path / "twin" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_several_files_are_one_training_set(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    first, *other_lines = answers.read_text().splitlines(keepends=True)
    two_files = [tmp_path / "first.jsonl", tmp_path / "rest.jsonl"]
    two_files[0].write_text(first)
    two_files[1].write_text("".join(other_lines))
    for out, files in ((tmp_path / "whole", [answers]), (tmp_path / "parts", two_files)):
        options = [option for file in files for option in ("--data", file)]
        outcome = posttrain("train", *SMALL, *options, "--set", "train.shuffle=false", "--out", out)
        assert outcome.code == 0, outcome
    assert [line["loss"] for line in lines(tmp_path / "parts")] == [line["loss"] for line in lines(tmp_path / "whole")]


@pytest.mark.parametrize("objective", ["dpo", "hinge"])
def test_preference_objectives_train_on_pairs(pairs: Path, tmp_path: Path, posttrain: Call, objective: str) -> None:
    out = tmp_path / "out"
    outcome = posttrain("train", *SMALL, "--data", pairs, "--objective", objective, "--out", out)
    assert outcome.code == 0, outcome
    steps = lines(out)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_without_shuffling_records_keep_the_order_of_the_file(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    for name in ("a", "b"):
        seed = "1" if name == "a" else "2"
        settings = ("--set", "train.shuffle=false", "--set", f"seed={seed}")
        assert posttrain("train", *SMALL, *settings, "--data", answers, "--out", tmp_path / name).code == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert [step["tokens"] for step in lines(tmp_path / "a")[:2]] == [
        step["tokens"] for step in lines(tmp_path / "a")[2:4]
    ]


def test_inspect_shows_context_and_trained_tokens(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    outcome = posttrain("train", "--model", "tiny", "--data", answers, "--inspect", "1", "--set", "train.max_length=20")
    assert outcome.code == 0, outcome
    title, *record_lines = outcome.out.splitlines()
    assert title.startswith("1  ")
    assert "  28 tokens, 10 trained " in title
    assert record_lines == [
        "[cut off] <|user|>my card",
        "[context]  is gone<|end|><|assistant|>",
        "[trained] card lost<|end|>",
        "",
    ]


def test_inspect_needs_no_weights(answers: Path, tiny_model: Path, tmp_path: Path, posttrain: Call) -> None:
    without_weights = tmp_path / "without_weights"
    shutil.copytree(tiny_model, without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    command = ("train", "--data", answers, "--inspect", "4")
    outcome = posttrain(*command, "--model", without_weights)
    assert outcome.code == 0, outcome
    assert outcome.out == posttrain(*command, "--model", tiny_model).out
    outcome = posttrain("train", "--data", answers, "--model", without_weights, "--out", tmp_path / "out")
    assert "holds no safetensors weights" in outcome.mistake


def test_inspect_shows_the_stop_token_of_training(
    answers: Path, tiny_model: Path, tmp_path: Path, posttrain: Call
) -> None:
    """Some models name the token that ends a turn only in their generation config."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    stop = byte_tokenizer().convert_tokens_to_ids("r")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}), encoding="utf-8")
    outcome = posttrain("train", "--data", answers, "--inspect", "1", "--model", model)
    lm = load_language_model(model, TaskConfig())
    assert lm.tokenizer.decode(lm.answer_ids("card lost")) == "car"
    assert outcome.out.splitlines()[-2] == "[trained] car"


def test_it_trains_on_a_dataset_version_of_a_workspace(finished_copy: Path, tmp_path: Path, posttrain: Call) -> None:
    outcome = posttrain("train", *SMALL, "--data", "train", "-w", finished_copy, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome
    assert lines(tmp_path / "out")


def test_changed_settings_are_refused_by_name(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    assert posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out").code == 0
    for change, message in (
        (("--set", "train.epochs=4"), "`train.epochs` was 3 and is 4"),
        (("--set", "train.learning_rate=1.0e-3"), "`train.learning_rate` was 0.0001 and is 0.001"),
        (("--model", "smollm2-135m"), '`model` was "tiny" and is "smollm2-135m"'),
    ):
        outcome = posttrain("train", *SMALL, *change, "--data", answers, "--out", tmp_path / "out")
        assert message in outcome.mistake
        assert "name another --out" in outcome.mistake


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--set", "train.epoch=2"),
            "did you mean `train.epochs`? `posttrain config keys train` lists the keys",
        ),
        (("--set", "epochs"), "`epochs` is not a setting"),
        (("--objective", "dpa"), "--objective: no objective `dpa`; did you mean `dpo`?"),
        (("--objective", "dpo"), "it is not a pair of a chosen and a rejected answer"),
        (("--set", "train.max_length=8"), "its answer leaves no room for its prompt in 8 tokens"),
        (("--set", "train.schedule.warmup=99"), "99 warm-up steps are more than the 6 of the training"),
        (("--model", "nothing/here/at/all"), "is not a model"),
        (("--data", "nowhere.jsonl"), "there is no such file"),
    ],
)
def test_unusable_options_of_train_are_refused(
    answers: Path, tmp_path: Path, posttrain: Call, options: tuple[str, ...], message: str
) -> None:
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out", *options)
    assert message in outcome.mistake
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_pair_of_equal_answers_is_left_out(tmp_path: Path, posttrain: Call) -> None:
    equal, pair = ({"prompt": "hi", "chosen": "x", "rejected": rejected} for rejected in "xy")
    data = write(tmp_path / "pairs.jsonl", [equal])
    outcome = posttrain("train", *SMALL, "--data", data, "--objective", "dpo", "--out", tmp_path / "out")
    assert "none of the 1 record can be used (the first: `chosen` and `rejected` are the same)" in outcome.mistake
    write(data, [equal, pair])
    outcome = posttrain("train", *SMALL, "--data", data, "--objective", "dpo", "--out", tmp_path / "out")
    assert outcome.code == 0
    assert "left out: 1 record; the first:" in outcome.err


def test_a_nan_loss_is_null_in_the_summary(
    answers: Path, tmp_path: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Trainer.train
    monkeypatch.setattr(
        Trainer, "train", lambda self: [replace(step, loss=math.nan) if step.step < 5 else step for step in fit(self)]
    )
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out")
    assert outcome.out.startswith("6 steps, loss no number to ")

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes(), parse_constant=refuse)
    assert summary["first_loss"] is None
    assert math.isfinite(summary["last_loss"])


def test_a_second_process_in_the_same_folder_is_refused(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    (out / ".training").mkdir(parents=True)
    with FileLock(out / ".training" / "lock"):
        outcome = posttrain("train", *SMALL, "--data", answers, "--out", out)
        assert "is being trained by another process" in outcome.mistake
        assert [path.name for path in out.iterdir()] == [".training"]
    assert posttrain("train", *SMALL, "--data", answers, "--out", out).code == 0


def test_a_folder_with_other_files_is_refused(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out")
    assert "is not the folder of a training" in outcome.mistake
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
