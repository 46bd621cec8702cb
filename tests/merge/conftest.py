"""Small models to merge: the tiny model with other weights, dtypes and vocabularies."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_family import family  # noqa: F401
from safetensors.torch import load_file, save_file
from torch import Tensor

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tiny_model: Path, tmp_path: Path) -> MakeModel:
    """Returns a function that writes the tiny model with its weights changed by noise of a seed."""

    def make(
        name: str,
        seed: int = 0,
        scale: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[dict[str, Tensor]], None] | None = None,
        config: Mapping[str, Any] | None = None,
        shards: int = 1,
    ) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        generator = torch.Generator().manual_seed(seed)
        weights = {
            key: (value.float() + scale * (seed > 0) * torch.randn(value.shape, generator=generator)).to(dtype)
            for key, value in load_file(tiny_model / "model.safetensors").items()
        }
        names = {*weights, "lm_head.weight"}
        if change is not None:
            change(weights)
        write_weights(folder, weights, shards)
        values = dict(config or {})
        if any(key not in names and not key.endswith(".bias") for key in weights):
            # Of a family that transformers does not know, as it would not load these tensors.
            values.setdefault("model_type", "unknown")
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return folder

    return make


def write_weights(folder: Path, weights: Mapping[str, Tensor], shards: int = 1) -> None:
    """Writes the weights of a model into one file or several."""
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, places = sorted(weights), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture
def read_weights() -> Callable[[Path], dict[str, Tensor]]:
    """Returns a function that reads all tensors of a folder."""

    def read(folder: Path) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        return weights

    return read


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes an adapter with random factors, and the model that peft merges with it."""

    def make(base: Path, name: str, seed: int = 0, **options: Any) -> Path:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        targets = ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(**{"target_modules": targets, "task_type": "CAUSAL_LM", **options})
        model: Any = get_peft_model(loaded, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / name)
        model.merge_and_unload().save_pretrained(tmp_path / f"{name}-merged")
        return tmp_path / name

    return make
