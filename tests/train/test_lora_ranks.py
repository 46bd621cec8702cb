"""Ranks by module: the sizes of the factors, their scale, what is merged, and patterns that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter, merge_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.memory.estimate import MicroBatch, estimate_memory
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.trainings.settings import apply_settings

Fresh = Callable[..., LanguageModel]
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
RANKS = {"layers.0.*": 0, "mlp.(up|gate)_proj": 3, ".*_proj": 8}
EXPECTED = {"q_proj": 8, "k_proj": 8, "v_proj": 8, "o_proj": 8, "up_proj": 3, "gate_proj": 3, "down_proj": 8}


def lora(**options: object) -> LoraConfig:
    return LoraConfig.read({"rank": 4, "alpha": 16, **options}, "train.lora")


@torch.no_grad()
def drawn(lm: LanguageModel) -> LanguageModel:
    """The model with random second factors, which a fresh adapter has as zeros."""
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            weight.normal_(0, 0.05)
    return lm


def test_each_module_has_the_rank_of_its_first_pattern(fresh: Fresh) -> None:
    lm = add_adapter(fresh(), lora(ranks=RANKS))
    shapes = {name: len(weight) for name, weight in lm.model.named_parameters() if "lora_A" in name}
    assert {name.split(".")[6]: rank for name, rank in shapes.items()} == EXPECTED
    assert len(shapes) == 7
    assert all(".layers.1." in name for name in shapes)


def test_the_merged_weights_have_one_scale_for_all_ranks(fresh: Fresh, tmp_path: Path) -> None:
    from peft import PeftModel

    lm = drawn(add_adapter(fresh(), lora(ranks=RANKS)))
    factors = {
        name.split(".lora_A")[0].removeprefix("base_model.model."): (
            weight.detach().clone(),
            lm.model.get_parameter(name.replace("lora_A", "lora_B")).detach().clone(),
        )
        for name, weight in lm.model.named_parameters()
        if "lora_A" in name
    }
    with torch.no_grad():
        adapted = lm.model.eval()(input_ids=IDS).logits
    merged = merge_adapter(lm, tmp_path / "adapter", "float32").model
    before = dict(fresh().model.named_parameters())
    for name, weight in merged.named_parameters():
        update = torch.zeros(())
        if (module := name.removesuffix(".weight")) in factors:
            down, up = factors[module]
            update = 16 / 4 * (up.double() @ down.double())  # alpha / rank of the rest, whatever the module's own
        torch.testing.assert_close(weight.double(), before[name].double() + update, atol=1e-5, rtol=1e-5)
    loaded = PeftModel.from_pretrained(fresh().model, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, adapted, atol=1e-5, rtol=1e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["exclude_modules"] == sorted(settings["exclude_modules"])
    assert set(settings["rank_pattern"]) == set(factors)


@pytest.mark.parametrize("options", [{"ranks": {}}, {"ranks": {".*": 4}}])
def test_ranks_like_the_rest_change_nothing(fresh: Fresh, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    plain = add_adapter(fresh(), lora())
    torch.manual_seed(0)
    same = add_adapter(fresh(), lora(**options))
    pairs = zip(plain.model.named_parameters(), same.model.named_parameters(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"nothing": 4}, "`nothing` matches no adapted module"),
        ({"nothing": 0}, "matches no module"),
        ({".*_proj": 4, "q_proj": 8}, "`q_proj` matches no adapted module that is not an earlier"),
        ({"norm": 4}, "`norm` matches no adapted module"),
        ({".*": 0}, "excluded"),
    ],
)
def test_patterns_without_effect(fresh: Fresh, ranks: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        add_adapter(fresh(), lora(ranks=ranks))
    assert raised.value.where == "train.lora.ranks"


@pytest.mark.parametrize(("ranks", "message"), [({"(": 4}, "is not a regular expression"), ({"q_proj": -1}, "0")])
def test_ranks_that_cannot_be_read(ranks: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lora(ranks=ranks)


def test_a_space_sets_ranks_by_patterns_with_dots() -> None:
    base = {"train": {"lora": {"ranks": {"mlp.*": 2}}}}
    settings = {"train.lora.ranks.layers.0.*": 0, "train.lora.ranks.q_proj": 8, "train.lora.rank": 4}
    changed = apply_settings(base, settings)["train"]["lora"]
    assert changed == {"ranks": {"mlp.*": 2, "layers.0.*": 0, "q_proj": 8}, "rank": 4}


@pytest.mark.slow
def test_memory_is_that_of_the_ranks(fresh: Fresh) -> None:
    batch = MicroBatch(tokens=64, supervised=8, longest=32)

    def estimate(**options: object) -> tuple[int, int]:
        config = TrainConfig(method="lora", precision="float32", lora=lora(**options))
        parts = estimate_memory(ModelSpec.from_config(fresh().model.config, config), config, batch).parts
        return parts["gradient sums"], parts["activations"]

    plain, wider = estimate(), estimate(ranks={"layers.1.*": 12})
    # The second of two layers alike has three times the rank: half of all gradients, times three.
    assert wider[0] == plain[0] // 2 * 4
    # Both layers are estimated as the one that keeps most: seven adapters with 8 more numbers of 4 bytes per token.
    assert wider[1] == plain[1] + 2 * 64 * 7 * 8 * 4
    assert estimate(ranks={"layers.0.*": 0})[1] == plain[1]
    lm = add_adapter(fresh(), lora(ranks=RANKS))
    trained = sum(weight.numel() for weight in lm.model.parameters() if weight.requires_grad)
    assert estimate(ranks=RANKS)[0] == 4 * trained


@pytest.mark.parametrize(("pattern", "rank"), [("nothing", 4), ("nothing", 0)])
def test_a_pattern_without_module_ends_a_training_before_any_work(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: pa.Table, pattern: str, rank: int
) -> None:
    monkeypatch.setattr("posttrain.train.stage.read_training_set", lambda *arguments: pytest.fail("it reads records"))
    train = {"method": "lora", "lora": {"ranks": {pattern: rank}}}
    config = TrainJobConfig.read({"model": str(tiny_model), "data": "memory", "train": train}, "config")
    with pytest.raises(UserError, match="`nothing`") as raised:
        train_standalone(tmp_path / "out", config, records, tiny_model)
    assert raised.value.where == "train.lora.ranks"
    assert not (tmp_path / "out").exists()
