"""The memory estimate, and the token budget that follows from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.memory import token_budget
from posttrain.train.memory.estimate import MicroBatch, count_step_tasks, estimate_memory
from posttrain.train.memory.token_budget import choose_budget, fits
from posttrain.train.memory.weights import ModelSpec
from posttrain.train.optim.config import OptimizerConfig

GIB = 2**30
CONFIG = TrainConfig(precision="bfloat16", checkpoint=CheckpointConfig(every_seconds=None))


@pytest.fixture(scope="module")
def smollm2() -> ModelSpec:
    """The shape of SmolLM2-135M."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return ModelSpec.from_config(config, CONFIG)


def test_the_parts_of_the_estimate_add_up(smollm2: ModelSpec) -> None:
    result = estimate_memory(smollm2, CONFIG, MicroBatch.full(4096, CONFIG), process=GIB)
    count = 134_515_008
    parts = result.parts
    assert [parts[name] for name in ("parameters", "float32 masters", "gradient sums")] == [
        2 * count,
        4 * count,
        4 * count,
    ]
    assert [parts[name] for name in ("optimiser state", "checkpoint copy")] == [8 * count, 0]
    assert GIB < parts["process"] < 1.1 * GIB  # libraries grow a little with their use
    assert result.total == sum(parts.values())
    # 22.3 kB a token and layer in bfloat16: 12 d + 4 (q + k) + 8 f.
    per_token = 12 * 576 + 4 * (576 + 192) + 8 * 1536
    assert parts["activations"] == pytest.approx(30 * 4096 * per_token, rel=0.02)


def test_settings_that_reduce_the_estimate(smollm2: ModelSpec) -> None:
    batch = MicroBatch.full(4096, CONFIG)

    def total(**changes: object) -> int:
        return estimate_memory(smollm2, CONFIG.model_copy(update=changes), batch).total

    assert total(recompute="full") < total(recompute="50%") < total(recompute="none")
    assert total(optimizer=OptimizerConfig(name="adafactor")) < total()
    assert total() < total(checkpoint=CheckpointConfig())
    for smaller_batch in (replace(batch, tokens=2048), replace(batch, supervised=1)):
        assert estimate_memory(smollm2, CONFIG, smaller_batch).total < estimate_memory(smollm2, CONFIG, batch).total


def test_full_recomputation_keeps_one_layer_and_the_layer_inputs(smollm2: ModelSpec) -> None:
    config = TrainConfig.read(
        {"precision": "bfloat16", "recompute": "full", "checkpoint": {"every_seconds": None}}, "x"
    )
    batch = MicroBatch.full(4096, config)
    without, recomputing = estimate_memory(smollm2, CONFIG, batch), estimate_memory(smollm2, config, batch)
    assert recomputing.parts["activations"] < without.parts["activations"] / 9
    assert recomputing.parts["working memory"] >= without.parts["activations"] / 30


def test_an_accelerator_moves_state_to_the_host(smollm2: ModelSpec) -> None:
    config = TrainConfig(precision="bfloat16")
    batch = MicroBatch.full(4096, config)
    cpu, cuda = (estimate_memory(smollm2, config, batch, device=device, process=GIB) for device in ("cpu", "cuda"))
    assert cpu.host == 0
    assert cuda.host == GIB + cpu.parts["checkpoint copy"]
    assert (cuda.parts["process"], cuda.parts["checkpoint copy"]) == (0, 0)
    offload_config = config.model_copy(update={"optimizer": OptimizerConfig(offload=True)})
    offloaded = estimate_memory(smollm2, offload_config, batch, device="cuda", process=GIB)
    states = ("float32 masters", "gradient sums", "optimiser state")
    assert [offloaded.parts[name] for name in states] == [0, 0, 0]
    assert offloaded.host == cuda.host + (8 + 8 + 2) * smollm2.count()
    assert estimate_memory(smollm2, offload_config, batch, process=GIB) == cpu  # a CPU has nowhere to offload to


def test_the_largest_budget_that_fits(smollm2: ModelSpec) -> None:
    choices = {room: choose_budget(smollm2, CONFIG, room * GIB) for room in (1, 4, 5, 6, 60)}
    assert not choices[1].fits
    assert all(choices[room].fits for room in (4, 5, 6, 60))
    budgets = [result.tokens for result in choices.values()]
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (256, 4096)
    assert all(tokens & (tokens - 1) == 0 for tokens in budgets)
    for room, result in choices.items():
        if result.tokens < 4096 and result.fits:
            doubled = estimate_memory(smollm2, CONFIG, MicroBatch.full(2 * result.tokens, CONFIG))
            assert not fits(doubled, room * GIB)
    assert choose_budget(smollm2, CONFIG, None).tokens == 4096
    assert choose_budget(smollm2, CONFIG, None, device="cuda").tokens == 32768


def test_the_longest_sequence_sets_the_minimum(smollm2: ModelSpec) -> None:
    config = CONFIG.model_copy(update={"max_length": 8192})
    short, long = (choose_budget(smollm2, config, 4 * GIB, longest) for longest in (128, 8192))
    assert short.fits
    assert not long.fits
    assert long.estimate.total > short.estimate.total


def test_each_task_of_a_step_has_gradient_sums_of_its_own(smollm2: ModelSpec) -> None:
    batch = MicroBatch.full(1024, CONFIG)
    for device, offload in (("cpu", False), ("cuda", False), ("cuda", True)):
        config = CONFIG.model_copy(update={"optimizer": OptimizerConfig(offload=offload)})
        one, three = (estimate_memory(smollm2, config, batch, device=device, tasks=tasks) for tasks in (1, 3))
        copies = 2 * 4 * smollm2.count(trained=True)
        assert three.parts["gradient sums"] - one.parts["gradient sums"] == (0 if offload else copies)
        assert three.host - one.host == (copies if offload else 0)
        assert three.total - one.total == (0 if offload else copies)
    room = estimate_memory(smollm2, CONFIG, MicroBatch.full(4096, CONFIG)).total
    budgets = [choose_budget(smollm2, CONFIG, int(room / 0.9), tasks=tasks).tokens for tasks in (1, 2)]
    assert budgets[1] < budgets[0] == 4096


def test_tasks_of_a_step_are_those_of_the_data_up_to_its_records() -> None:
    config = TrainConfig.read({"batch_size": 3, "surgery": {"method": "pcgrad", "by": "topic"}}, "train")
    assert count_step_tasks(config, {"topic": list("abab")}) == 2
    assert count_step_tasks(config, {"topic": list("abcdea")}) == 3
    assert count_step_tasks(config) == 2
    assert count_step_tasks(TrainConfig(), {}) == 1


def test_a_resumed_training_keeps_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory is free by then: other micro-batches round otherwise."""
    budgets = iter([512, 4096])
    monkeypatch.setattr(token_budget, "_fitting_budget", lambda *arguments: next(budgets))
    config = TrainConfig(micro_batch_tokens="auto")
    lm: Any = None
    resolved = [token_budget.resolve_token_budget(config, lm, 64, tmp_path / "scratch") for _ in range(2)]
    assert [each.micro_batch_tokens for each in resolved] == [512, 512]
