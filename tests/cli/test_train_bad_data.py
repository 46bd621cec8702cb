"""``posttrain train`` on data that cannot be trained on: one line that says which record, and exit code 2."""

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
    ("row", "options", "says"),
    [
        ({"prompt": "hi"}, (), "it has no answer and no text to learn"),
        ({"prompt": "hi", "completion": "x" * 50}, ("--set", "train.max_length=40"), "its answer leaves no room"),
        (
            {"prompt": "w" * 1500, "completion": "x"},
            ("--set", "train.max_length=2000"),
            "and the model reads 1024 at most",
        ),
        ({"prompt": "hi", "completion": "fraud"}, ("--objective", "classification"), "no label `fraud` in task.labels"),
        ({"prompt": "hi", "label": 7}, ("--objective", "classification"), "label 7 is out of range, task.labels has 2"),
        ({"prompt": "hi", "completion": "x"}, ("--objective", "kto"), "no answer with a label true or false"),
    ],
)
def test_a_bad_record_is_named(
    tmp_path: Path, posttrain: Call, row: dict[str, Any], options: tuple[str, ...], says: str
) -> None:
    good = GOOD | ({"label": True} if "kto" in options else {})
    data, out = write(tmp_path / "data.jsonl", good, row), tmp_path / "out"
    labels = ("--set", "task.labels=[card lost, refund]")
    ended = posttrain("train", "--model", "tiny", "--data", data, "--out", out, *labels, *options)
    assert ended.mistake.startswith(f"{data}:2: record ")
    assert says in ended.mistake
    assert not out.exists()


def test_a_margin_that_is_no_number_is_named(tmp_path: Path, posttrain: Call) -> None:
    pair = {"prompt": "hi", "chosen": "x", "rejected": "y"}
    data = write(tmp_path / "data.jsonl", pair | {"margin": 1}, pair | {"chosen": "z", "margin": "much"})
    arguments = ("train", "--model", "tiny", "--data", data, "--set", "train.epochs=1")
    ended = posttrain(*arguments, "--objective", "reward", "--out", tmp_path / "out")
    assert ended.mistake.startswith(f"{data}:2: record ")
    assert "its `margin` is no number; give all a number, or none" in ended.mistake
    ended = posttrain(*arguments, "--objective", "dpo", "--out", tmp_path / "other")  # where nobody asks for it
    assert ended.code == 0, ended


def test_a_bad_record_is_found_before_any_weight_is_loaded_and_can_be_mended(
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
    ended = posttrain(*arguments)
    assert ended.code == 0, ended


def test_a_template_that_does_not_fit(tiny_model: Path, tmp_path: Path, posttrain: Call) -> None:
    model = changed_model(
        tiny_model, tmp_path / "model", lambda text: text.replace("<|end|>", "<|im_end|>"), "chat_template.jinja"
    )
    data = write(tmp_path / "data.jsonl", GOOD)
    for options in (("--out", tmp_path / "out"), ("--inspect", "1")):
        ended = posttrain("train", "--model", model, "--data", data, *options)
        assert "the chat template ends turns with `<|im_end|>`, which is no token of the tokenizer" in ended.mistake


def test_a_tokenizer_with_more_tokens_than_the_model(tiny_model: Path, tmp_path: Path, posttrain: Call) -> None:
    def with_a_token(text: str) -> str:
        tokenizer = json.loads(text)
        added = {**tokenizer["added_tokens"][-1], "id": 261, "content": "card", "special": False}
        tokenizer["added_tokens"].append(added)
        return json.dumps(tokenizer)

    model = changed_model(tiny_model, tmp_path / "model", with_a_token, "tokenizer.json")
    data = write(tmp_path / "data.jsonl", GOOD)
    ended = posttrain("train", "--model", model, "--data", data, "--out", tmp_path / "out")
    assert "the tokenizer does not fit the model: `card` is token 261, and the model has 261" in ended.mistake


def test_stages_from_the_command_line(tmp_path: Path, posttrain: Call) -> None:
    rows = [{"prompt": f"question {row}", "completion": "yes", "topic": "ab"[row % 2]} for row in range(8)]
    data, out = write(tmp_path / "data.jsonl", *rows), tmp_path / "out"
    stages = "train.stages=[{mix: {a: 1}, mix_by: topic, steps: 2, learning_rate: 0.001}, {epochs: 1}]"
    settings = ("--set", stages, "--set", "train.batch_size=4", "--set", "train.schedule={name: constant, warmup: 0}")
    ended = posttrain("train", "--model", "tiny", "--data", data, "--out", out, *settings)
    assert ended.code == 0, ended
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["lr"] for step in steps] == [1e-3, 1e-3, 1e-4, 1e-4]
    assert all(0 <= step["data_wait"] < 1 for step in steps)
    wrong = stages.replace("topic", "topics")
    ended = posttrain("train", "--model", "tiny", "--data", data, "--out", tmp_path / "other", "--set", wrong)
    assert ended.mistake.startswith(f"{data}:1: record ")
    assert "it has no `topics`; name a column that all records have in train.stages.0.mix_by" in ended.mistake
