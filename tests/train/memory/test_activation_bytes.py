"""The formulas of activations against what autograd keeps."""

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
from posttrain.train.regularization import dropout
from posttrain.train.regularization.config import NoiseConfig

pytestmark = pytest.mark.slow

LENGTHS = (60, 58, 33, 31)

Row = Callable[..., Packed]
Model = Callable[..., LanguageModel]
Kept = Callable[..., int]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 32}), ("llama", {"tie_word_embeddings": False})],
)
def test_a_layer_to_the_byte(
    trained: TrainConfig, kind: str, settings: dict[str, Any], model: Model, row: Row, kept_bytes: Kept
) -> None:
    packed = row(LENGTHS, 300)
    batch = MicroBatch.of(packed)
    two, three = (model(kind, trained, layers, **settings) for layers in (2, 3))
    costs = layer_costs(ModelSpec.of_model(two.model), trained, batch)
    weights = 0
    if trained.precision == "autocast":  # copies in bfloat16, of which the estimate counts all layers' together
        per_layer = [w for w in ModelSpec.of_model(three.model).weights if w.depth == 2 and len(w.shape) == 2]
        weights = sum(2 * weight.count for weight in per_layer)
    measured = kept_bytes(three, packed, trained) - kept_bytes(two, packed, trained)
    assert measured == costs.whole.kept + weights


def test_a_whole_model(trained: TrainConfig, model: Model, row: Row, kept_bytes: Kept) -> None:
    packed = row(LENGTHS, 300)
    lm = model("llama", trained, 4)
    result = estimate_memory(ModelSpec.of_model(lm.model), trained, MicroBatch.of(packed))
    # The masks of the first layer's dropout are not kept, as its input needs no gradient.
    assert result.activations == pytest.approx(
        kept_bytes(lm, packed, trained), rel=0.04 if trained.lora.dropout else 0.01
    )


@pytest.mark.parametrize(
    ("lengths", "noise"),
    [
        ((130, 128, 121), {}),  # longer sequences keep no scores
        (LENGTHS, {"dropout": {"attention": 0.1}}),
        (LENGTHS, {"neftune": 5.0}),
    ],
)
def test_attention_and_noise(
    lengths: tuple[int, ...], noise: dict[str, Any], model: Model, row: Row, kept_bytes: Kept
) -> None:
    config = TrainConfig.read({"noise": noise}, "train")
    packed = row(lengths, 300)
    lm = model("llama", config, 4)
    result = estimate_memory(ModelSpec.of_model(lm.model), config, MicroBatch.of(packed))
    with dropout.apply_noise(lm, config.noise):
        assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_perturbed_embeddings(method: Any, model: Model, row: Row) -> None:
    """The perturbations are kept in float32, and with them what leads back to them."""
    plain = TrainConfig(method=method)
    attacked = plain.model_copy(update={"noise": NoiseConfig.read({"adversarial": {"method": "fgm"}}, "noise")})
    blueprint = ModelSpec.of_model(model("llama", plain, 4).model)
    batch = MicroBatch.of(row(LENGTHS, 300))
    more, less = (estimate_memory(blueprint, config, batch).activations for config in (attacked, plain))
    first_norm = batch.tokens * (4 * 64 + 4) if method == "lora" else 0
    assert more == less + batch.tokens * 4 * 64 + first_norm


def test_other_families_are_near(model: Model, row: Row, kept_bytes: Kept) -> None:
    config = TrainConfig()
    packed = row(LENGTHS, 300)
    settings = {"n_embd": 64, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    lm = model("gpt2", config, 4, activation_function="gelu", **settings)
    assert not model_shape(lm.model).gated
    result = estimate_memory(ModelSpec.of_model(lm.model), config, MicroBatch.of(packed))
    assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.1)


def test_what_sequences_share_is_counted(model: Model, kept_bytes: Kept) -> None:
    from posttrain.models.chat import TokenizedExample
    from posttrain.models.packing import pack

    config = TrainConfig()
    sequences = [TokenizedExample([5] * 40 + [9 + at] * (8 + at), [False] * 40 + [True] * (8 + at)) for at in range(12)]
    packed = pack([[sequence] for sequence in sequences])
    batch = MicroBatch.of(packed)
    assert batch.tokens < sum(len(item.ids) for item in sequences) / 3
    assert batch.queries > batch.tokens  # sequences side by side are padded
    assert batch.keys >= 12 * 39  # each has a copy of what is shared, but for the last token, which each reads itself
    lm = model("llama", config, 4)
    result = estimate_memory(ModelSpec.of_model(lm.model), config, batch)
    assert result.activations == pytest.approx(kept_bytes(lm, packed, config), rel=0.05)


def test_a_full_micro_batch_is_the_largest(row: Row) -> None:
    config = TrainConfig(max_length=64, batch_size=4)
    full = MicroBatch.full(128, config)
    assert (full.tokens, full.supervised) == (128, 128)
    assert full.pairs == 128 * 65 // 2
    assert MicroBatch.full(100_000, config).tokens == 4 * 64
    assert MicroBatch.full(8, config).tokens == 64  # a sequence is not cut in two
    assert MicroBatch.full(8, config, longest=20).tokens == 20
    assert MicroBatch.full(256, config.model_copy(update={"objective": "dpo"})).tokens == 256
    assert MicroBatch.full(8, config.model_copy(update={"objective": "dpo"})).tokens == 128
    real = MicroBatch.of(row((40, 40), 300))
    whole = {"scores": 2 * 39 * 39, "longest": 39}
    assert real == MicroBatch(tokens=78, supervised=20, pairs=2 * 39 * 40 // 2, queries=78, keys=78, **whole)
    both = [MicroBatch(1, 5, 1, 1, 0, 2, 9), MicroBatch(4, 2, 3, 4, 7, 5, 8)]
    assert elementwise_max(both) == MicroBatch(4, 5, 3, 4, 7, 5, 9)
