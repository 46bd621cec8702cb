"""The engine: the same bytes whatever the workers, the memory and the files, and memory that does not grow."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from posttrain.merge import tensor_reader
from posttrain.merge.api import MERGE_FILE, merge
from posttrain.merge.tensor_reader import Arena

Read = Callable[[Path], dict[str, Tensor]]

_LARGE = "model.layers.0.mlp.up_proj.weight"

_ARENA = 1 << 14
"""Bytes of an arena into which none of the larger tensors fits."""


def _widened(seed: int) -> Callable[[dict[str, Tensor]], None]:
    """Returns a change that adds a tensor of several blocks, and one of a single row that is longer than a block."""

    def change(weights: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights["model.wide.weight"] = torch.randn(700, 300, generator=generator).bfloat16()
        weights["model.long.weight"] = torch.randn(70_001, generator=generator).bfloat16()

    return change


def _write_adapter(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(9)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 5, "lora_alpha": 7}))
    factors = {"A": torch.randn(5, 300, generator=generator), "B": torch.randn(700, 5, generator=generator)}
    prefix = "base_model.model.model.wide.lora_"
    save_file(
        {f"{prefix}{key}.weight": factor for key, factor in factors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.fixture
def models(make_model: Any) -> list[Path]:
    return [make_model(f"m{seed}", seed, change=_widened(seed)) for seed in range(4)]


# A method of each kind: without a base, with random numbers, with a statistic over the tensor. All methods in memory:
# see the contract of methods.
@pytest.mark.parametrize("method", ["linear", "della", "ties"])
@pytest.mark.slow
def test_workers_memory_and_files_change_no_bit(
    method: str, models: list[Path], read_weights: Read, tmp_path: Path
) -> None:
    # An adapter's update is computed block by block.
    recipe = [f"{models[1]}+{_write_adapter(tmp_path / 'adapter')}", *models[2:]]
    options: dict[str, Any] = {"method": method} | ({} if method == "linear" else {"base": models[0]})
    reference: dict[str, Tensor] | None = None
    for number, (workers, arena, shard_bytes) in enumerate(
        ((1, 1 << 30, 1 << 30), (3, _ARENA, 50_000), (1, 1, 300_000), (2, 1 << 18, 1))
    ):
        out = tmp_path / f"out{number}"
        merge(recipe, out, **options, workers=workers, memory=arena * (workers + 1), shard_bytes=shard_bytes, seed=3)
        result = read_weights(out)
        reference = reference or result
        assert result.keys() == reference.keys()
        for name, value in result.items():
            assert torch.isfinite(value).all(), name
            assert torch.equal(value, reference[name]), (name, workers, arena, shard_bytes)
        files = list(out.glob("*.safetensors"))
        assert (len(files) == 1) == (shard_bytes == 1 << 30)


@pytest.mark.slow
def test_any_workers_memory_and_files(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    def digests(**limits: int) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("merge") / "out"
        merge(models[1:], out, method="ties", base=models[0], density=0.3, **limits)
        tensors = json.loads((out / MERGE_FILE).read_text())["tensors"]
        return {name: (entry["digest"], entry["inputs"]) for name, entry in tensors.items()}

    expected = digests()

    @given(workers=st.integers(1, 3), memory=st.integers(1, 1 << 21), shard_bytes=st.integers(1, 1 << 20))
    @settings(max_examples=5)
    def test(**limits: int) -> None:
        assert digests(**limits) == expected

    test()


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_memory_does_not_grow_with_the_tensor(
    method: str, make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the arena holds at most, for a tensor and for one of eight times its size."""
    monkeypatch.setattr(tensor_reader, "_READ_BYTES", 1 << 16)
    peak = 0
    take = Arena.take

    def counted(self: Arena, name: str, count: int, dtype: torch.dtype) -> Tensor:
        nonlocal peak
        result = take(self, name, count, dtype)
        peak = max(peak, sum(len(memory) for memory in self._memory.values()))
        return result

    monkeypatch.setattr(Arena, "take", counted)
    peaks = []
    for rows in (2_000, 16_000):

        def change(weights: dict[str, Tensor], rows: int = rows) -> None:
            weights["model.wide.weight"] = torch.randn(rows, 128).bfloat16()

        folders = [make_model(f"m{rows}-{seed}", seed, change=change) for seed in range(3)]
        peak = 0
        options: Any = {"base": folders[0]} if method == "ties" else {}
        merge(folders[1:], tmp_path / f"out{rows}", method=method, workers=1, memory=1 << 17, **options)
        peaks.append(peak)
    assert peaks[1] <= 1.1 * peaks[0]
    # Blocks of float32 of the three models and the result, and what is read of each.
    assert peaks[1] <= 4 * (4 << 16) + 3 * (1 << 18) + (1 << 18)


def _digest(value: Tensor) -> str:
    return xxhash.xxh3_128(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def test_the_record_names_every_tensor_with_its_digest(models: list[Path], read_weights: Read, tmp_path: Path) -> None:
    base, first, second, _ = models
    out = tmp_path / "out"
    rules = [{"match": "norm", "method": "linear"}]
    recipe = {"method": "ties", "base": str(base), "models": [str(first), {"model": str(second), "weight": 0.5}]}
    result = merge(recipe | {"layers": rules}, out)
    record, weights = json.loads((out / MERGE_FILE).read_text()), read_weights(out)
    assert record["tensors"].keys() == weights.keys()
    inputs = {str(path): read_weights(path) for path in (base, first, second)}
    for name, entry in record["tensors"].items():
        assert entry["digest"] == _digest(weights[name])
        assert entry["method"] == ("linear" if "norm" in name else "ties")
        parts = [(part["model"], part["tensor"]) for part in entry["inputs"]]
        assert parts == [(str(path), name) for path in ((first, second) if "norm" in name else (first, second, base))]
        for part in entry["inputs"]:
            assert part["digest"] == _digest(inputs[part["model"]][part["tensor"]])
    assert record["models"] == {name: name for name in inputs}
    assert record["tensors"][_LARGE]["options"]["weight"] == [1.0, 0.5]
    assert record["recipe"]["base"] == str(base)
    assert record["bytes"] == result.bytes == sum(value.nbytes for value in weights.values())
    assert record["peak_memory"] > 1 << 20
    assert re.fullmatch(r"\d+\.\d+.*", record["posttrain"])


def test_the_digests_of_empty_tensors_and_of_copied_integers(make_model: Any, tmp_path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights |= {"model.none.weight": torch.empty(0, 3), "model.positions": torch.arange(200_000).view(2, -1)}

    merge([make_model("a", 1, change=change), make_model("b", 2, change=change)], tmp_path / "out")
    tensors = json.loads((tmp_path / "out" / MERGE_FILE).read_text())["tensors"]
    assert tensors["model.positions"]["method"] == "copy"
    assert tensors["model.positions"]["digest"] == _digest(torch.arange(200_000))
    assert tensors["model.none.weight"]["inputs"][0]["digest"] == _digest(torch.empty(0))


def test_one_shard_loads_without_an_index_and_several_with_one(
    models: list[Path], read_weights: Read, tmp_path: Path
) -> None:
    merge(models[:2], tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    merge(models[:2], tmp_path / "many", shard_bytes=200_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one = read_weights(tmp_path / "one")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in one.values())
    for name, file in index["weight_map"].items():
        from safetensors import safe_open

        with safe_open(tmp_path / "many" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), one[name])
