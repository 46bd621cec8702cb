"""Input that cannot be merged: one clear line before any work, or the exact limit value."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.merge import api
from posttrain.merge.api import merge
from posttrain.store.errors import UserError

Read = Callable[[Path], dict[str, Tensor]]

AssertRefused = Callable[..., None]


@pytest.fixture
def assert_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AssertRefused:
    """Returns a function that expects a merge to be refused before any work, without a trace on the disk."""

    def no_work(*arguments: Any) -> Any:
        raise AssertionError("the work began")

    def check(text: str, models: Any, before_work: bool = True, **options: Any) -> None:
        before = set(tmp_path.iterdir())
        with monkeypatch.context() as patch:
            if before_work:
                patch.setattr(api, "run_plan", no_work)
            with pytest.raises(UserError, match=text) as error:
                merge(models, tmp_path / "out", **options)
        assert "\n" not in str(error.value)
        assert set(tmp_path.iterdir()) == before

    return check


def _replace(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = value(weights[name])

    return change


_NORM = "model.norm.weight"


def test_other_architectures(make_model: Any, assert_refused: AssertRefused) -> None:
    model = make_model("model")
    other = make_model("other", config={"model_type": "qwen3"})
    assert_refused(r"`.*other` has the model_type qwen3 and `.*model` llama; only models of one", [model, other])
    wide = make_model("wide", config={"hidden_size": 128})
    assert_refused("has the hidden_size 128 and .* 96", [model, wide])
    shape = make_model("shape", change=_replace(_NORM, lambda value: value[:50]))
    assert_refused(r"tensor model.norm.weight has the shape \[50\] in .*shape` and \[96\] in", [model, shape])
    less = make_model("less", change=lambda weights: weights.pop(_NORM))
    assert_refused("tensor model.norm.weight is in `.*model` and not in `.*less`", [model, less])
    extra = {"model.extra.weight": torch.ones(2)}
    more = make_model("more", change=lambda weights: weights.update(extra), config={"model_type": "llama"})
    assert_refused("tensor model.extra.weight is in `.*more` and not in `.*model`", [model, more])


def test_keys_that_older_configs_leave_out_may_differ(
    make_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_model("old", 1), make_model("new", 2, config={"rms_norm_eps": 0.5})
    config = json.loads((old / "config.json").read_text())
    del config["head_dim"]
    (old / "config.json").write_text(json.dumps(config))
    merge([old, new], tmp_path / "out")
    assert "new has the rms_norm_eps 0.5 and" in caplog.text


def test_damaged_folders(make_model: Any, assert_refused: AssertRefused, tmp_path: Path) -> None:
    model, other = make_model("model"), make_model("other", 1, shards=3)
    shard = other / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    assert_refused("names model-00002-of-00003.safetensors, which is missing", [model, other])
    shard.write_bytes(content[:-10])
    assert_refused(r"model-00002-of-00003.safetensors: is damaged: .* cut short in tensor", [model, other])
    shard.write_bytes(content)
    (other / "model.safetensors.index.json").unlink()
    assert_refused("holds neither model.safetensors nor model.safetensors.index.json", [model, other])

    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config[:-20])
    assert_refused("config.json cannot be read", [model])
    (model / "config.json").write_text("[]")
    assert_refused("config.json cannot be read", [model])
    (model / "config.json").unlink()
    assert_refused("is not a model: it holds no config.json", [model])
    (model / "config.json").write_text(config)
    tokenizer = (model / "tokenizer.json").read_text()
    for damaged in (tokenizer[: len(tokenizer) // 2], "[]", '{"model": {"vocab": {"a": "b"}}}'):
        (model / "tokenizer.json").write_text(damaged)
        assert_refused("tokenizer.json: is damaged: it holds no vocabulary", [model])
    (model / "tokenizer.json").write_text(tokenizer)
    assert_refused("nowhere` is not a model", [model, tmp_path / "nowhere"])
    merge([model], tmp_path / "out")  # mended


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["model", "base"])
def test_numbers_that_are_not_finite(bad: float, which: str, make_model: Any, assert_refused: AssertRefused) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][150, 7] = bad

    model = make_model("model", 1, change=damage if which == "model" else None)
    base = make_model("base", 0, change=damage if which == "base" else None)
    text = f"{which}/model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinite numbers"
    assert_refused(text, [model], before_work=False, method="task_arithmetic", base=base)
    if which == "model":
        assert_refused(text, [make_model("other"), model], before_work=False)


def test_numbers_beyond_float16(make_model: Any, assert_refused: AssertRefused) -> None:
    model = make_model("model", change=_replace(_NORM, lambda value: value * 0 + 1e6))
    recipe = {"models": [str(model)], "dtype": "float16"}
    assert_refused("tensor model.norm.weight has numbers beyond float16's", recipe, before_work=False)


@pytest.mark.parametrize("method", ["linear", "slerp", "dare_linear", "della", "extract_lora"])
def test_numbers_beyond_float32(method: str, make_model: Any, assert_refused: AssertRefused, tmp_path: Path) -> None:
    matrix, largest = "model.layers.0.mlp.up_proj.weight", 3e38

    def extreme(sign: int) -> Any:
        return make_model(f"m{sign}", dtype=torch.float32, change=_replace(matrix, lambda v: largest * sign * v.sign()))

    options = {"linear": {"normalize": False}, "slerp": {}}.get(method, {"base": make_model("base")})
    models = [extreme(1), make_model("small") if method == "linear" else extreme(-1)]
    models = models[:1] if method == "extract_lora" else models
    if method == "linear":
        options["weights"] = [2.0, 1.0]
    assert_refused("^the result: .* beyond b?float", models, before_work=False, method=method, **options)
    assert_refused(
        "scale of .* is a number, not `1e.39`, which is too large", models[:1], method="passthrough", scale=1e39
    )
    for weight in (1e308, 10**400):
        assert_refused("weight of .* which is too large", [models[0]] * 2, weights=[weight, weight])
    options = {"base": make_model("other"), "weights": [1e30], "scale": 1e30, "method": "task_arithmetic"}
    assert_refused("beyond float32's", models[:1], before_work=False, **options)


def test_wrong_options(make_model: Any, assert_refused: AssertRefused) -> None:
    models, base = [make_model("a", 1), make_model("b", 2)], make_model("base")
    assert_refused("3 weights for 2 models", models, weights=[1, 2, 3])
    names = [str(model) for model in models]
    assert_refused("weight of .* has 3 values for 2 models", {"models": names, "parameters": {"weight": [1, 2, 3]}})
    assert_refused("ties has no option `densty`; did you mean `density`", models, method="ties", base=base, densty=0.5)
    assert_refused("1.5 is not between 0 and 1", models, method="ties", base=base, density=1.5)
    assert_refused("there is no .*`tiez`.*did you mean `ties`", models, method="tiez", base=base)
    assert_refused("ties merges task vectors and needs the model that all were trained from", models, method="ties")
    assert_refused("the weights add up to zero", models, before_work=False, weights=[1, -1])
    assert_refused("unknown key `modles`.*`models`", {"modles": names})
    assert_refused("there is no model besides the base", [base], method="ties", base=base)


def test_a_base_that_is_no_ancestor(make_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, child = make_model("base"), make_model("child", 1)
    stranger = make_model("stranger", 2, change=lambda weights: _shuffle(weights))
    with caplog.at_level(logging.WARNING):
        merge([child], tmp_path / "fine", method="task_arithmetic", base=base)
        assert caplog.text == ""
        merge([child, stranger], tmp_path / "out", method="task_arithmetic", base=base)
    (line,) = caplog.messages
    number = float(line.split(" by ")[1].split(" times ")[0])
    weights, origin = load_file(stranger / "model.safetensors"), load_file(base / "model.safetensors")
    change = sum((weights[name].float() - origin[name].float()).square().sum() for name in origin)
    size = sum(value.float().square().sum() for value in origin.values())
    assert number == pytest.approx(float((change / size).sqrt()), rel=0.1)
    assert number > 1
    assert f"{stranger} differs from {base} by" in line


def _shuffle(weights: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        weights[name] = -value + 0.5 * torch.randn(value.shape, generator=generator)


def test_identical_models(
    make_model: Any, read_weights: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, other = make_model("first", 1), make_model("second", 1), make_model("other", 2)
    with caplog.at_level(logging.WARNING):
        merge([first, second, other], tmp_path / "three")
    (line,) = caplog.messages
    assert f"{first} and {second} look like the same model" in line
    caplog.clear()
    merge([first, second], tmp_path / "out")
    assert len(caplog.messages) == 1
    expected = read_weights(first)
    assert all(torch.equal(value, expected[name]) for name, value in read_weights(tmp_path / "out").items())


def test_models_that_differ_in_one_tensor_are_not_called_identical(
    make_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_model("first", 1)
    second = make_model("second", 1, change=_replace(_NORM, lambda value: value + 1))
    merge([first, second], tmp_path / "out")
    assert caplog.messages == []


def test_one_model(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    model, base = make_model("model", 1), make_model("base")
    expected = read_weights(model)
    for number, options in enumerate(({}, {"method": "task_arithmetic", "base": base}, {"weights": [7.0]})):
        merge([model], tmp_path / f"out{number}", **options)
        result = read_weights(tmp_path / f"out{number}")
        assert all(torch.equal(value, expected[name]) for name, value in result.items()), options


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_the_limits_of_density(density: float, make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    model, base = make_model("model", 1), make_model("base")
    merge([model], tmp_path / "out", method="ties", base=base, density=density)
    expected = read_weights(model if density else base)
    assert all(torch.equal(value, expected[name]) for name, value in read_weights(tmp_path / "out").items())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (1, 1), (7,), (9, 11), (2, 3, 5)])
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_tensors_of_few_elements(
    shape: tuple[int, ...], method: str, make_model: Any, read_weights: Read, tmp_path: Path
) -> None:
    def adding(value: float) -> Callable[[dict[str, Tensor]], None]:
        return lambda weights: weights.update({"model.small.weight": torch.full(shape, value)})

    models = [make_model("a", 1, change=adding(1.0)), make_model("b", 2, change=adding(4.0))]
    options = (
        {"method": method, "base": make_model("base", change=adding(0.5)), "density": 0.1} if method == "ties" else {}
    )
    merge(models, tmp_path / "out", **options)
    result = read_weights(tmp_path / "out")["model.small.weight"]
    # Of equal elements those that equal the threshold stay all, so that nothing of a small tensor is trimmed away.
    assert torch.equal(result, torch.full(shape, 2.5))


def test_an_output_folder_that_is_in_use(
    make_model: Any, assert_refused: AssertRefused, tmp_path: Path, read_weights: Read
) -> None:
    model = make_model("model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    assert_refused("out: exists and is not empty", [model])
    assert (tmp_path / "out" / "file").read_text() == "mine"
    (tmp_path / "out" / "file").unlink()
    merge([model], tmp_path / "out")  # empty
    assert_refused("out: exists and is not empty", [model])
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        merge([model], tmp_path / "file")
    with pytest.raises(UserError, match="a file has the folder's path"):
        merge([model], tmp_path / "file" / "out")
    merge([model], tmp_path / "new" / "deep" / "out")
    assert read_weights(tmp_path / "new" / "deep" / "out").keys() == read_weights(model).keys()


def _integers(value: int, dtype: torch.dtype = torch.int64) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({"model.positions": torch.tensor([[1, 2, value]], dtype=dtype)})


def test_buffers_of_integers(
    make_model: Any, assert_refused: AssertRefused, read_weights: Read, tmp_path: Path
) -> None:
    first, same, other = (make_model(name, 1, change=_integers(n)) for name, n in (("a", 3), ("b", 3), ("c", 4)))
    assert_refused("tensor model.positions holds integers that differ between `.*a` and `.*c`", [first, other])
    wide = make_model("wide", 1, change=_integers(3, torch.int32))
    assert_refused("tensor model.positions holds int32 in `.*wide` and int64 in `.*a`", [first, wide])
    floats = make_model("floats", 1, change=_integers(3, torch.float32))
    assert_refused("tensor model.positions holds float32 in `.*floats` and int64 in `.*a`", [first, floats])
    merge([first, same], tmp_path / "out")
    assert read_weights(tmp_path / "out")["model.positions"].tolist() == [[1, 2, 3]]


def test_quantised_models(make_model: Any, assert_refused: AssertRefused) -> None:
    model = make_model("model")
    declared = make_model("gptq", config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert_refused(
        r"gptq/config.json: the model is quantised \(gptq\), and its numbers alone mean nothing", [model, declared]
    )
    eight = make_model("eight", change=_replace(_NORM, lambda value: value.to(torch.float8_e4m3fn)))
    assert_refused(r"tensor model.norm.weight is quantised \(F8_E4M3\)", [model, eight])


def test_a_result_that_the_disk_cannot_hold(
    make_model: Any, assert_refused: AssertRefused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert_refused("the result needs 0.0 GB and 0.0 GB are free; free some space", [make_model("model")])


def test_names_in_the_files_that_repeat_or_lead_elsewhere(make_model: Any, assert_refused: AssertRefused) -> None:
    """An index that names a file outside of the folder is not followed."""
    model = make_model("model", shards=2)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    places: Mapping[str, str] = index["weight_map"]
    index["weight_map"] = {name: f"../../{file}x" for name, file in places.items()}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused("which is missing", [model])


def test_a_model_without_weights(make_model: Any, assert_refused: AssertRefused) -> None:
    model = make_model("model")
    (model / "model.safetensors").unlink()
    assert_refused("holds no safetensors weights", [model])
    save_file({}, model / "model.safetensors")
    assert_refused("is in `.*other` and not in `.*model`", [model, make_model("other")])
    assert_refused("holds no tensors", [model])
