"""Small models to merge: the tiny model with other weights, dtypes and vocabularies."""

import json
import os
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


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: a kill, unlike a power cut, loses no written data."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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
        if change is not None:
            change(weights)
        write_weights(folder, weights, shards)
        if config:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | dict(config)))
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
