"""The probe's activations against the bytes that autograd saves for whole models."""

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, pack
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.memory.estimate import MicroBatch, estimate_memory
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.objectives.config import DpoConfig
from posttrain.train.regularization import layers

pytestmark = pytest.mark.slow

LENGTHS = (60, 60, 60)

Row = Callable[..., Packed]
Model = Callable[..., LanguageModel]
KeptBytes = Callable[..., int]


def activations(lm: LanguageModel, config: TrainConfig, packed: Packed) -> int:
    batch = MicroBatch.largest([packed])
    return estimate_memory(ModelSpec.from_model(lm.model), config, batch).parts["activations"]


def test_activations_of_the_whole_model(
    train_config: TrainConfig, model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    packed, lm = row(LENGTHS, 300), model("llama", train_config, 4)
    # The masks of the first layer's dropout are not kept, as its input needs no gradient.
    exact = 0.04 if train_config.lora.dropout else 0.02
    assert activations(lm, train_config, packed) == pytest.approx(kept_bytes(lm, packed, train_config), rel=exact)


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "autocast"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_wider_model_is_measured_by_a_narrower_one(
    precision: Any, method: Any, model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig(precision=precision, method=method)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    packed, lm = row(LENGTHS, 300), model("llama", config, 3, **sizes)
    assert activations(lm, config, packed) == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("rank", [1, 5, 64])
def test_any_rank_of_an_adapter_follows_from_two(
    rank: int, width: int, model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig.read({"precision": "bfloat16", "method": "lora", "lora": {"rank": rank}}, "train")
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 16, "num_key_value_heads": 4}
    packed, lm = row(LENGTHS, 300), model("llama", config, 3, **sizes)
    assert activations(lm, config, packed) == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("llama", {"tie_word_embeddings": False}),
        (
            "gpt2",
            {
                "n_inner": 160,
                "n_embd": 64,
                "n_layer": 4,
                "n_head": 4,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
    ],
)
def test_activations_of_other_families(
    kind: str, settings: dict[str, Any], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig(precision="bfloat16")
    packed, lm = row(LENGTHS, 300), model(kind, config, 4, **settings)
    assert activations(lm, config, packed) == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize(
    ("lengths", "noise"),
    [
        ((130, 130, 130), {}),  # longer sequences keep no scores
        (LENGTHS, {"dropout": 0.1}),
        (LENGTHS, {"neftune": 5.0}),
    ],
)
def test_activations_with_attention_scores_and_noise(
    lengths: tuple[int, ...], noise: dict[str, Any], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    config = TrainConfig.read({"precision": "bfloat16", "noise": noise}, "train")
    packed, lm = row(lengths, 300), model("llama", config, 4)
    with layers.apply_noise(lm, config.noise):
        assert activations(lm, config, packed) == pytest.approx(kept_bytes(lm, packed, config), rel=0.02)


@pytest.mark.parametrize("ranks", [{"layers.2.*": 16}, {"q_proj": 8, "(up|down)_proj": 0}])
def test_no_rank_keeps_more_than_is_estimated(
    ranks: dict[str, int], model: Model, row: Row, kept_bytes: KeptBytes
) -> None:
    train = {"method": "lora", "precision": "bfloat16", "lora": {"rank": 4, "ranks": ranks}}
    config, packed = TrainConfig.read(train, "train"), row(LENGTHS, 300)
    lm = model("llama", config, 4)
    kept = kept_bytes(lm, packed, config)
    assert 0.99 * kept <= activations(lm, config, packed) < 2 * kept


def test_shared_prefixes_are_counted_once(model: Model, kept_bytes: KeptBytes) -> None:
    config = TrainConfig(precision="bfloat16")
    sequences = [TokenizedExample([5] * 40 + [9 + at] * (8 + at), [False] * 40 + [True] * (8 + at)) for at in range(12)]
    packed = pack([[sequence] for sequence in sequences])
    assert MicroBatch.largest([packed]).tokens < sum(len(item.ids) for item in sequences) / 2
    lm = model("llama", config, 4)
    assert activations(lm, config, packed) == pytest.approx(kept_bytes(lm, packed, config), rel=0.4)


def test_a_family_without_a_causal_model_is_refused(model: Model, row: Row) -> None:
    from transformers import T5Config

    config = TrainConfig(precision="bfloat16")
    lm = model("llama", config)
    spec = ModelSpec.from_model(lm.model)
    other = ModelSpec(spec.shape, spec.weights, T5Config(d_model=64, num_heads=4))
    with pytest.raises(UserError):
        estimate_memory(other, config, MicroBatch.largest([row(LENGTHS, 300)]))


def test_a_full_micro_batch_is_the_largest(row: Row) -> None:
    config = TrainConfig(precision="bfloat16", max_length=64, batch_size=4)
    assert MicroBatch.full(128, config) == MicroBatch(tokens=128, supervised=128, longest=64)
    assert MicroBatch.full(100_000, config).tokens == 4 * 64
    assert MicroBatch.full(8, config).tokens == 64  # a sequence is not cut in two
    assert MicroBatch.full(8, config, longest=20).tokens == 20
    assert MicroBatch.full(256, config.model_copy(update={"objective": DpoConfig()})).tokens == 256
    assert MicroBatch.full(8, config.model_copy(update={"objective": DpoConfig()})).tokens == 128
    short, long = row((40, 40), 300), row((70,), 300)
    assert MicroBatch.largest([short]) == MicroBatch(tokens=78, supervised=20, longest=39)
    assert MicroBatch.largest([short, long]) == MicroBatch(tokens=78, supervised=20, longest=69)
