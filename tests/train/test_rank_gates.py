"""Gates on LoRA's ranks: the paper's formulas, gradients, the share, the cut adapter, and exact resume."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter, merge_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.rank_gates import RankGates, cut_adapter, final_gates, gate_ranks, open_probability, sample_gates
from posttrain.train.stage import train
from posttrain.train.standalone import TrainJobConfig, train_standalone

Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[StepValues]]
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


def lora(rank: int = 4, share: float = 0.5) -> LoraConfig:
    return LoraConfig.read({"rank": rank, "alpha": 4 * rank, "gates": share}, "train.lora")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(input_ids=IDS).logits.float()
    return result


def drawn(lm: LanguageModel) -> LanguageModel:
    """The model with random second factors, which a fresh adapter has as zeros."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05, generator=generator)
    return lm


def factors(lm: LanguageModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in lm.model.named_parameters() if "lora_" in name}


def gates_of(lm: LanguageModel, config: LoraConfig, seed: int = 0, steps: int = 10) -> RankGates:
    """Gates of a model whose log alpha are drawn."""
    gates = RankGates(lm.model, MasterWeights(lm.model, OptimizerConfig(weight_decay=0.0)), config, seed, steps)
    with torch.no_grad():
        gates.log_alpha.normal_(0, 2, generator=torch.Generator().manual_seed(1))
    return gates


def test_the_formulas_of_the_paper() -> None:
    """Equations 10 to 13 of arXiv:1712.01312 in NumPy, and the share of gates above 0 of many samples."""
    low, high, beta = -0.1, 1.1, 2 / 3
    for alpha in (-3.0, -1.0, 0.0, 0.7, 3.0):
        noise = np.random.default_rng(0).random(400_000)
        stretched = 1 / (1 + np.exp(-(np.log(noise) - np.log(1 - noise) + alpha) / beta)) * (high - low) + low
        expected = np.minimum(1, np.maximum(0, stretched))
        log_alpha = torch.tensor(alpha, dtype=torch.float64)
        samples = sample_gates(log_alpha, torch.from_numpy(noise))
        np.testing.assert_allclose(samples.numpy(), expected, atol=1e-9)
        probability = 1 / (1 + math.exp(-(alpha - beta * math.log(-low / high))))
        assert open_probability(log_alpha).item() == pytest.approx(probability, rel=1e-9)
        assert (samples > 0).double().mean().item() == pytest.approx(probability, abs=0.004)
        final = min(1.0, max(0.0, 1 / (1 + math.exp(-alpha)) * (high - low) + low))
        assert final_gates(log_alpha).item() == pytest.approx(final, abs=1e-9)


def test_a_steps_gates_follow_from_seed_and_step(fresh: Fresh) -> None:
    lm = drawn(add_adapter(fresh(), lora()))
    before = factors(lm)

    def scaled(seed: int, step: int) -> dict[str, Tensor]:
        with gates_of(lm, lora(), seed).sampled(step):
            return factors(lm)

    first, again, later, other = scaled(1, 3), scaled(1, 3), scaled(1, 4), scaled(2, 3)
    assert all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if "lora_A" in name:
            assert torch.equal(weight, before[name])
            continue
        ratios = weight / before[name]
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
        assert ((ratios >= 0) & (ratios <= 1 + 1e-6)).all()
    assert any(not torch.equal(weight, later[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


def test_an_error_in_a_pass_leaves_the_weights(fresh: Fresh) -> None:
    lm = drawn(add_adapter(fresh(), lora()))
    gates, before = gates_of(lm, lora()), factors(lm)

    def run_out_of_memory() -> None:
        with gates.sampled(0):
            assert not all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out_of_memory()
    assert all(torch.equal(weight, before[name]) for name, weight in factors(lm).items())
    assert not gates._gradient.any()


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_gradients_are_those_of_gates_in_the_graph(fresh: Fresh, scale: float) -> None:
    """Two micro-batches through B diag(z) A with z as a node of autograd, in place of factors that are multiplied."""
    step, share, count = 2, 0.4, 10
    config = lora(share=share)
    lm = drawn(add_adapter(fresh(), config))
    gates = gates_of(lm, config, 7, count)
    gates._multipliers.data[:] = torch.tensor([0.3, 0.2])
    # The expected gradients first, by parametrised factors.
    names = [name for name, _ in lm.model.named_parameters() if ".lora_A." in name]
    log_alpha = gates.log_alpha.detach().clone().requires_grad_()
    noise = torch.from_numpy(np.random.default_rng([7, step]).random(len(log_alpha))).float().clamp(1e-6, 1 - 1e-6)
    sampled = (torch.sigmoid((torch.log(noise / (1 - noise)) + log_alpha) * 1.5) * 1.2 - 0.1).clamp(0, 1)
    weights = {
        name: weight.detach().clone().requires_grad_() for name, weight in lm.model.named_parameters() if "lora" in name
    }
    replaced = dict(weights)
    costs = []
    for number, name in enumerate(names):
        other = name.replace("lora_A", "lora_B")
        replaced[other] = weights[other] * sampled[4 * number : 4 * number + 4]
        costs += [weights[name].shape[1] + weights[other].shape[0]] * 4
    for row in IDS:
        output = torch.func.functional_call(lm.model, replaced, kwargs={"input_ids": row[None]}).logits
        (output.square().mean() * scale).backward(retain_graph=True)
    for name in weights:
        assert weights[name].grad is not None
    of_loss = log_alpha.grad.clone() / scale
    log_alpha.grad = None
    expected_share = (torch.sigmoid(log_alpha - 2 / 3 * math.log(0.1 / 1.1)) * torch.tensor(costs)).sum() / sum(costs)
    target = 1 + (share - 1) * step / (0.3 * count)
    gap = expected_share - target
    (0.3 * gap + 0.2 * gap**2).backward()
    expected = of_loss + log_alpha.grad
    # As training does it.
    with gates.sampled(step):
        for row in IDS:
            (lm.model(input_ids=row[None]).logits.square().mean() * scale).backward()
    for name, weight in lm.model.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(weight.grad, weights[name].grad, atol=1e-5 * scale, rtol=1e-4)
    steps: list[tuple[Tensor, Tensor]] = []
    gates._optimizer.step = lambda: steps.append((gates.log_alpha.grad.clone(), gates._multipliers.grad.clone()))
    gates.updated(step, scale)
    (of_gates, of_multipliers), *_ = steps
    torch.testing.assert_close(of_gates, expected, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(of_multipliers, torch.stack([gap, gap**2]).detach().float(), atol=1e-6, rtol=1e-4)
    assert gates.metrics == pytest.approx({"gates/share": expected_share.item(), "gates/target": target}, rel=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_the_cut_adapter_is_the_gated_model(fresh: Fresh, tmp_path: Path, share: float) -> None:
    from peft import PeftModel

    config = lora(share=share)
    lm = drawn(add_adapter(fresh(), config))
    gates = gates_of(lm, config)
    whole = sum(weight.numel() for weight in factors(lm).values())
    with gates.result():
        expected = logits(lm.model)
    assert (expected - logits(lm.model)).abs().max() > 1e-3
    by_module = gates.by_module()
    kept = torch.cat(list(by_module.values()))
    final = final_gates(gates.log_alpha.detach())
    # Those that stay are the greatest of those above 0, as many as the share has room for.
    count = int((kept > 0).sum())
    assert torch.equal(kept[kept > 0].sort().values, final.sort().values[-count:])
    assert count <= (final > 0).sum()
    cut = cut_adapter(lm, by_module, config)
    parameters = sum(weight.numel() for weight in factors(cut).values())
    assert parameters <= share * whole
    assert parameters + gates.costs.max() > share * whole or count == (final > 0).sum()
    torch.testing.assert_close(logits(cut.model), expected, atol=1e-5, rtol=1e-5)
    merged = merge_adapter(cut, tmp_path / "adapter", "float32")
    torch.testing.assert_close(logits(merged.model), expected, atol=1e-5, rtol=1e-5)
    loaded = PeftModel.from_pretrained(fresh().model, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    ranks = gate_ranks(by_module, config)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == {name: rank for name, rank in ranks.items() if rank}
    assert len(ranks) == 14
    # The ranks can be pasted: an adapter of them has these sizes.
    plain = LoraConfig.read({"rank": 4, "alpha": 16, "ranks": ranks}, "train.lora")
    again = add_adapter(fresh(), plain)
    assert sum(weight.numel() for weight in factors(again).values()) == parameters


def test_at_least_one_component_stays(fresh: Fresh) -> None:
    lm = add_adapter(fresh(), lora())
    gates = gates_of(lm, lora())
    with torch.no_grad():
        gates.log_alpha.fill_(-20)
        gates.log_alpha[9] = -10
    assert gates.kept().nonzero().tolist() == [[9]]


def test_patterns_of_ranks_have_gates_too(fresh: Fresh) -> None:
    """A greater rank by a pattern is cut as well, and 0 by a pattern stays 0."""
    config = lora(share=0.5).model_copy(update={"ranks": {"layers.0.mlp.*": 8, "layers.1.self_attn.*": 0}})
    lm = drawn(add_adapter(fresh(), config))
    gates = gates_of(lm, config)
    with gates.result():
        expected = logits(lm.model)
    by_module = gates.by_module()
    cut = cut_adapter(lm, by_module, config)
    torch.testing.assert_close(logits(cut.model), expected, atol=1e-5, rtol=1e-5)
    ranks = gate_ranks(by_module, config)
    assert ranks["layers.1.self_attn.*"] == 0
    again = add_adapter(fresh(), config.model_copy(update={"ranks": ranks, "gates": None}))
    assert {name: weight.shape for name, weight in factors(again).items()} == {
        name: weight.shape for name, weight in factors(cut).items()
    }


@pytest.mark.slow
def test_the_useful_component_stays(fresh: Fresh) -> None:
    """The target is the model with an update of rank 1 in one module."""
    teacher = fresh()
    planted = "model.layers.1.mlp.down_proj"
    generator = torch.Generator().manual_seed(0)
    weight = teacher.model.get_submodule(planted).weight
    with torch.no_grad():
        left, right = (torch.randn(size, generator=generator) for size in weight.shape)
        weight += 6 * weight.norm() * torch.outer(left / left.norm(), right / right.norm())
    ids = torch.randint(5, 200, (8, 12), generator=generator)
    with torch.no_grad():
        target = teacher.model.eval()(input_ids=ids).logits
    config = lora(2, share=0.1)
    torch.manual_seed(0)
    lm = add_adapter(fresh(), config)
    lm.model.eval()
    masters = MasterWeights(lm.model, OptimizerConfig(weight_decay=0.0))
    steps = 100
    gates = RankGates(lm.model, masters, config, 0, steps)

    def loss() -> Tensor:
        result: Tensor = (lm.model(input_ids=ids).logits - target).square().mean()
        return result

    start = loss().item()
    for step in range(steps):
        with gates.sampled(step):
            loss().backward()
        masters.step(0.02)
        gates.updated(step, 1.0)
    by_module = gates.by_module()
    assert gates.metrics["gates/share"] == pytest.approx(0.1, abs=0.1)
    ranks = gate_ranks(by_module, config)
    assert ranks[planted] >= 1
    assert by_module[planted].max() > 0.9
    assert sum(rank == 0 for rank in ranks.values()) >= 11
    cut = cut_adapter(lm, by_module, config)
    cut.model.eval()
    with torch.no_grad():
        end = (cut.model(input_ids=ids).logits - target).square().mean().item()
    assert end < 0.1 * start


@pytest.mark.slow
def test_a_training_meets_the_share_and_resumes_to_the_byte(
    tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    from posttrain.train.callbacks import CallbackList, TrainingStopped

    settings = lora(share=0.3).model_copy(update={"dropout": 0.2})
    changes = {"method": "lora", "lora": settings, "epochs": 12, "learning_rate": 1e-2}
    config = checkpointed.model_copy(update=changes)

    def run(name: str, *callbacks: Any) -> dict[str, Any]:
        return train(
            *(tiny_model, records, config, TaskConfig()),
            seed=1,
            out=tmp_path / name,
            scratch=tmp_path / f"{name} scratch",
            callbacks=CallbackList(list(callbacks)) if callbacks else None,
        )

    with caplog.at_level("INFO", "posttrain"):
        whole = run("whole")
    assert f"gates keep {sum(whole['ranks'].values())} of 56 ranks, in " in caplog.text
    for stop in (1, 20):
        with pytest.raises(TrainingStopped):
            run("stopped", lambda step, stop=stop: step.step + 1 >= stop)
    assert run("stopped") == whole
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()
    assert (tmp_path / "whole" / "training.json").read_bytes() == (tmp_path / "stopped" / "training.json").read_bytes()
    metrics = [step["metrics"] for step in json.loads((tmp_path / "whole" / "training.json").read_text())]
    targets = [values["gates/target"] for values in metrics]
    assert targets[0] == 1
    assert targets[len(targets) // 2 :] == pytest.approx([0.3] * math.ceil(len(targets) / 2))
    assert metrics[-1]["gates/share"] < 0.6
    base = load_language_model(tiny_model, TaskConfig(), "float32")
    adapted = PeftModel.from_pretrained(base.model, tmp_path / "whole" / "adapter")
    full = add_adapter(load_language_model(tiny_model, TaskConfig(), "float32"), settings)
    sizes = [sum(w.numel() for n, w in model.named_parameters() if "lora_" in n) for model in (adapted, full.model)]
    assert 0 < sizes[0] <= 0.3 * sizes[1]
    merged = load_language_model(tmp_path / "whole", TaskConfig(), "float32")
    torch.testing.assert_close(logits(merged.model), logits(adapted), atol=0.1, rtol=0.05)  # saved in bfloat16


@pytest.mark.slow
def test_micro_batches_change_nothing(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, fit: Fit
) -> None:
    results = []
    for tokens in (4096, 64):
        torch.manual_seed(0)
        lm = drawn(add_adapter(fresh(), lora()))
        changes = {"method": "lora", "lora": lora(), "micro_batch_tokens": tokens}
        steps = fit(lm, examples, config.model_copy(update=changes), 0, tmp_path / str(tokens))
        results.append([step.loss for step in steps] + [step.metrics["gates/share"] for step in steps])
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@pytest.mark.slow
def test_a_stopped_training_is_measured_with_its_gates(
    tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path
) -> None:
    from posttrain.train.callbacks import Callback, CallbackList, TrainingStopped

    config = checkpointed.model_copy(update={"method": "lora", "lora": lora(share=0.05), "learning_rate": 1e-2})

    class Measure(Callback):
        def on_step(self, step: StepValues) -> bool:
            return step.step == 3

        def on_stop(self, model: LanguageModel) -> None:
            columns = [w for n, w in model.model.named_parameters() if "lora_B" in n]
            self.open = sum(int((w != 0).any(0).sum()) for w in columns)
            self.all = sum(w.shape[1] for w in columns)

    measure = Measure()
    with pytest.raises(TrainingStopped):
        train(
            *(tiny_model, records, config, TaskConfig()),
            seed=1,
            out=tmp_path / "out",
            scratch=tmp_path / "scratch",
            callbacks=CallbackList(measure),
        )
    assert 1 <= measure.open <= 0.1 * measure.all


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"gates": 1}, "gates"),
        ({"gates": 0}, "gates"),
        ({"gates": 0.5, "ranks": {"q_proj": 4}, "supernet": {"q_proj": [4]}}, "leave one out"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        LoraConfig.read(settings, "train.lora")


def test_a_share_without_room_ends_a_training_before_any_work(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: pa.Table
) -> None:
    monkeypatch.setattr("posttrain.train.stage.read_training_set", lambda *arguments: pytest.fail("it reads records"))
    train = {"method": "lora", "lora": {"gates": 0.0001}}
    config = TrainJobConfig.read({"model": str(tiny_model), "data": "memory", "train": train}, "config")
    with pytest.raises(UserError, match=r"^train\.lora\.gates: .*has no room for the"):
        train_standalone(tmp_path / "out", config, records, tiny_model)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_gates_is_refused(fresh: Fresh) -> None:
    lm = add_adapter(fresh(), lora())
    with pytest.raises(UserError, match="has no gates of this adapter"):
        gates_of(lm, lora()).load({})
