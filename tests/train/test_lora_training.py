import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter, merge_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[StepValues]]
LORA = LoraConfig(rank=4, alpha=16)
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, dtype: str, fit: Fit
) -> None:
    torch.manual_seed(0)
    base = fresh(dtype)
    lm = add_adapter(fresh(dtype), LORA)
    assert torch.equal(logits(lm.model), logits(base.model)), "a fresh adapter changes nothing"
    before = {name: weight.detach().clone() for name, weight in lm.model.named_parameters()}
    trainable = {name for name, weight in lm.model.named_parameters() if weight.requires_grad}
    assert trainable == {name for name in before if "lora_" in name}
    assert {before[name].dtype for name in trainable} == {torch.float32}
    steps = fit(lm, examples, config.model_copy(update={"learning_rate": 1e-2}), 0, tmp_path)
    changed = {name for name, weight in lm.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == trainable
    assert steps[-1].loss < steps[0].loss


def test_add_adapter_raises_no_warning(fresh: Fresh) -> None:
    with warnings.catch_warnings(record=True) as warnings_raised:
        warnings.simplefilter("always")
        add_adapter(fresh(), LORA)
    assert [str(item.message) for item in warnings_raised] == []


def test_the_merged_model_computes_as_with_the_adapter(
    fresh: Fresh, tiny_model: Path, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, fit: Fit
) -> None:
    from peft import PeftModel

    torch.manual_seed(0)
    lm = add_adapter(fresh(), LORA)
    fit(lm, examples, config.model_copy(update={"learning_rate": 1e-2}), 0, tmp_path / "scratch")
    adapted_logits = logits(lm.model)
    merged = merge_adapter(lm, tmp_path / "adapter")
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    torch.testing.assert_close(logits(merged.model), adapted_logits, atol=1e-5, rtol=1e-5)
    assert (adapted_logits - logits(fresh().model)).abs().max() > 0.1
    # peft reads the saved adapter.
    loaded = PeftModel.from_pretrained(fresh().model, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), adapted_logits, atol=1e-5, rtol=1e-5)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7  # two matrices for each of seven linear layers in each of two blocks
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert str(tiny_model) not in (tmp_path / "adapter" / "adapter_config.json").read_text()


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_an_adapter_on_one_end_of_a_tied_model_is_saved_as_it_was_trained(
    fresh: Fresh, tmp_path: Path, targets: list[str]
) -> None:
    lm = add_adapter(fresh(), LoraConfig(rank=4, targets=targets))
    with torch.no_grad():
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    expected = logits(lm.model)
    save_language_model(merge_adapter(lm, tmp_path / "adapter", "float32"), tmp_path / "model", "float32")
    loaded = load_language_model(tmp_path / "model", TaskConfig(), "float32")
    torch.testing.assert_close(logits(loaded.model), expected, atol=1e-5, rtol=1e-5)


def test_merging_rounds_once(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, fit: Fit
) -> None:
    torch.manual_seed(0)
    lm = add_adapter(fresh("bfloat16"), LORA)
    fit(lm, examples, config.model_copy(update={"learning_rate": 1e-2}), 0, tmp_path / "scratch")
    layer = lm.model.base_model.model.model.layers[1].mlp.up_proj
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (layer.base_layer.weight.double() + 16 / 4 * up.double() @ down.double()).float()
    exact = merge_adapter(copy.deepcopy(lm), tmp_path / "adapter", "float32").model.model.layers[1].mlp.up_proj.weight
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact, expected, atol=1e-6, rtol=1e-6)
    merged = merge_adapter(lm, tmp_path / "adapter").model
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}
    assert torch.equal(merged.model.layers[1].mlp.up_proj.weight, exact.bfloat16())


def test_merging_holds_one_layer_in_float32_at_a_time(fresh: Fresh, tmp_path: Path) -> None:
    from peft.tuners.lora import LoraLayer

    lm = add_adapter(fresh("bfloat16"), LORA)
    layers = [layer for layer in lm.model.modules() if isinstance(layer, LoraLayer)]
    in_float32: list[int] = []

    def count(merge: Callable[[], None]) -> Callable[[], None]:
        def counting() -> None:
            in_float32.append(sum(layer.get_base_layer().weight.dtype == torch.float32 for layer in layers))
            merge()

        return counting

    for layer in layers:
        layer.merge = count(layer.merge)
    memory = {layer.get_base_layer().weight.data_ptr() for layer in layers}
    merge_adapter(lm, tmp_path / "adapter")
    assert in_float32 == [1] * len(layers) == [1] * 14
    assert {layer.get_base_layer().weight.data_ptr() for layer in layers} == memory


def test_a_lora_training_saves_a_merged_model_and_its_adapter(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    from peft import PeftModel

    config = config.model_copy(update={"method": "lora", "lora": LORA, "learning_rate": 1e-2})
    meta = train(tiny_model, records, config, TaskConfig(), seed=1, out=tmp_path / "out", scratch=tmp_path / "s")
    assert meta["last_loss"] < meta["first_loss"]
    merged = load_language_model(tmp_path / "out", TaskConfig(), "float32")
    base = load_language_model(tiny_model, TaskConfig(), "float32")
    with_adapter = PeftModel.from_pretrained(base.model, tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(merged.model), logits(with_adapter), atol=0.1, rtol=0.05)  # saved in bfloat16
    settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 16, 0.0)
    assert settings["target_modules"] == sorted(settings["target_modules"])


def test_only_named_targets_get_adapters(fresh: Fresh) -> None:
    lm = add_adapter(fresh(), LoraConfig(targets=["q_proj", "v_proj"]))
    targets = {name.split(".lora_")[0].split(".")[-1] for name, w in lm.model.named_parameters() if w.requires_grad}
    assert targets == {"q_proj", "v_proj"}


def test_unknown_targets_are_refused(fresh: Fresh) -> None:
    with pytest.raises(UserError, match="no_such_layer") as caught:
        add_adapter(fresh(), LoraConfig(targets=["no_such_layer"]))
    assert caught.value.where == "train.lora.targets"
    assert "\n" not in str(caught.value)


def test_the_adapter_depends_on_the_seed(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"method": "lora", "lora": LORA, "epochs": 1})
    trainings = [
        (train(tiny_model, records, config, TaskConfig(), seed=seed, out=out, scratch=tmp_path / f"s{run}"), out)
        for run, seed in enumerate((1, 1, 2))
        for out in [tmp_path / f"out{run}"]
    ]
    adapters = [(out / "adapter" / "adapter_model.safetensors").read_bytes() for _, out in trainings]
    assert adapters[0] == adapters[1] != adapters[2]
