"""``posttrain train`` on unusable data: one line that names the record, and exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def changed_model(tiny_model: Path, folder: Path, change: Callable[[str], str], name: str) -> Path:
    """The tiny model with one of its files changed."""
    shutil.copytree(tiny_model, folder)
    (folder / name).write_text(change((folder / name).read_text(encoding="utf-8")), encoding="utf-8")
    return folder


GOOD = {"prompt": "my card is gone", "completion": "card lost"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "hi"}, (), "it has no answer and no text to learn"),
        (
            {"prompt": [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]},
            (),
            "its last turn is the user's, so it has no answer to learn",
        ),
        ({"prompt": "hi", "completion": "x" * 50}, ("--set", "train.max_length=40"), "its answer leaves no room"),
        (
            {"prompt": "w" * 1500, "completion": "x"},
            ("--set", "train.max_length=2000"),
            "and the model reads 1024 at most",
        ),
        ({"prompt": "hi", "completion": "fraud"}, ("--objective", "classification"), "no label `fraud` in task.labels"),
        ({"prompt": "hi", "label": 7}, ("--objective", "classification"), "label 7 is out of range, task.labels has 2"),
        ({"prompt": "hi", "completion": "x"}, ("--objective", "kto"), "not an answer with a label true or false"),
    ],
)
def test_a_bad_record_is_named(
    tmp_path: Path, posttrain: Call, row: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    good = GOOD | ({"label": True} if "kto" in options else {})
    data, out = write(tmp_path / "data.jsonl", good, row), tmp_path / "out"
    labels = ("--set", "task.labels=[card lost, refund]")
    outcome = posttrain("train", "--model", "tiny", "--data", data, "--out", out, *labels, *options)
    assert outcome.mistake.startswith(f"{data}:2: record ")
    assert message in outcome.mistake
    assert not out.exists()


def test_records_without_an_answer_are_counted(tmp_path: Path, posttrain: Call) -> None:
    data = write(tmp_path / "data.jsonl", GOOD, {"prompt": "a", "completion": ""}, {"prompt": "b", "completion": " "})
    outcome = posttrain("train", "--model", "tiny", "--data", data, "--out", tmp_path / "out")
    assert outcome.mistake.startswith(f"{data}:2: ")
    assert "it is the first of 2 records without an answer to learn, of 3" in outcome.mistake


def test_a_margin_that_is_no_number_is_named(tmp_path: Path, posttrain: Call) -> None:
    pair = {"prompt": "hi", "chosen": "x", "rejected": "y"}
    data = write(tmp_path / "data.jsonl", pair | {"margin": 1}, pair | {"chosen": "z", "margin": "much"})
    arguments = ("train", "--model", "tiny", "--data", data, "--set", "train.epochs=1")
    outcome = posttrain(*arguments, "--objective", "reward", "--out", tmp_path / "out")
    assert outcome.mistake.startswith(f"{data}:2: record ")
    assert "its `margin` is not a number; give all a number, or none" in outcome.mistake
    outcome = posttrain(*arguments, "--objective", "dpo", "--out", tmp_path / "other")  # which uses no margin
    assert outcome.code == 0, outcome


@pytest.mark.slow
def test_a_bad_record_is_reported_before_weights_are_loaded_and_can_be_corrected(
    tmp_path: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = write(tmp_path / "data.jsonl", GOOD, {"prompt": "hi", "completion": "x" * 50}), tmp_path / "out"
    arguments = ("train", "--model", "tiny", "--data", data, "--out", out, "--set", "train.max_length=40")
    with monkeypatch.context() as patch:
        patch.setattr(
            "posttrain.train.objectives.build.load_language_model", lambda *_: pytest.fail("weights were loaded")
        )
        assert "its answer leaves no room" in posttrain(*arguments).mistake
        assert list(tmp_path.iterdir()) == [data]
    write(data, GOOD)
    outcome = posttrain(*arguments)
    assert outcome.code == 0, outcome


def test_a_template_with_an_unknown_end_token_is_refused(tiny_model: Path, tmp_path: Path, posttrain: Call) -> None:
    model = changed_model(
        tiny_model, tmp_path / "model", lambda text: text.replace("<|end|>", "<|im_end|>"), "chat_template.jinja"
    )
    data = write(tmp_path / "data.jsonl", GOOD)
    for options in (("--out", tmp_path / "out"), ("--inspect", "1")):
        outcome = posttrain("train", "--model", model, "--data", data, *options)
        assert (
            "the chat template ends turns with `<|im_end|>`, which is not a token of the tokenizer" in outcome.mistake
        )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny_model: Path, tmp_path: Path, posttrain: Call
) -> None:
    def add_token(text: str) -> str:
        tokenizer = json.loads(text)
        added = {**tokenizer["added_tokens"][-1], "id": 261, "content": "card", "special": False}
        tokenizer["added_tokens"].append(added)
        return json.dumps(tokenizer)

    model = changed_model(tiny_model, tmp_path / "model", add_token, "tokenizer.json")
    data = write(tmp_path / "data.jsonl", GOOD)
    outcome = posttrain("train", "--model", model, "--data", data, "--out", tmp_path / "out")
    assert "the tokenizer does not fit the model: `card` is token 261, and the model has 261" in outcome.mistake


def test_phases_are_set_on_the_command_line(tmp_path: Path, posttrain: Call) -> None:
    rows = [{"prompt": f"question {row}", "completion": "yes", "topic": "ab"[row % 2]} for row in range(8)]
    data, out = write(tmp_path / "data.jsonl", *rows), tmp_path / "out"
    phases = "train.phases=[{mix: {a: 1}, mix_by: topic, steps: 2, learning_rate: 0.001}, {epochs: 1}]"
    settings = ("--set", phases, "--set", "train.batch_size=4", "--set", "train.schedule={name: constant, warmup: 0}")
    outcome = posttrain("train", "--model", "tiny", "--data", data, "--out", out, *settings)
    assert outcome.code == 0, outcome
    assert "topic" not in outcome.err  # phases read it
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["lr"] for step in steps] == [1e-3, 1e-3, 1e-4, 1e-4]
    assert all(0 <= step["data_wait"] < 1 for step in steps)
    phases_with_typo = phases.replace("topic", "topics")
    outcome = posttrain(
        "train", "--model", "tiny", "--data", data, "--out", tmp_path / "other", "--set", phases_with_typo
    )
    note, mistake = outcome.err.splitlines()
    assert "topic is not used" in note
    assert mistake.startswith(f"posttrain: {data}:1: record ")
    assert "it has no `topics`; name a column that all records have in train.phases.0.mix_by" in mistake


def test_a_set_value_that_contradicts_its_option_is_refused(tmp_path: Path, posttrain: Call) -> None:
    data = write(tmp_path / "data.jsonl", GOOD)
    options = ("train", "--model", "tiny", "--data", data, "--out", tmp_path / "out", "--objective", "dpo")
    outcome = posttrain(*options, "--set", "train.objective=sft")
    assert outcome.mistake == "--set train.objective: --objective gives another value; leave one out"
