"""Masters, sums and steps on the host, with a host that is the same device as the weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.optim.offload import Offload


def test_offload_needs_an_accelerator(fresh: Callable[..., LanguageModel]) -> None:
    with pytest.raises(UserError, match=r"train\.optimizer\.offload: there is no accelerator .*; set it to false"):
        MasterWeights(fresh().model, OptimizerConfig(offload=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_sums_are_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    offload = Offload(weights)
    expected = [torch.zeros(weight.shape) for weight in weights]
    for _ in range(4):
        for index in (1, 0, 0):  # the same weight twice in a row, as when it is tied
            gradient = torch.randn(weights[index].shape).to(dtype)
            expected[index] += gradient.float()
            offload.add(index, gradient)
            gradient.fill_(torch.nan)  # the caller may reuse its buffer at once
    offload.finish()
    for master, total in zip(offload.masters, expected, strict=True):
        assert master.grad is not None
        assert master.dtype == master.grad.dtype == torch.float32
        assert torch.equal(master.grad, total)


def test_sparse_gradients_of_an_embedding_are_added() -> None:
    weight = torch.zeros(6, 2, dtype=torch.bfloat16)
    offload = Offload([weight])
    offload.add(0, torch.sparse_coo_tensor([[1, 4, 1]], torch.ones(3, 2, dtype=torch.bfloat16), (6, 2)))
    offload.finish()
    assert offload.masters[0].grad is not None
    assert offload.masters[0].grad.sum(1).tolist() == [0, 4, 0, 0, 2, 0]


def test_masters_keep_updates_lost_in_rounding() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16)
    (master,) = (offload := Offload([weight])).masters
    assert master.data_ptr() != weight.data_ptr()
    master.add_(1e-4)
    offload.round_back()
    assert weight.tolist() == [1.0] * 4  # less than a step of bfloat16
    master.add_(1.0)
    offload.round_back()
    assert weight.tolist() == [2.0] * 4
    assert master[0].item() == pytest.approx(2.0001)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masters_step_as_without_offload(
    fresh: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(Offload, "from_accelerator", Offload)  # as if the host were another device

    def train(offload: bool) -> dict[str, Tensor]:
        lm = fresh(dtype)
        masters = MasterWeights(lm.model, OptimizerConfig(offload=offload))
        for step in range(3):
            for part in range(2):
                ids = torch.arange(20 * part, 20 * part + 20)[None]
                lm.model(input_ids=ids).logits.float().square().mean().backward()
            norms = masters.gradient_norms()
            assert min(norms.values()) > 0
            if step == 1:  # as after an out-of-memory error
                masters.zero_grad()
            else:
                masters.step(1e-2, 0.5)
        masters.close()
        weights = {name: weight.detach().clone() for name, weight in lm.model.named_parameters()}
        return weights | {name: tensor.clone() for name, tensor in masters.tensors().items()}

    without_offload, with_offload = train(False), train(True)
    assert without_offload.keys() == with_offload.keys()
    for name, tensor in without_offload.items():
        assert torch.equal(tensor, with_offload[name]), name


def test_a_training_is_as_without_offload(fresh: Callable[..., LanguageModel]) -> None:
    def train(with_offload: bool) -> list[Tensor]:
        model = fresh("float32").model
        weights = list(model.parameters())
        offload = Offload(weights) if with_offload else None
        masters = weights if offload is None else offload.masters
        optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
        for _ in range(3):
            model(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
            if offload is not None:
                for index, weight in enumerate(weights):
                    assert weight.grad is not None
                    offload.add(index, weight.grad)
                    weight.grad = None
                offload.finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=offload is None)
            if offload is not None:
                offload.round_back()
        return [weight.detach().clone() for weight in weights]

    assert all(torch.equal(first, other) for first, other in zip(train(True), train(False), strict=True))
