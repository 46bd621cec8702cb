"""Damaged model folders: the error names the file or the tensor, and failures of the machine are not the user's."""

import errno
import json
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.models.gguf import load_gguf_config, load_gguf_tokenizer
from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.loading import check_loaded, not_finite
from posttrain.models.shape import read_config
from posttrain.models.sources import fetch
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError

QUERY = "model.layers.0.self_attn.q_proj.weight"

Damage = Callable[[Path], object]


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def header(**changes: Any) -> Damage:
    """Change the header's entry of a tensor; the numbers stay."""

    def damage(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8:end])
        entries[QUERY] |= changes
        text = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[end:])

    return damage


def file(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def shard(index: object) -> Damage:
    """Rename the weights to a shard's name, with an index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config(hidden_size="wide"), "hidden_size"),
        (config(hidden_size=128), "hidden size (128) is not a multiple of the number of attention heads"),
        (config(num_attention_heads=0), "modulo"),
        (config(num_hidden_layers=10**7), "num_hidden_layers is 10000000, not 1 to 2000"),
        (config(num_hidden_layers=3), "9 weights are missing, the first is model.layers.2."),
        (config(num_hidden_layers=1), "9 tensors have no place in the model that config.json describes"),
        (config(vocab_size=10**15), "[261, 96], and config.json asks for [1000000000000000, 96]"),
        (config(intermediate_size=100), "[288, 96], and config.json asks for [100, 96]"),
        (config(hidden_act="nosuch"), "KeyError: 'nosuch'"),
        (config(dtype="float99"), "float99"),
        (config(model_type="nosuch"), "nosuch"),
        (config(quantization_config={"quant_method": "gptq", "bits": 4}), "pip install optimum"),
        (header(dtype="Q9"), f"tensor {QUERY} has the unknown dtype Q9"),
        (header(dtype="F32"), f"tensor {QUERY} of shape [96, 96] in F32 has 18,432 bytes instead of 36,864"),
        (header(shape=[96, 97]), f"tensor {QUERY} of shape [96, 97] in BF16 has 18,432 bytes instead of 18,624"),
        (header(shape=[48, 192]), f"tensor {QUERY} has the shape [48, 192], and config.json asks for [96, 96]"),
        (header(shape=[-96, -96]), f"tensor {QUERY} has no dtype, shape or place that can be read"),
        (header(shape=[2**63, 2**63]), f"tensor {QUERY} of shape"),
        (header(data_offsets=[0, 18432]), "does not begin where the one before ends"),
        (cut, "480,152 bytes of tensors instead of 481,152, cut short in tensor model.norm.weight"),
        (file("model.safetensors", b""), "has no header of a safetensors file"),
        (file("model.safetensors", struct.pack("<Q", 2**60) + b"x" * 99), "has no header of a safetensors file"),
        (file("model.safetensors", struct.pack("<Q", 2) + b"[]"), "its header cannot be read"),
        (weights(lambda tensors: tensors.pop(QUERY)), f"1 weights are missing, the first is {QUERY}"),
        (weights(lambda tensors: tensors.update(extra=torch.zeros(3))), "the first is extra; remove them"),
        (weights(lambda tensors: tensors.update({QUERY: torch.zeros(5, 5)})), f"tensor {QUERY} has the shape [5, 5]"),
        (weights(lambda tensors: tensors[QUERY].fill_(torch.nan)), f"tensor {QUERY} holds NaN or infinite numbers"),
        (shard({"weight_map": {"a": "model-00002-of-00002.safetensors"}}), "names model-00002-of-00002.safetensors"),
        (shard({}), "maps no weights to files"),
        (file("tokenizer.json", b"{}"), "no causal language model"),
        (file("tokenizer_config.json", b"[]"), "no causal language model"),
        (file("generation_config.json", b"junk"), "generation_config.json cannot be read"),
        (file("generation_config.json", b"[]"), "generation_config.json cannot be read"),
        (file("generation_config.json", b'{"eos_token_id": "x"}'), "has the stop token 'x'"),
    ],
)
def test_a_damaged_folder_is_one_line_that_names_the_fault(copy: Path, damage: Damage, message: str) -> None:
    damage(copy)
    with pytest.raises(UserError) as caught:
        load_language_model(copy, TaskConfig())
    assert message in str(caught.value)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        weights(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})),
        weights(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})),
    ],
    ids=["computed buffer", "tied head"],
)
def test_tensors_that_models_compute_may_lie_in_the_files(copy: Path, damage: Damage, tiny_model: Path) -> None:
    damage(copy)
    ids = torch.tensor([[5, 6, 7]])
    expected, result = (load_language_model(folder, TaskConfig(), "float32") for folder in (tiny_model, copy))
    assert torch.equal(result.model(ids).logits, expected.model(ids).logits)


def test_other_parts_of_a_composite_model_are_left_out() -> None:
    """The text model of one that sees: its image encoder has no place, a layer of its own must have one."""

    def loading(*unexpected: str) -> Mapping[str, Any]:
        return {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": set(unexpected)}

    check_loaded(loading("vision_tower.layers.0.weight", "multi_modal_projector.weight"), "model", composite=True)
    with pytest.raises(UserError, match=r"1 tensor has no place .* language_model\.layers\.9"):
        check_loaded(loading("vision_tower.weight", "language_model.layers.9.weight"), "model", composite=True)
    with pytest.raises(UserError, match="2 tensors have no place"):
        check_loaded(loading("vision_tower.weight", "a"), "model")


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (MemoryError(), WorkError, "out of memory while the model is loaded"),
        (torch.OutOfMemoryError("CUDA out of memory"), WorkError, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), WorkError, "out of memory"),
        (OSError(errno.EIO, "Input/output error"), OSError, "Input/output error"),
        (OSError(errno.EMFILE, "Too many open files"), OSError, "Too many open files"),
        (RuntimeError("a defect"), RuntimeError, "a defect"),
        (AttributeError("a defect"), AttributeError, "a defect"),
        (PermissionError(errno.EACCES, "denied"), UserError, "permission denied"),
        (ImportError("pip install nosuch"), UserError, "pip install nosuch"),
        (ValueError("quantised otherwise"), UserError, "no causal language model: quantised otherwise"),
    ],
)
def test_only_faults_of_the_folder_are_the_users(
    copy: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], message: str
) -> None:
    from transformers import AutoModelForCausalLM

    def fail(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(expected, match=message) as caught:
        load_language_model(copy, TaskConfig())
    assert isinstance(caught.value, UserError | WorkError) == issubclass(expected, UserError | WorkError)


def test_a_base_model_that_is_not_finite_is_not_fetched(copy: Path, tmp_path: Path) -> None:
    weights(lambda tensors: tensors[QUERY][3].fill_(torch.inf))(copy)
    with pytest.raises(UserError, match=f"tensor {QUERY} holds NaN or infinite numbers"):
        fetch(str(copy), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (copy / "model.safetensors").unlink()
    fetch(str(copy), tmp_path / "out")  # its config alone, to train from scratch


def test_a_missing_package_for_gguf_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "a.gguf").write_bytes(b"GGUF")

    def fail(*arguments: object, **options: object) -> None:
        raise ImportError("Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(UserError, match=r"a\.gguf: .*install torch and gguf"):
        fetch(str(tmp_path / "a.gguf"), tmp_path / "out")


@pytest.mark.parametrize("read", [load_gguf_config, load_gguf_tokenizer])
def test_a_missing_reader_of_gguf_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"a\.gguf: .*gguf.*install the package"):
        read(tmp_path / "a.gguf")


def test_a_config_without_weights_has_limits_too(copy: Path) -> None:
    config(num_hidden_layers=10**9)(copy)
    with pytest.raises(UserError, match="num_hidden_layers is 1000000000"):
        read_config(str(copy))


@pytest.mark.parametrize(("dtype", "number"), [("float32", torch.nan), ("bfloat16", -torch.inf), ("float16", 1e30)])
def test_a_model_that_is_not_finite_is_not_saved(tiny_model: Path, tmp_path: Path, dtype: str, number: float) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    with torch.no_grad():
        lm.model.model.layers[1].mlp.down_proj.weight[1, 2] = number
    with pytest.raises(WorkError, match=r"not saved: tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        save_language_model(lm, tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


def test_every_weight_and_buffer_is_looked_at(tiny: LanguageModel) -> None:
    assert not_finite(tiny.model) is None
    module = torch.nn.BatchNorm1d(3)
    module.running_var[1] = torch.inf
    assert not_finite(torch.nn.Sequential(module)) == "0.running_var"
