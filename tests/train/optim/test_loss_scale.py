"""Dynamic loss scaling, without a model."""

import pytest

from posttrain.store.errors import WorkError
from posttrain.train.optim import loss_scale
from posttrain.train.optim.loss_scale import LossScale

NAN, INFINITY = float("nan"), float("inf")


def test_the_scale_backs_off_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scale = LossScale()
    scales = []
    for overflowed in [True, False, False, True, False, False, False, False, False, False, False]:
        scale.after(overflowed=overflowed)
        scales.append(scale.value / 2**16)
    assert scales == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1.0, 1.0]


def test_the_scale_is_that_of_torchs_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    scale = LossScale()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    reference = torch.amp.GradScaler("cpu", growth_interval=4)
    torch.manual_seed(0)
    for draw in torch.rand(60).tolist():
        overflowed = draw < 0.15
        reference.scale(weight.sum() * (INFINITY if overflowed else 1.0)).backward()
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        scale.after(overflowed=overflowed)
        assert scale.value == reference.get_scale()


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [(1.0, 2.0, False), (1.0, INFINITY, True), (1.0, NAN, True), (NAN, NAN, False), (INFINITY, NAN, False)],
)
def test_an_overflow_is_a_finite_loss_with_a_non_finite_norm(loss: float, norm: float, expected: bool) -> None:
    assert LossScale().overflowed(loss, norm) is expected


def test_the_minimum_scale_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 4.0)
    scale = LossScale()
    scale.after(overflowed=True)
    scale.after(overflowed=True)
    assert scale.value == 1.0
    with pytest.raises(WorkError, match=r"scaled by 1; train with train\.precision=bfloat16"):
        scale.after(overflowed=True)


def test_the_scale_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    original = LossScale()
    for overflowed in (True, False, False):
        original.after(overflowed=overflowed)
    resumed = LossScale()
    resumed.load_state(original.state())
    for scale in (original, resumed):
        scale.after(overflowed=False)
    assert original.value == resumed.value == 2**16
    assert original.state() == resumed.state()
