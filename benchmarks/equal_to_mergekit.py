"""Compares the merged weights of each method with mergekit's, from the same recipes, in float32.

    python benchmarks/equal_to_mergekit.py --peer OTHER/bin/mergekit-yaml [--methods linear slerp ...] [--bfloat16]

mergekit has a virtual environment of its own (``pip install mergekit==0.1.5``). The models are a tiny Llama of four
layers and three more from other seeds, in float32. A row has the largest difference of any weight, and the share of all
weights that differ by more than 1e-5. With ``--bfloat16`` the models are rounded: TIES and its kin keep or drop each
weight by its rank, and where magnitudes are equal to the threshold, ours keeps all of them and mergekit some.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from posttrain.merge.api import merge
from posttrain.models.tiny import write_tiny_model

Recipe = dict[str, Any]


def recipes(folder: Path) -> dict[str, Recipe]:
    """Returns a recipe for each method that both programs have, with values by layer and by name among them."""
    base, a, b, c = (str(folder / name) for name in ("base", "a", "b", "c"))
    two = [model(a, weight=0.3), model(b, weight=0.9)]
    sparse = [model(a, weight=0.4, density=0.5), model(b, weight=0.5, density=[0.3, 0.9])]
    by_name = [{"filter": "mlp", "value": 0.2}, {"value": 0.9}]
    halves = [{"sources": [source(a, 0, 3)]}, {"sources": [source(c, 1, 4)]}]
    pair = {"base_model": a, "models": [model(a), model(b)]}
    tasks = {"base_model": base, "models": sparse}
    return {
        "linear": {"models": two},
        "linear, by layer": {"models": [model(a, weight=[0, 0.5, 1]), model(b, weight=[1, 0.5, 0.2])]},
        "linear, by name": {"models": [model(a, weight=by_name), model(b, weight=0.5)]},
        "linear, not normalised": {"models": two, "parameters": {"normalize": False}},
        "slerp": pair | {"parameters": {"t": [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 0.4}]}},
        "nuslerp": {"models": two},
        "task_arithmetic": {"base_model": base, "models": two},
        "ties": tasks | {"parameters": {"normalize": True}},
        "ties, lambda": tasks | {"parameters": {"normalize": False, "lambda": 0.7}},
        "dare_linear, all kept": {"base_model": base, "models": [model(a, weight=0.4, density=1.0)]},
        "passthrough": {"slices": halves},
    }


def model(name: str, **parameters: Any) -> Recipe:
    """Returns a model of a recipe."""
    return {"model": name, "parameters": parameters} if parameters else {"model": name}


def source(name: str, first: int, last: int) -> Recipe:
    """Returns layers of a model."""
    return {"model": name, "layer_range": [first, last]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Reads all weights of a folder as float64."""
    return {k: v.double() for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def main() -> None:
    """Merges by each recipe with both programs, and prints the differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="mergekit-yaml of the other environment")
    parser.add_argument("--methods", nargs="*", help="beginnings of the names of rows; all by default")
    parser.add_argument("--bfloat16", action="store_true", help="round the models, so that magnitudes are equal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, part in enumerate(("base", "a", "b", "c")):
            write_tiny_model(folder / part, seed=seed, layers=4)
            if not options.bfloat16:
                add_noise(folder / part / "model.safetensors", seed)
        for title, recipe in recipes(folder).items():
            if options.methods and not title.startswith(tuple(options.methods)):
                continue
            print(json.dumps({"method": title} | compare(folder, title, recipe, options.peer)), flush=True)


def add_noise(file: Path, seed: int) -> None:
    """Makes all numbers of a file different from each other, in float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {k: v.float() + 0.01 * torch.randn(v.shape, generator=generator) for k, v in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def compare(folder: Path, title: str, recipe: Recipe, peer: str) -> Recipe:
    """Returns the differences of one recipe's results."""
    work = folder / title
    work.mkdir()
    file = work / "recipe.yaml"
    file.write_text(yaml.safe_dump({"merge_method": title.partition(",")[0], "dtype": "float32", **recipe}))
    command = [peer, str(file), str(work / "theirs")]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if result.returncode:
        return {"mergekit": result.stderr.strip().splitlines()[-1][:200]}
    merge(file, work / "ours")
    theirs, ours = weights(work / "theirs"), weights(work / "ours")
    if theirs.keys() != ours.keys():
        return {"names that differ": sorted(theirs.keys() ^ ours.keys())[:5]}
    differences = torch.cat([(ours[key] - theirs[key]).abs().flatten() for key in ours])
    return {"largest difference": float(differences.max()), "differing": float((differences > 1e-5).double().mean())}


if __name__ == "__main__":
    main()
