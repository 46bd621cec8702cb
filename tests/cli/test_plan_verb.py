"""``posttrain plan``: what a training takes, without doing any of it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.models import language_model
from posttrain.train import plan as forecast
from posttrain.train.config import TrainConfig
from posttrain.train.memory import token_budget

Call = Callable[..., Any]

GIVEN = ("--peak", "1", "--device-memory", "4")
FIXED = (*GIVEN, "--set", "train.micro_batch_tokens=4096")


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it loads a model."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(language_model, "load_language_model", refuse)


@pytest.fixture(scope="module")
def bones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M's config, and a file in place of its weights that nobody could read."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("bones")
    LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": "my card is gone" * (1 + at), "completion": "card lost"} for at in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_packaged_model(bones: Path, posttrain: Call) -> None:
    ended = posttrain("plan", "--model", "smollm2-135m", *FIXED)
    assert ended.code == 0, ended
    for phrase in ("134,515,008 parameters", "gradient sums", "activations", "of 4.00 GiB", "TFLOP", "4096 tokens"):
        assert phrase in ended.out
    result = posttrain("plan", "--model", bones, *FIXED, "--json").json
    assert (
        sum(result["memory"]["parts"].values()) == result["memory"]["total"] == max(result["memory"]["phases"].values())
    )
    assert result["memory"]["parts"]["parameters"] == 2 * 134_515_008
    assert result["memory"]["parts"]["optimiser state"] == 8 * 134_515_008
    assert not result["memory"]["fits"]
    assert "DOES NOT FIT" in ended.out
    work = result["work"]
    assert work["seconds"] == pytest.approx(work["flops"] / (1e12 * 0.3))
    assert work["tokens"] == 16 * 1024


def test_settings_change_the_plan(bones: Path, posttrain: Call) -> None:
    def total(*settings: str) -> int:
        options = [part for entry in settings for part in ("--set", entry)]
        ended = posttrain("plan", "--model", bones, *FIXED, "--json", *options)
        assert ended.code == 0, ended
        return int(ended.json["memory"]["total"])

    plain = total()
    assert total("train.optimizer.name=adafactor") < plain
    few = "train.micro_batch_tokens=1024"  # of many tokens, adapters keep more than they save: float32 copies
    assert total("train.method=lora", few) < total("train.optimizer.name=adafactor", few) < total(few)
    assert total("train.recompute=full") < total("train.recompute.mode=selective") < plain
    assert total("train.micro_batch_tokens=1024") < plain < total("train.precision=float32")


def test_the_data_give_real_lengths(answers: Path, posttrain: Call) -> None:
    ended = posttrain("plan", "--model", "tiny", "--data", answers, "--set", "train.batch_size=4", *GIVEN, "--json")
    assert ended.code == 0, ended
    batch, work = ended.json["micro_batch"], ended.json["work"]
    assert batch["supervised"] == 4 * 10
    assert batch["tokens"] < 1024
    assert work["steps"] == 6 * 2
    texts = sum(15 * (1 + at) + 3 + 10 for at in range(8))  # with the template's marks and the stop token
    assert work["tokens"] == texts / 2
    # What answers nothing is not there to be read; the same file trains.
    assert posttrain("plan", "--model", "tiny", "--data", answers, *GIVEN).code == 0


@pytest.mark.parametrize("memory", [0.02, 0.1, 0.12, 4.0])
def test_auto_is_what_training_takes(
    tiny_model: Path,
    answers: Path,
    tmp_path: Path,
    posttrain: Call,
    monkeypatch: pytest.MonkeyPatch,
    memory: float,
) -> None:
    from transformers import AutoModelForCausalLM

    # The process itself takes as much in both: nothing.
    monkeypatch.setattr(forecast, "process_bytes", lambda: 0)
    monkeypatch.setattr(token_budget, "process_bytes", lambda: 0)
    monkeypatch.setattr(token_budget, "available_bytes", lambda device: int(memory * 2**30))
    options = ("--data", answers, "--set", "train.batch_size=64", "--device", "cpu", "--peak", "1", "--json")
    result = posttrain("plan", "--model", tiny_model, *options, "--device-memory", str(memory)).json
    lm: Any = SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(tiny_model), device=torch.device("cpu"))
    longest = 15 * 8 + 3 + 10
    config = token_budget.resolve_token_budget(TrainConfig(batch_size=64), lm, longest, tmp_path / "scratch")
    assert result["micro_batch"]["budget"] == config.micro_batch_tokens


def test_the_stage_that_needs_the_most_is_planned_for(
    bones: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.train.plan.process_bytes", lambda: 1 << 28)  # or it grows from call to call

    def plan(stages: str, *options: str) -> dict[str, Any]:
        ended = posttrain("plan", "--model", bones, *FIXED, "--json", "--set", f"train.stages={stages}", *options)
        assert ended.code == 0, ended
        result: dict[str, Any] = ended.json
        return result

    short, long = "{steps: 30, max_length: 64}", "{steps: 10, max_length: 512}"
    alone = [plan(f"[{stage}]") for stage in (short, long)]
    result = plan(f"[{short}, {long}, {short}]")
    totals = [entry["memory"]["total"] for entry in alone]
    assert result["memory"]["stages"] == [totals[0], totals[1], totals[0]]
    assert (result["memory"]["stage"], result["memory"]["total"]) == (1, totals[1])
    assert totals[1] > totals[0]
    assert result["micro_batch"] == alone[1]["micro_batch"]
    assert result["work"]["steps"] == 70
    work = 60 * alone[0]["work"]["flops"] + 10 * alone[1]["work"]["flops"]
    assert result["work"]["flops"] * 70 == pytest.approx(work)
    ended = posttrain("plan", "--model", bones, *FIXED, "--set", f"train.stages=[{short}, {long}]")
    assert "of 2 stages, train.stages.1 needs the most" in ended.out
    assert plan("[]")["memory"]["stage"] is None
    assert plan("[{epochs: 2}, {steps: 3}]")["work"]["steps"] is None, "nobody knows how long a pass is"


def test_stages_with_their_own_data(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "hi" * (1 + 40 * (at % 2)), "completion": "x", "topic": "ab"[at % 2]} for at in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stages = "train.stages=[{mix: {a: 1}, mix_by: topic, epochs: 3}, {mix: {b: 1}, mix_by: topic, steps: 5}]"
    options = ("--data", path, "--set", "train.batch_size=2", "--set", "train.micro_batch_tokens=1", *GIVEN)
    ended = posttrain("plan", "--model", "tiny", *options, "--set", stages, "--json")
    assert ended.code == 0, ended
    memory, work = ended.json["memory"], ended.json["work"]
    assert memory["stage"] == 1
    assert memory["stages"][0] < memory["stages"][1] == memory["total"]
    assert work["steps"] == 3 * 2 + 5
    short, long = ((2 * (1 + 40 * kind) + 3 + 2) * 2 for kind in (0, 1))  # marks, answer and stop token
    assert work["tokens"] == pytest.approx((6 * short + 5 * long) / 11)
    assert ended.json["micro_batch"]["tokens"] == long / 2 - 1, "a last token is not read"
    ended = posttrain("plan", "--model", "tiny", *options, "--set", stages.replace("topic", "topics"))
    assert ended.mistake.startswith(f"{path}:1: record ")


def test_how_often_a_mix_meets_what(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": f"say {at}", "completion": "x", "topic": "ab"[at > 5]} for at in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stage = {"mix": "sizes", "mix_by": "topic", "mix_temperature": 1e9, "mix_epochs": 8, "epochs": 3}
    given = ("plan", "--model", "tiny", "--data", path, *FIXED, "--set", f"train.stages={json.dumps([stage])}")
    (mix,) = posttrain(*given, "--json").json["mixes"]
    assert mix["kinds"]["a"] == {"records": 6, "met": 12, "epochs": 2.0, "fewest": 2, "most": 2}
    assert mix["kinds"]["b"] == {"records": 2, "met": 12, "epochs": 6.0, "fewest": 6, "most": 6}
    printed = posttrain(*given)
    assert "mix of train.stages.0" in printed.out
    assert "6.00" in printed.out


def test_pairs_that_are_taken_apart(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "hi", "chosen": f"yes {at}", "rejected": "no"} for at in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--data", path, "--set", "train.batch_size=4", "--set", "train.epochs=1", *GIVEN, "--json")
    steps = {
        objective: posttrain("plan", "--model", "tiny", *options, "--objective", objective).json["work"]["steps"]
        for objective in ("dpo", "kto")
    }
    assert steps == {"dpo": 2, "kto": 4}


def test_another_machine(bones: Path, posttrain: Call) -> None:
    result = posttrain(
        "plan", "--model", bones, "--device", "cuda", "--device-memory", "80", "--peak", "400", "--json"
    ).json
    assert result["memory"]["available"] == 80 * 2**30
    assert "process" not in result["memory"]["parts"]
    assert result["memory"]["host"] == 12 * 134_515_008  # what checkpoints are written from
    assert result["micro_batch"]["auto"] == 32768
    small = posttrain("plan", "--model", bones, *GIVEN[:3], "3", "--json").json
    assert small["micro_batch"]["auto"] is None or small["micro_batch"]["auto"] < 4096


def test_this_machine(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    result = posttrain("plan", "--model", "tiny", "--peak", "0.1", "--json").json
    assert result["memory"]["available"] > result["memory"]["parts"]["process"] > 10**7
    assert result["memory"]["fits"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "no model is named"),
        (("--model", "nothing/here/at/all"), "is no model"),
        (("--model", "nobody/nothing-of-this-name"), "no config can be read"),
        (("--model", "tiny", "--set", "train.recompute=some"), "recompute"),
        (("--model", "tiny", "--set", "train.recompute.budget=lots"), "an amount with its unit"),
        (("--model", "tiny", "--device", "abacus"), "no device `abacus`"),
        (("--model", "tiny", "--data", "nowhere.jsonl"), "there is no such file"),
        (("--model", "tiny", "--device-memory", "-1"), "device-memory"),
        (("--model", "tiny", "--set", "train.method=lora", "--set", "train.lora.targets=[nowhere]"), "targets"),
    ],
)
def test_mistakes(posttrain: Call, options: tuple[str, ...], says: str) -> None:
    assert says in posttrain("plan", *options, "--peak", "1").mistake


def test_a_device_that_is_not_here(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = posttrain("plan", "--model", "tiny", "--device", "cuda")
    assert "--device-memory: there is no CUDA device here to measure; say what it has" in ended.mistake
