"""Small models that share a base, and their weights in float64."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.models.tiny import write_tiny_model

Weights = dict[str, torch.Tensor]


def weights_of(folder: Path) -> Weights:
    """Reads a folder's weights as float64."""
    return {name: tensor.double() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_relative(
    folder: Path, base: Path, seed: int, scale: float = 0.01, dtype: torch.dtype = torch.float32
) -> Path:
    """Writes a copy of a model with noise on its weights."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor + scale * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in sorted(weights_of(base).items())
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base``, of four layers, and ``a``, ``b`` and ``c``, as if trained from it."""
    root = tmp_path_factory.mktemp("family")
    write_tiny_model(root / "base", layers=4)
    for seed, name in enumerate("abc", 1):
        write_relative(root / name, root / "base", seed)
    return root


def merge_file(folder: Path) -> dict[str, object]:
    """Reads the merge.json of a merged model."""
    content: dict[str, object] = json.loads((folder / "merge.json").read_text())
    return content
