"""The faster precision is chosen by measured rates, and holds for a workspace or a training from then on."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.loop import Loop
from posttrain.models import machine_rate, precision
from posttrain.models.precision import choose_precision, count_weights
from posttrain.store.workspace import Workspace
from posttrain.train.api import train


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """FLOP/s that this machine is taken to reach, by dtype."""
    values = {torch.float32: 200e9, torch.bfloat16: 1000e9}
    monkeypatch.setattr(machine_rate, "matmul_rate", lambda dtype, device="cpu": values[dtype])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return values


@pytest.mark.parametrize(
    ("bfloat16", "expected"),
    # With AMX, with AVX512-BF16 (the step is slower where products are as fast), with AVX2 alone.
    [(1000e9, "bfloat16"), (210e9, "float32"), (24e9, "float32")],
)
def test_the_faster_precision_is_chosen(rates: dict[torch.dtype, float], bfloat16: float, expected: str) -> None:
    rates[torch.bfloat16] = bfloat16
    assert choose_precision(weights=10**8) == expected


def test_weights_that_take_the_memory_stay_in_bfloat16(
    rates: dict[torch.dtype, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates[torch.bfloat16] = 24e9
    monkeypatch.setattr(precision, "_memory", lambda: 16 << 30)
    assert choose_precision(weights=2 * 10**9) == "float32"
    assert choose_precision(weights=3 * 10**9) == "bfloat16"


def test_weights_are_counted_by_their_headers(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(next(tiny_model.glob("*.safetensors")))
    assert count_weights(tiny_model) == sum(tensor.numel() for tensor in tensors.values())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert count_weights(tmp_path) is None


@pytest.mark.slow
def test_a_training_keeps_the_precision_that_it_began_with(
    rates: dict[torch.dtype, float], tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p {n}", "completion": f"c {n}"}) + "\n" for n in range(4)))
    settings = {"train": {"epochs": 1}}
    train(tiny_model, data, tmp_path / "out", settings=settings)
    rates[torch.bfloat16] = 24e9
    train(tiny_model, data, tmp_path / "out", settings=settings)  # the same training, done
    train(tiny_model, data, tmp_path / "new", settings=settings)
    chosen = [
        yaml.safe_load((tmp_path / out / "config.yaml").read_text())["train"]["precision"] for out in ("out", "new")
    ]
    assert chosen == ["bfloat16", "float32"]


@pytest.mark.slow
def test_a_workspace_keeps_the_precision_of_its_first_evaluation(
    rates: dict[torch.dtype, float],
    small: "SmallWorkspaces",  # noqa: F821
) -> None:
    root = small(rounds=1, train={"precision": "auto"}, precision="auto")
    rates[torch.bfloat16] = 24e9
    config = load_config(root)
    with Workspace.create(root) as workspace:
        Loop(workspace, config).run(until="evaluate")
        rates[torch.bfloat16] = 1000e9
        Loop(workspace, config).run()
        assert RoundContext(workspace, config, 1).precision == "float32"
        trained = workspace.metadata.runs(stage="train")
        assert [run.config["train"]["precision"] for run in trained] == ["float32"]
        assert {run.config["precision"] for run in workspace.metadata.runs(stage="evaluate")} == {"float32"}


@pytest.mark.slow
def test_finished_work_that_is_older_than_the_choice_stays_valid(
    rates: dict[torch.dtype, float],
    small: "SmallWorkspaces",  # noqa: F821
) -> None:
    root = small(rounds=1, train={"precision": "bfloat16"}, precision="bfloat16")
    with Workspace.create(root) as workspace:
        Loop(workspace, load_config(root)).run()
        before = len(workspace.metadata.runs())
        small.configure(root, rounds=1, train={"precision": "auto"}, precision="auto")
        rates[torch.bfloat16] = 24e9
        config = load_config(root)
        Loop(workspace, config).run()
        assert len(workspace.metadata.runs()) == before
        assert RoundContext(workspace, config, 1).precision == "bfloat16"
