"""Supernets: a sub-network is the adapter of its ranks, and a step's gradient the mean of its sub-networks'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter, merge_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.stage import train
from posttrain.train.supernet import Supernet, add_subnetwork

Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[StepValues]]
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
CHOICES = {"self_attn.*": [0, 2, 4], "layers.0.mlp.*": [0, 3], ".*_proj": [0, 2, 8]}
GREATEST = {"self_attn.*": 4, "layers.0.mlp.*": 3, ".*_proj": 8}
SUBNETWORKS = [
    {"self_attn.*": 2, "layers.0.mlp.*": 0, ".*_proj": 8},
    {"self_attn.*": 0, "layers.0.mlp.*": 3, ".*_proj": 2},
    {"self_attn.*": 4, "layers.0.mlp.*": 3, ".*_proj": 0},
]


def lora(ranks: dict[str, int] = GREATEST, choices: dict[str, list[int]] = CHOICES) -> LoraConfig:
    return LoraConfig.read({"rank": 4, "alpha": 16, "ranks": ranks, "supernet": choices}, "train.lora")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(input_ids=IDS).logits.float()
    return result


def drawn(lm: LanguageModel) -> LanguageModel:
    """The model with random factors, always the same; a fresh adapter has zeros as the second one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.05, generator=generator)
    return lm


def factors(lm: LanguageModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in lm.model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("ranks", SUBNETWORKS)
def test_a_subnetwork_is_the_sliced_adapter_in_peft(fresh: Fresh, tmp_path: Path, ranks: dict[str, int]) -> None:
    from peft import PeftModel

    lm = drawn(add_adapter(fresh(), lora()))
    whole, before = logits(lm.model), factors(lm)
    with Supernet(lm.model, lora(), 0).active(ranks):
        expected = logits(lm.model)
    assert all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())
    assert torch.equal(logits(lm.model), whole)
    assert (whole - expected).abs().max() > 1e-3
    # Sliced by hand, with the settings that peft itself writes for the whole adapter.
    lm.model.save_pretrained(tmp_path / "adapter")
    sliced, names = {}, {}
    for key, weight in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        module = key.removeprefix("base_model.model.").split(".lora_")[0]
        attention, first = "self_attn" in module, ".layers.0." in module
        rank = ranks["self_attn.*" if attention else "layers.0.mlp.*" if first else ".*_proj"]
        if rank:
            names[module] = rank
            sliced[key] = (weight[:rank] if "lora_A" in key else weight[:, :rank]).clone()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scales = {module: 16 / 4 * rank for module, rank in names.items()}
    settings |= {"target_modules": sorted(names), "rank_pattern": names, "alpha_pattern": scales}
    (tmp_path / "sliced").mkdir()
    (tmp_path / "sliced" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(sliced, tmp_path / "sliced" / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(fresh().model, tmp_path / "sliced")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    # And as it is exported: cut, saved and merged.
    cut = add_subnetwork(fresh(), tmp_path / "adapter", lora(ranks, {}))
    torch.testing.assert_close(logits(cut.model), expected, atol=1e-5, rtol=1e-5)
    merged = merge_adapter(cut, tmp_path / "cut", "float32")
    torch.testing.assert_close(logits(merged.model), expected, atol=1e-5, rtol=1e-5)
    again = PeftModel.from_pretrained(fresh().model, tmp_path / "cut")
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "cut" / "adapter_config.json").read_text())["rank_pattern"] == names


def test_the_subnetworks_of_a_step(fresh: Fresh) -> None:
    model = add_adapter(fresh(), lora()).model
    supernet = Supernet(model, lora(), 3)
    steps = [supernet.subnetworks(step) for step in range(200)]
    assert steps == [Supernet(model, lora(), 3).subnetworks(step) for step in range(200)]
    assert steps != [Supernet(model, lora(), 4).subnetworks(step) for step in range(200)]
    # The smallest has an adapter, and so has each random one.
    smallest = {"self_attn.*": 2, "layers.0.mlp.*": 3, ".*_proj": 2}
    assert all(step[:2] == [GREATEST, smallest] and len(step) == 4 for step in steps)
    random = [ranks for step in steps for ranks in step[2:]]
    assert all(any(ranks.values()) for ranks in random)
    seen = {tuple(ranks.values()) for ranks in random}
    assert seen == {(a, b, c) for a in (0, 2, 4) for b in (0, 3) for c in (0, 2, 8)} - {(0, 0, 0)}
    # Where other modules have an adapter anyway, 0 everywhere is a sub-network.
    fixed = lora({"self_attn.*": 4}, {"self_attn.*": [0, 4]})
    assert Supernet(model, fixed, 0).subnetworks(0)[:2] == [{"self_attn.*": 4}, {"self_attn.*": 0}]


def test_an_error_in_a_pass_leaves_the_weights(fresh: Fresh) -> None:
    lm = drawn(add_adapter(fresh(), lora()))
    before = factors(lm)

    def run_out_of_memory() -> None:
        with Supernet(lm.model, lora(), 0).active(SUBNETWORKS[0]):
            assert not all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out_of_memory()
    assert all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())


def test_a_plan_counts_the_passes_of_all_subnetworks(tiny_model: Path) -> None:
    from posttrain.train.plan import Machine, plan_training
    from posttrain.train.standalone import TrainJobConfig

    def flops(settings: LoraConfig) -> float:
        train = {"method": "lora", "precision": "float32", "recompute": "full", "lora": settings.model_dump()}
        config = TrainJobConfig.read({"model": str(tiny_model), "data": "memory", "train": train}, "config")
        work = plan_training(config, str(tiny_model), None, Machine("cpu", None, 1e12, 0.5))["work"]
        assert work["seconds"] == pytest.approx(work["flops"] / 0.5e12)
        return float(work["flops"])

    assert flops(lora()) == pytest.approx(4 * flops(lora(choices={})))
    assert flops(lora(choices={pattern: [rank] for pattern, rank in GREATEST.items()})) == flops(lora(choices={}))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4096, 64])
def test_a_steps_gradient_is_the_mean_of_its_subnetworks(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, tokens: int, fit: Fit
) -> None:
    step = {
        "epochs": 1,
        "batch_size": len(examples),
        "clip": None,
        "micro_batch_tokens": tokens,
        "learning_rate": 1.0,
        "optimizer": {"name": "sgd", "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup": 0},
        "method": "lora",
        "lora": lora().model_dump(),
    }
    trained = TrainConfig.read({**config.model_dump(mode="json"), **step}, "train")
    lm = drawn(add_adapter(fresh(), lora()))
    lm.model.save_pretrained(tmp_path / "adapter")
    before = factors(lm)
    values = fit(lm, examples, trained, 7, tmp_path / "scratch")
    gradients = {name: before[name] - weight for name, weight in factors(lm).items()}
    subnetworks = Supernet(lm.model, lora(), 7).subnetworks(0)
    expected = {name: torch.zeros_like(weight) for name, weight in before.items()}
    losses = []
    for ranks in subnetworks:
        # Each alone: an adapter of its own ranks, plain transformers, and the mean loss of the supervised tokens.
        alone = add_subnetwork(fresh(), tmp_path / "adapter", lora(ranks, {}))
        alone.model.eval()
        total, count = torch.zeros(()), 0
        for example in examples:
            ids, learned = torch.tensor([example.ids]), torch.tensor(example.supervised)
            scores = alone.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            likelihoods = scores.gather(1, ids[0, 1:, None])[:, 0][learned[1:]]
            total, count = total - likelihoods.sum(), count + len(likelihoods)
        loss = total / count
        loss.backward()
        losses.append(loss.item())
        for name, weight in alone.model.named_parameters():
            if weight.grad is not None:
                rows, columns = weight.shape
                expected[name][:rows, :columns] += weight.grad / len(subnetworks)
    assert len(subnetworks) == 4
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=2e-4)
        assert gradient.abs().max() > 1e-4
    assert values[0].loss == pytest.approx(losses[0], rel=1e-5)
    assert values[0].metrics["loss/smallest"] == pytest.approx(losses[1], rel=1e-5)
    assert values[0].metrics["loss/random"] == pytest.approx((losses[2] + losses[3]) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_supernet_of_one_point_is_plain_training(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, fit: Fit
) -> None:
    results = []
    for name, choices in (("plain", {}), ("supernet", {pattern: [rank] for pattern, rank in GREATEST.items()})):
        torch.manual_seed(0)
        lm = add_adapter(fresh(), lora(choices=choices))
        trained = config.model_copy(update={"method": "lora", "lora": lora(choices=choices)})
        steps = fit(lm, examples, trained, 0, tmp_path / name)
        results.append((factors(lm), [step.loss for step in steps], [step.metrics for step in steps]))
    (plain, *others), (supernet, *same) = results
    assert others == same
    assert all(torch.equal(weight, supernet[name]) for name, weight in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("float32", {"recompute": "full"}),
        ("bfloat16", {}),
        ("autocast", {}),
        pytest.param("float32", {"compile": True}, marks=pytest.mark.long),
    ],
)
def test_other_ways_to_compute_it_are_a_supernet_too(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    precision: str,
    changes: dict[str, Any],
    fit: Fit,
) -> None:
    """The first step's losses of the sub-networks, by plain float32 training."""

    def first(**options: Any) -> dict[str, float]:
        values = {**config.model_dump(mode="json"), "method": "lora", "lora": lora().model_dump(), **options}
        trained = TrainConfig.read(values, "train")
        lm = drawn(add_adapter(fresh(trained.dtype), lora()))
        step = fit(lm, examples, trained, 0, tmp_path / json.dumps(options))[0]
        return {"loss": step.loss, **step.metrics}

    plain = first()
    assert len({round(value, 4) for value in plain.values()}) == 3
    assert first(precision=precision, **changes) == pytest.approx(plain, rel=1e-6 if precision == "float32" else 0.01)


@pytest.mark.slow
def test_a_resumed_supernet_has_the_same_bytes(
    tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path
) -> None:
    from posttrain.train.callbacks import CallbackList, TrainingStopped

    settings = lora().model_copy(update={"dropout": 0.2})
    config = checkpointed.model_copy(update={"method": "lora", "lora": settings})

    def run(name: str, *callbacks: Any) -> None:
        train(
            *(tiny_model, records, config, TaskConfig()),
            seed=1,
            out=tmp_path / name,
            scratch=tmp_path / f"{name} scratch",
            callbacks=CallbackList(list(callbacks)) if callbacks else None,
        )

    run("whole")
    for stop in (1, 4):
        with pytest.raises(TrainingStopped):
            run("stopped", lambda step, stop=stop: step.step + 1 >= stop)
    run("stopped")
    for file in ("adapter/adapter_model.safetensors", "model.safetensors", "training.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()
    steps = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert all({"loss/smallest", "loss/random"} <= step["metrics"].keys() for step in steps)


@pytest.mark.parametrize(
    ("ranks", "choices", "problem"),
    [
        ({"q_proj": 4}, {"q_proj": [0, 8]}, "the greatest of `q_proj` is not that of ranks"),
        ({}, {"q_proj": [0]}, "the greatest of `q_proj` is not that of ranks"),
        ({"q_proj": 4}, {"q_proj": []}, "`supernet.q_proj`: List should have at least 1 item"),
    ],
)
def test_the_greatest_rank_is_that_of_the_adapter(
    ranks: dict[str, int], choices: dict[str, list[int]], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        lora(ranks, choices)
