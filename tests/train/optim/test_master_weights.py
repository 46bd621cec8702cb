import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.master_weights import MasterWeights

Fresh = Callable[..., LanguageModel]


class Model(nn.Module):
    """A weight of each kind, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.linear(self.embedding(ids)).relu()))


def step(masters: MasterWeights, rate: float, clip: float = 1e9) -> float:
    """Step with clipping; returns the norm before it."""
    norm = math.hypot(*masters.gradient_norms().values())
    masters.step(rate, clip / (norm + 1e-6) if norm > clip else 1.0)
    return norm


DECAYED = {"linear.weight", "head.weight", "unused.weight"}


def loss(model: Model, step: int) -> Tensor:
    ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()) * 10


@pytest.mark.parametrize("clip", [0.1, 1000.0])
def test_in_float32_masters_step_as_torchs_adamw(clip: float) -> None:
    config = OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.97))
    model, reference_model = Model(), Model()
    optimizer = MasterWeights(model, config)
    reference_parameters = dict(reference_model.named_parameters())
    reference = torch.optim.AdamW(
        [
            {
                "params": [reference_parameters[name] for name in reference_parameters if name in DECAYED],
                "weight_decay": 0.1,
            },
            {
                "params": [reference_parameters[name] for name in reference_parameters if name not in DECAYED],
                "weight_decay": 0.0,
            },
        ],
        betas=(0.8, 0.97),
    )
    for weight in reference_model.parameters():
        weight.grad = torch.zeros_like(weight)
    for number, rate in enumerate([1e-2, 3e-2, 1e-3, 0.0, 2e-2]):
        for half in range(2):  # gradients add up over micro-batches
            loss(model, 10 * number + half).backward()
            loss(reference_model, 10 * number + half).backward()
        norm = step(optimizer, rate, clip)
        expected = torch.nn.utils.clip_grad_norm_(reference_model.parameters(), clip)
        assert norm == pytest.approx(float(expected), rel=1e-5)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        reference.zero_grad(set_to_none=False)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight, reference_parameters[name], atol=1e-6, rtol=1e-6, msg=name)


def test_only_matrices_of_linear_layers_decay() -> None:
    model = Model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    MasterWeights(model, OptimizerConfig(weight_decay=0.5)).step(0.1)  # no gradient: decay is all there is
    for name, weight in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in DECAYED else 1
        torch.testing.assert_close(weight.detach(), before[name] * factor)


def test_only_projections_decay_in_a_language_model(fresh: Fresh) -> None:
    lm = fresh()
    before = {name: weight.detach().clone() for name, weight in lm.model.named_parameters()}
    MasterWeights(lm.model, OptimizerConfig(weight_decay=0.5)).step(0.1)
    decayed = {name for name, weight in lm.model.named_parameters() if not torch.equal(weight, before[name])}
    assert decayed == {name for name in before if name.endswith("proj.weight")}
    assert "model.embed_tokens.weight" in before


class SingleWeight(nn.Module):
    """A single weight of 1 in bfloat16, whose neighbours are 1/256 below and 1/128 above."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))


def test_masters_keep_updates_smaller_than_a_bfloat16_step() -> None:
    model, reference_model = SingleWeight(), SingleWeight()
    optimizer = MasterWeights(model, OptimizerConfig(weight_decay=0.0))
    reference = torch.optim.AdamW(reference_model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        model.weight.sum().backward()
        optimizer.step(1e-4)
        reference_model.weight.sum().backward()
        reference.step()
        reference.zero_grad()
    assert reference_model.weight.item() == 1.0, "without masters nothing is learnt"
    assert optimizer.masters[0].item() == pytest.approx(1 - 100 * 1e-4, rel=1e-4)
    assert model.weight.item() == torch.tensor(1 - 100 * 1e-4).bfloat16().item() < 1
    assert model.weight.dtype == torch.bfloat16


def test_gradients_of_bfloat16_weights_add_up_in_float32() -> None:
    model = SingleWeight()
    optimizer = MasterWeights(model, OptimizerConfig())
    model.weight.sum().backward()
    for _ in range(256):
        (model.weight.sum() / 512).backward()
    assert model.weight.grad is None, "the low-precision gradient is freed at once"
    assert step(optimizer, 0.0) == 1.5  # in bfloat16, 1 + 1/512 is 1
    assert step(optimizer, 0.0) == 0.0, "a step clears the gradients"


def test_clipping_scales_all_gradients_alike() -> None:
    norm_and_moments = {}
    for clip in (1e-3, 1e9):
        model = Model()
        optimizer = MasterWeights(model, OptimizerConfig())
        loss(model, 0).backward()
        norm_and_moments[clip] = (
            step(optimizer, 1e-3, clip),
            [optimizer.optimizer.state[m]["exp_avg"].clone() for m in optimizer.masters],
        )
    assert norm_and_moments[1e-3][0] == norm_and_moments[1e9][0], "the norm is that before clipping"
    for clipped, unclipped in zip(norm_and_moments[1e-3][1], norm_and_moments[1e9][1], strict=True):
        torch.testing.assert_close(clipped, unclipped * 1e-3 / (norm_and_moments[1e9][0] + 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_resume_from_their_state(dtype: torch.dtype) -> None:
    model, config = Model().to(dtype), OptimizerConfig()
    optimizer = MasterWeights(model, config)
    for step in range(3):
        loss(model, step).backward()
        optimizer.step(1e-2)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    names = {name for name, _ in model.named_parameters()}
    assert {name.removeprefix("master.") for name in state if name.startswith("master.")} == names
    resumed_model = Model().to(dtype)
    resumed = MasterWeights(resumed_model, config)
    resumed.load({name: tensor.clone() for name, tensor in state.items()})
    for step in range(3, 6):
        for each_model, masters in ((model, optimizer), (resumed_model, resumed)):
            loss(each_model, step).backward()
            masters.step(1e-2)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(resumed_model.named_parameters())[name]), name
    assert all(torch.equal(resumed.tensors()[name], tensor) for name, tensor in optimizer.tensors().items())


def test_a_widened_embedding_outputs_rows_of_its_master() -> None:
    model = Model().bfloat16()
    masters = MasterWeights(model, OptimizerConfig())
    ids = torch.tensor([[1, 4, 1]])
    with torch.no_grad():
        masters.masters[0].add_(1e-4)  # less than a step in bfloat16
    assert model.embedding(ids).dtype == torch.bfloat16  # without widening, the dtype stays
    hook = model.embedding.register_forward_hook(lambda module, inputs, result: result.float(), prepend=True)
    result = model.embedding(ids)
    assert torch.equal(result.detach(), masters.masters[0][ids])
    (result * torch.tensor([1.0, 2.0, 4.0])[None, :, None]).sum().backward()
    assert masters.finished_sums()[0][:, 0].tolist() == [0, 5, 0, 0, 2, 0, 0]
    masters.close()
    assert not torch.equal(model.embedding(ids), masters.masters[0][ids])
    hook.remove()


def test_close_removes_the_hooks() -> None:
    model = Model().bfloat16()
    optimizer = MasterWeights(model, OptimizerConfig())
    optimizer.close()
    loss(model, 0).backward()
    assert model.linear.weight.grad is not None
    assert step(optimizer, 1e-2) == 0.0


def test_frozen_weights_have_no_masters(fresh: Fresh) -> None:
    lm = fresh()
    for name, weight in lm.model.named_parameters():
        weight.requires_grad_("layers.0" in name)
    optimizer = MasterWeights(lm.model, OptimizerConfig())
    assert set(optimizer.names) == {name for name, _ in lm.model.named_parameters() if "layers.0" in name}


def test_zero_grad_drops_a_gradient_that_was_not_added(fresh: Fresh) -> None:
    masters = MasterWeights(fresh("bfloat16").model, OptimizerConfig())
    weight = masters.weights[0]
    weight.grad = torch.ones_like(weight)  # as it remains if adding it to the sum fails
    masters.zero_grad()
    assert weight.grad is None
