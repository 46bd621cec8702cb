"""The formulas of activations against the bytes that autograd saves."""

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.shape import model_shape
from posttrain.train.config import TrainConfig
from posttrain.train.memory.activations import layer_costs
from posttrain.train.memory.estimate import estimate_memory
from posttrain.train.memory.micro_batch import MicroBatch, elementwise_max
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.objectives.config import DpoConfig
from posttrain.train.regularization import layers
from posttrain.train.regularization.config import NoiseConfig

pytestmark = pytest.mark.slow

LENGTHS = (60, 58, 33, 31)

Row = Callable[..., Packed]
Model = Callable[..., LanguageModel]
KeptBytes = Callable[..., int]


def check_layer_costs(
    train_config: TrainConfig, kind: str, settings: dict[str, Any], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    packed = row(LENGTHS, 300)
    batch = MicroBatch.from_packed(packed)
    two_layers, three_layers = (model(kind, train_config, layers, **settings) for layers in (2, 3))
    costs = layer_costs(ModelSpec.from_model(two_layers.model), train_config, batch)
    weights = 0
    if train_config.precision == "autocast":  # bfloat16 copies, which the estimate counts for all layers together
        per_layer = [w for w in ModelSpec.from_model(three_layers.model).weights if w.depth == 2 and len(w.shape) == 2]
        weights = sum(2 * weight.count for weight in per_layer)
    measured = kept_bytes(three_layers, packed, train_config) - kept_bytes(two_layers, packed, train_config)
    assert measured == costs.whole.stored + weights


def test_layer_costs_are_exact(train_config: TrainConfig, model: Model, row: Row, kept_bytes: KeptBytes) -> None:
    check_layer_costs(train_config, "llama", {}, model, row, kept_bytes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(
    "ranks",
    [
        {"layers.2.*": 16},
        {"q_proj": 8, "(up|down)_proj": 0},
        {"layers.2.self_attn.*": 0, "layers.2.mlp.*": 2},
        {"layers.[02].*": 0},
        {"layers.1.self_attn.*": 24, "layers.2.mlp.gate_proj": 24},
    ],
)
def test_ranks_by_module_keep_at_most_what_is_estimated(
    precision: Any, ranks: dict[str, int], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig.read({"method": "lora", "precision": precision, "lora": {"rank": 4, "ranks": ranks}}, "train")
    packed = row(LENGTHS, 300)
    lm = model("llama", config, 4)
    result = estimate_memory(ModelSpec.from_model(lm.model), config, MicroBatch.from_packed(packed))
    kept = kept_bytes(lm, packed, config)
    assert kept <= 1.01 * result.activations
    assert result.activations < 2 * kept


@pytest.mark.parametrize(
    ("kind", "settings"), [("qwen2", {}), ("qwen3", {"head_dim": 32}), ("llama", {"tie_word_embeddings": False})]
)
def test_layer_costs_of_other_families_are_exact(
    kind: str, settings: dict[str, Any], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    check_layer_costs(TrainConfig(precision="bfloat16"), kind, settings, model, row, kept_bytes)


def test_activations_of_the_whole_model(
    train_config: TrainConfig, model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    packed = row(LENGTHS, 300)
    lm = model("llama", train_config, 4)
    result = estimate_memory(ModelSpec.from_model(lm.model), train_config, MicroBatch.from_packed(packed))
    # The masks of the first layer's dropout are not kept, as its input needs no gradient.
    assert result.activations == pytest.approx(
        kept_bytes(lm, packed, train_config), rel=0.04 if train_config.lora.dropout else 0.01
    )


@pytest.mark.parametrize(
    ("lengths", "noise"),
    [
        ((130, 128, 121), {}),  # longer sequences keep no scores
        (LENGTHS, {"dropout": {"attention": 0.1}}),
        (LENGTHS, {"neftune": 5.0}),
    ],
)
def test_activations_with_attention_scores_and_noise(
    lengths: tuple[int, ...], noise: dict[str, Any], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig.read({"precision": "bfloat16", "noise": noise}, "train")
    packed = row(lengths, 300)
    lm = model("llama", config, 4)
    result = estimate_memory(ModelSpec.from_model(lm.model), config, MicroBatch.from_packed(packed))
    with layers.apply_noise(lm, config.noise):
        assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_perturbed_embeddings_are_counted(method: Any, model: Model, row: Row) -> None:
    """The perturbations are kept in float32, and so is what their gradients need."""
    plain_config = TrainConfig(precision="bfloat16", method=method)
    perturbed_config = plain_config.model_copy(
        update={"noise": NoiseConfig.read({"adversarial": {"method": "fgm"}}, "noise")}
    )
    spec = ModelSpec.from_model(model("llama", plain_config, 4).model)
    batch = MicroBatch.from_packed(row(LENGTHS, 300))
    perturbed, unperturbed = (
        estimate_memory(spec, config, batch).activations for config in (perturbed_config, plain_config)
    )
    first_norm = batch.tokens * (4 * 64 + 4) if method == "lora" else 0
    assert perturbed == unperturbed + batch.tokens * 4 * 64 + first_norm


def test_other_families_are_approximate(model: Model, row: Row, kept_bytes: KeptBytes) -> None:
    config = TrainConfig(precision="bfloat16")
    packed = row(LENGTHS, 300)
    settings = {"n_embd": 64, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    lm = model("gpt2", config, 4, activation_function="gelu", **settings)
    assert not model_shape(lm.model).gated
    result = estimate_memory(ModelSpec.from_model(lm.model), config, MicroBatch.from_packed(packed))
    assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.1)


def test_shared_prefixes_are_counted_once(model: Model, kept_bytes: KeptBytes) -> None:
    from posttrain.models.chat import TokenizedExample
    from posttrain.models.packing import pack

    config = TrainConfig(precision="bfloat16")
    sequences = [TokenizedExample([5] * 40 + [9 + at] * (8 + at), [False] * 40 + [True] * (8 + at)) for at in range(12)]
    packed = pack([[sequence] for sequence in sequences])
    batch = MicroBatch.from_packed(packed)
    assert batch.tokens < sum(len(item.ids) for item in sequences) / 3
    assert batch.queries > batch.tokens  # sequences side by side are padded
    assert batch.keys >= 12 * 39  # each copies the shared prefix without its last token
    lm = model("llama", config, 4)
    result = estimate_memory(ModelSpec.from_model(lm.model), config, batch)
    assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.05)


def test_a_full_micro_batch_is_the_largest(row: Row) -> None:
    config = TrainConfig(precision="bfloat16", max_length=64, batch_size=4)
    full = MicroBatch.full(128, config)
    assert (full.tokens, full.supervised) == (128, 128)
    assert full.pairs == 128 * 65 // 2
    assert MicroBatch.full(100_000, config).tokens == 4 * 64
    assert MicroBatch.full(8, config).tokens == 64  # a sequence is not cut in two
    assert MicroBatch.full(8, config, longest=20).tokens == 20
    assert MicroBatch.full(256, config.model_copy(update={"objective": DpoConfig()})).tokens == 256
    assert MicroBatch.full(8, config.model_copy(update={"objective": DpoConfig()})).tokens == 128
    real = MicroBatch.from_packed(row((40, 40), 300))
    attention = {"scores": 2 * 39 * 39, "longest": 39}
    assert real == MicroBatch(tokens=78, supervised=20, pairs=2 * 39 * 40 // 2, queries=78, keys=78, **attention)
    batches = [MicroBatch(1, 5, 1, 1, 0, 2, 9), MicroBatch(4, 2, 3, 4, 7, 5, 8)]
    assert elementwise_max(batches) == MicroBatch(4, 5, 3, 4, 7, 5, 9)
