"""A checkpoint loads as it was saved, bit for bit."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint, byte_view, checksum

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]

shared = torch.arange(12.0)
TENSORS: dict[str, dict[str, Tensor]] = {
    "bfloat16": {"x": torch.randn(5, 3).bfloat16()},
    "float16": {"x": torch.randn(5).half()},
    "float32": {"x": torch.randn(2, 3, 4)},
    "float64": {"x": torch.randn(3).double()},
    "int64": {"x": torch.tensor([-(2**63), 2**63 - 1, 0])},
    "int32": {"x": torch.tensor([1, -1], dtype=torch.int32)},
    "uint8": {"x": torch.arange(256, dtype=torch.uint8)},
    "bool": {"x": torch.tensor([True, False])},
    "float8": {"x": torch.randn(4).to(torch.float8_e4m3fn)},
    "complex": {"x": torch.randn(3, dtype=torch.complex64)},
    "conjugated": {"x": torch.randn(3, dtype=torch.complex64).conj()},
    "mixed": {"x": torch.ones(3, dtype=torch.uint8), "y": torch.ones(3).bfloat16(), "z": torch.ones(1).double()},
    "scalar": {"x": torch.tensor(3.5), "y": torch.tensor(7), "z": torch.tensor(1.5).bfloat16()},
    "empty": {"x": torch.empty(0), "y": torch.empty(3, 0, 2, dtype=torch.int64), "z": torch.empty(0).bfloat16()},
    "none": {},
    "not numbers": {"x": torch.tensor([math.nan, -math.inf, -0.0, 1e-45])},
    "transposed": {"x": torch.randn(3, 4).T},
    "strided": {"x": torch.arange(20)[::3], "y": torch.randn(4, 4)[1:3, ::2]},
    "expanded": {"x": torch.randn(1, 3).expand(5, 3)},
    "shared": {"x": shared, "y": shared, "z": shared[3:7], "w": shared.reshape(3, 4)},
    "with a gradient": {"x": torch.randn(3, requires_grad=True)},
    "parameter": {"x": torch.nn.Parameter(torch.randn(3))},
    "random state": {"x": torch.get_rng_state()},
    "many": {f"layer.{number}.weight": torch.full((3,), float(number)) for number in range(200)},
    "names": {"": torch.ones(1), 'é\n"\\': torch.ones(2), "a/b c": torch.ones(3), "😀": torch.ones(4)},
}


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_load_as_saved(folder: Path, same: Same, kind: str, in_background: bool) -> None:
    expected = Checkpoint(TENSORS[kind], {"kind": kind})
    with Checkpoints(folder, CheckpointConfig(background=in_background)) as checkpoints:
        checkpoints.save(1, expected)
        expected = Checkpoint(
            {name: tensor.detach().resolve_conj() for name, tensor in TENSORS[kind].items()}, expected.state
        )
        actual = checkpoints.latest()
        assert same(actual, expected)
        assert actual is not None
        for tensor in actual.tensors.values():  # must change neither the disk nor anybody else's memory
            tensor.zero_()
        assert same(checkpoints.latest(), expected)
        assert same(Checkpoints(folder).latest(), expected)


SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.tuples(SHAPES, DTYPES), max_size=6)
)
def test_any_tensors_load_as_saved(
    tmp_path: Path, same: Same, tensors: dict[str, tuple[list[int], torch.dtype]]
) -> None:
    tensors.pop("__metadata__", None)
    expected = Checkpoint({name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in tensors.items()}, {})
    with Checkpoints(tmp_path / "any", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, expected)
        assert same(checkpoints.at(1), expected)


STATES: dict[str, Any] = {
    "empty": {},
    "nested": {"a": [{"b": [1, 2.5, None, True, "x"]}], "c": {"d": {}}},
    "precise": {"x": 0.1 + 0.2, "y": 2**70, "z": 5e-324},
    "infinite": {"x": math.inf, "y": -math.inf},
    "unicode": {"é": "😀\u0000\n"},
    "order": {"z": 1, "a": 2, "m": 3},
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_loads_as_saved(foreground: Checkpoints, name: str) -> None:
    foreground.save(1, Checkpoint({}, STATES[name]))
    result = foreground.latest()
    assert result is not None
    assert result.state == STATES[name]
    assert list(result.state) == list(STATES[name])


def test_a_state_may_hold_nan(foreground: Checkpoints) -> None:
    foreground.save(1, Checkpoint({}, {"loss": math.nan}))
    result = foreground.latest()
    assert result is not None
    assert math.isnan(result.state["loss"])


@pytest.mark.parametrize("state", [{"a": {1: 2}}, {"a": [{None: 2}]}, {"a": {1, 2}}, {"a": torch.ones(1)}])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_state_that_json_would_change_is_refused(folder: Path, state: Any, in_background: bool) -> None:
    with Checkpoints(folder, CheckpointConfig(background=in_background)) as checkpoints:
        with pytest.raises(TypeError):
            checkpoints.save(1, Checkpoint({}, state))
        assert checkpoints.latest() is None


@pytest.mark.parametrize("in_background", [True, False])
def test_a_sparse_tensor_is_named(folder: Path, in_background: bool) -> None:
    sparse = Checkpoint({"a": torch.ones(1), "b": torch.eye(2).to_sparse()}, {})
    with Checkpoints(folder, CheckpointConfig(background=in_background)) as checkpoints:
        with pytest.raises(ValueError, match="tensor `b` is sparse"):
            checkpoints.save(1, sparse)
        assert checkpoints.steps() == []


def test_a_negative_step_is_refused(foreground: Checkpoints, make: Make) -> None:
    with pytest.raises(ValueError, match="step -1 is negative"):
        foreground.save(-1, make(1))


def test_the_manifest_describes_the_files(foreground: Checkpoints, make: Make) -> None:
    expected = make(7)
    foreground.save(7, expected)
    folder = foreground.folder / "step-000000007"
    names = {"manifest.json", "state.json", "steps.jsonl", "tensors.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["step"]) == (3, 7)
    content = (folder / "tensors.safetensors").read_bytes()
    assert manifest["tensors_size"] == len(content)
    for name in ("state", "steps"):
        file = (folder / ("state.json" if name == "state" else "steps.jsonl")).read_bytes()
        assert (manifest[f"{name}_size"], manifest[f"{name}_checksum"]) == (len(file), checksum(file))
    assert manifest["tensors"].keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        entry = manifest["tensors"][name]
        assert (entry["dtype"], entry["shape"]) == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        assert entry["checksum"] == checksum(byte_view(tensor))
        assert (
            content[entry["start"] : entry["start"] + entry["size"]]
            == tensor.flatten().view(torch.uint8).numpy().tobytes()
        )


@pytest.mark.parametrize("kind", TENSORS)
def test_safetensors_reads_the_tensors(foreground: Checkpoints, same: Same, kind: str) -> None:
    tensors = {name: tensor.detach().resolve_conj() for name, tensor in TENSORS[kind].items()}
    foreground.save(7, Checkpoint(tensors, {}))
    folder = foreground.folder / "step-000000007"
    result = load_file(folder / "tensors.safetensors")
    assert result.keys() == tensors.keys()
    entries = json.loads((folder / "manifest.json").read_bytes())["tensors"]
    assert all(entries[name]["start"] % tensor.element_size() == 0 for name, tensor in tensors.items()), "aligned"
    assert same(Checkpoint({name: result[name] for name in tensors}, {}), Checkpoint(tensors, {}))


@pytest.mark.parametrize("in_background", [True, False])
def test_an_unsupported_dtype_is_named(folder: Path, in_background: bool) -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)}
    with Checkpoints(folder, CheckpointConfig(background=in_background)) as checkpoints:
        with pytest.raises(ValueError, match=r"tensor `b` is of torch\.complex128, which a checkpoint cannot hold"):
            checkpoints.save(1, Checkpoint(tensors, {}))
        assert checkpoints.steps() == []


def test_a_large_tensor_loads_as_saved(foreground: Checkpoints, same: Same) -> None:
    """Larger than the chunk that is hashed at a time."""
    expected = Checkpoint({"x": torch.randn(700_001), "y": torch.arange(300_000)}, {})
    foreground.save(1, expected)
    assert same(foreground.latest(), expected)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "never" / "made", CheckpointConfig())
    assert checkpoints.latest() is None
    assert checkpoints.at(3) is None
    assert checkpoints.rewind(3) is None
    assert checkpoints.steps() == []
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_the_config_needs_no_torch() -> None:
    code = "import sys; from posttrain.train.checkpoint.config import CheckpointConfig; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "False\n"
