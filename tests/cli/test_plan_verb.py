"""``posttrain plan`` estimates the memory and work of a training without running it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.models import language_model
from posttrain.train import plan as plan_module
from posttrain.train.config import TrainConfig
from posttrain.train.memory import token_budget

Call = Callable[..., Any]

MACHINE = ("--peak", "1", "--device-memory", "4")
FIXED = (*MACHINE, "--set", "train.micro_batch_tokens=4096")


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan loads a model."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(language_model, "load_language_model", refuse)


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M's config with an unreadable weights file."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("config_only")
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
    rows = [{"prompt": "my card is gone" * (1 + number), "completion": "card lost"} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_plan_of_the_packaged_model(config_only: Path, posttrain: Call) -> None:
    outcome = posttrain("plan", "--model", "smollm2-135m", *FIXED)
    assert outcome.code == 0, outcome
    for phrase in ("134,515,008 parameters", "gradient sums", "activations", "of 4.00 GiB", "TFLOP", "4,096 tokens"):
        assert phrase in outcome.out
    result = posttrain("plan", "--model", config_only, *FIXED, "--set", "train.precision=bfloat16", "--json").json
    assert sum(result["memory"]["parts"].values()) == result["memory"]["total"]
    assert result["memory"]["parts"]["parameters"] == 2 * 134_515_008
    assert result["memory"]["parts"]["optimiser state"] == 8 * 134_515_008
    assert not result["memory"]["fits"]
    assert "DOES NOT FIT" in outcome.out
    work = result["work"]
    assert work["seconds"] == pytest.approx(work["flops"] / (1e12 * 0.3))
    assert work["tokens"] == 16 * 1024


@pytest.mark.slow
def test_settings_change_the_plan(config_only: Path, posttrain: Call) -> None:
    def total(*settings: str) -> int:
        options = [argument for entry in settings for argument in ("--set", entry)]
        outcome = posttrain("plan", "--model", config_only, *FIXED, "--json", *options)
        assert outcome.code == 0, outcome
        return int(outcome.json["memory"]["total"])

    default = total()
    assert total("train.optimizer.name=adafactor") < default
    # With many tokens the float32 copies of adapters need more memory than the adapters save.
    few = "train.micro_batch_tokens=1024"
    assert total("train.method=lora", few) < total("train.optimizer.name=adafactor", few) < total(few)
    assert total("train.recompute=full") < total("train.recompute=50%") < default
    assert total("train.micro_batch_tokens=1024") < default
    assert total("train.precision=bfloat16") < total("train.precision=float32")


def test_the_plan_uses_the_lengths_of_the_data(answers: Path, posttrain: Call) -> None:
    # Of a given budget: the automatic one also depends on how much memory this process of many tests has taken.
    outcome = posttrain("plan", "--model", "tiny", "--data", answers, "--set", "train.batch_size=4", *FIXED, "--json")
    assert outcome.code == 0, outcome
    batch, work = outcome.json["micro_batch"], outcome.json["work"]
    assert batch["supervised"] == 4 * 10
    assert batch["tokens"] < 1024
    assert work["steps"] == 6 * 2
    texts = sum(15 * (1 + number) + 3 + 10 for number in range(8))  # with the template's tokens and the stop token
    assert work["tokens"] == texts / 2
    # The same file works with the default settings and without --json.
    assert posttrain("plan", "--model", "tiny", "--data", answers, *MACHINE).code == 0


@pytest.mark.parametrize("memory", [0.02, 0.1, 0.12, 4.0])
def test_the_automatic_token_budget_equals_that_of_training(
    tiny_model: Path,
    answers: Path,
    tmp_path: Path,
    posttrain: Call,
    monkeypatch: pytest.MonkeyPatch,
    memory: float,
) -> None:
    from transformers import AutoModelForCausalLM

    # Plan and training count no memory for the process itself.
    monkeypatch.setattr(plan_module, "process_bytes", lambda: 0)
    monkeypatch.setattr(token_budget, "process_bytes", lambda: 0)
    monkeypatch.setattr(token_budget, "available_bytes", lambda device: int(memory * 2**30))
    options = ("--data", answers, "--set", "train.batch_size=64", "--device", "cpu", "--peak", "1", "--json")
    result = posttrain("plan", "--model", tiny_model, *options, "--device-memory", str(memory)).json
    lm: Any = SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(tiny_model), device=torch.device("cpu"))
    longest = 15 * 8 + 3 + 10
    config = token_budget.resolve_token_budget(
        TrainConfig(precision="float32", batch_size=64), lm, longest, tmp_path / "scratch"
    )
    assert result["micro_batch"]["budget"] == config.micro_batch_tokens


@pytest.mark.slow
def test_the_plan_is_for_the_phase_that_needs_the_most_memory(
    config_only: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.train.plan.process_bytes", lambda: 1 << 28)  # otherwise it grows with each call

    def plan(phases: str, *options: str) -> dict[str, Any]:
        outcome = posttrain(
            "plan", "--model", config_only, *FIXED, "--json", "--set", f"train.phases={phases}", *options
        )
        assert outcome.code == 0, outcome
        result: dict[str, Any] = outcome.json
        return result

    short, long = "{steps: 30, max_length: 64}", "{steps: 10, max_length: 512}"
    single_plans = [plan(f"[{phase}]") for phase in (short, long)]
    result = plan(f"[{short}, {long}, {short}]")
    totals = [entry["memory"]["total"] for entry in single_plans]
    assert result["memory"]["stages"] == [totals[0], totals[1], totals[0]]
    assert (result["memory"]["stage"], result["memory"]["total"]) == (1, totals[1])
    assert totals[1] > totals[0]
    assert result["micro_batch"] == single_plans[1]["micro_batch"]
    assert result["work"]["steps"] == 70
    work = 60 * single_plans[0]["work"]["flops"] + 10 * single_plans[1]["work"]["flops"]
    assert result["work"]["flops"] * 70 == pytest.approx(work)
    outcome = posttrain("plan", "--model", config_only, *FIXED, "--set", f"train.phases=[{short}, {long}]")
    assert "of 2 phases, train.phases.1 needs the most" in outcome.out
    assert plan("[]")["memory"]["stage"] is None
    assert plan("[{epochs: 2}, {steps: 3}]")["work"]["steps"] is None, "the length of an epoch is unknown"


def test_phases_with_their_own_data(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "data.jsonl"
    rows = [
        {"prompt": "hi" * (1 + 40 * (number % 2)), "completion": "x", "topic": "ab"[number % 2]} for number in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    phases = "train.phases=[{mix: {a: 1}, mix_by: topic, epochs: 3}, {mix: {b: 1}, mix_by: topic, steps: 5}]"
    options = ("--data", path, "--set", "train.batch_size=2", "--set", "train.micro_batch_tokens=1", *MACHINE)
    outcome = posttrain("plan", "--model", "tiny", *options, "--set", phases, "--json")
    assert outcome.code == 0, outcome
    memory, work = outcome.json["memory"], outcome.json["work"]
    assert memory["stage"] == 1
    assert memory["stages"][0] < memory["stages"][1] == memory["total"]
    assert work["steps"] == 3 * 2 + 5
    short, long = ((2 * (1 + 40 * kind) + 3 + 2) * 2 for kind in (0, 1))  # template tokens, answer and stop token
    assert work["tokens"] == pytest.approx((6 * short + 5 * long) / 11)
    assert outcome.json["micro_batch"]["tokens"] == long / 2 - 1, "the model does not read the last token"
    outcome = posttrain("plan", "--model", "tiny", *options, "--set", phases.replace("topic", "topics"))
    assert "topic is not used" in outcome.err
    assert f"posttrain: {path}:1: record " in outcome.err


def test_the_plan_counts_the_epochs_of_each_kind_in_a_mix(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": f"say {number}", "completion": "x", "topic": "ab"[number > 5]} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    phase = {"mix": "sizes", "mix_by": "topic", "mix_temperature": 1e9, "mix_epochs": 8, "epochs": 3}
    command = ("plan", "--model", "tiny", "--data", path, *FIXED, "--set", f"train.phases={json.dumps([phase])}")
    (mix,) = posttrain(*command, "--json").json["mixes"]
    assert mix["kinds"]["a"] == {"records": 6, "met": 12, "epochs": 2.0, "fewest": 2, "most": 2}
    assert mix["kinds"]["b"] == {"records": 2, "met": 12, "epochs": 6.0, "fewest": 6, "most": 6}
    outcome = posttrain(*command)
    assert "mix of train.phases.0" in outcome.out
    assert "6.00" in outcome.out


def test_kto_doubles_the_steps_on_pairs(tmp_path: Path, posttrain: Call) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "hi", "chosen": f"yes {number}", "rejected": "no"} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--data", path, "--set", "train.batch_size=4", "--set", "train.epochs=1", *MACHINE, "--json")
    steps = {
        objective: posttrain("plan", "--model", "tiny", *options, "--objective", objective).json["work"]["steps"]
        for objective in ("dpo", "kto")
    }
    assert steps == {"dpo": 2, "kto": 4}


def test_a_plan_for_another_machine(config_only: Path, posttrain: Call) -> None:
    result = posttrain(
        "plan", "--model", config_only, "--device", "cuda", "--device-memory", "80", "--peak", "400", "--json"
    ).json
    assert result["memory"]["available"] == 80 * 2**30
    assert "process" not in result["memory"]["parts"]
    assert result["memory"]["host"] == 12 * 134_515_008  # copies from which checkpoints are written
    assert result["micro_batch"]["auto"] == 32768
    small = posttrain("plan", "--model", config_only, *MACHINE[:3], "3", "--json").json
    assert small["micro_batch"]["auto"] is None or small["micro_batch"]["auto"] < 4096


def test_a_plan_for_this_machine(posttrain: Call) -> None:
    result = posttrain("plan", "--model", "tiny", "--peak", "0.1", "--json").json
    assert result["memory"]["available"] > result["memory"]["parts"]["process"] > 10**7
    assert result["memory"]["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no model is named"),
        (("--model", "nothing/here/at/all"), "is not a model"),
        (("--model", "nobody/nothing-of-this-name"), "no config can be read"),
        (("--model", "tiny", "--set", "train.recompute=some"), "recompute"),
        (("--model", "tiny", "--device", "abacus"), "no device `abacus`"),
        (("--model", "tiny", "--data", "nowhere.jsonl"), "there is no such file"),
        (("--model", "tiny", "--device-memory", "-1"), "device-memory"),
        (("--model", "tiny", "--set", "train.method=lora", "--set", "train.lora.targets=[nowhere]"), "targets"),
    ],
)
def test_unusable_options_of_a_plan_are_refused(posttrain: Call, options: tuple[str, ...], message: str) -> None:
    assert message in posttrain("plan", *options, "--peak", "1").mistake


def test_a_missing_device_needs_its_memory_as_an_option(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = posttrain("plan", "--model", "tiny", "--device", "cuda")
    assert "--device-memory: there is no CUDA device here to measure; say what it has" in outcome.mistake


@pytest.mark.slow
def test_a_workspace_is_planned_by_its_config(
    finished_workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, posttrain: Call
) -> None:
    outcome = posttrain("plan", "-w", finished_workspace, *MACHINE, "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["work"]["steps"] > 0, "of the newest training set"
    monkeypatch.chdir(finished_workspace)
    assert posttrain("plan", *MACHINE, "--json").json["work"] == outcome.json["work"]
    mistake = posttrain("plan", "-w", tmp_path / "none").mistake
    assert mistake == f"{tmp_path / 'none'}: no posttrain.yaml here; posttrain init {tmp_path / 'none'}"
