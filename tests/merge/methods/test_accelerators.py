"""The accelerator's way through a merge, with the processor as the accelerator: it gives the processor's results."""

from typing import Any

import pytest
import torch

from posttrain.merge import engine, tensor_group, tensor_reader
from posttrain.merge.methods.registry import METHODS
from posttrain.testing.merge_methods import merge_tensors, random_models


@pytest.mark.parametrize(("memory", "workers"), [(0, 1), (1 << 30, 3)])
@pytest.mark.parametrize("name", ["linear", "regmean"])
def test_an_accelerator_gives_the_same(name: str, memory: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS[name]
    assert method.accelerated
    models, base = random_models(3)
    expected = merge_tensors(method, models, base)
    monkeypatch.setattr(tensor_reader, "_STAGE_BYTES", 1 << 12)
    monkeypatch.setattr(tensor_group, "_ACCELERATOR_BLOCK", 1 << 17)
    devices = [torch.device("cpu")] * 2
    merged = merge_tensors(method, models, base, memory=memory, workers=workers, devices=devices)
    # The products of matrices of other sizes are added up in another order; a mean has the same bits.
    tolerance = {"atol": 0, "rtol": 0} if name == "linear" else {"atol": 1e-6, "rtol": 1e-5}
    for tensor, values in expected.items():
        torch.testing.assert_close(merged[tensor], values, **tolerance)


@pytest.mark.parametrize(("name", "count"), [("regmean", 2), ("linear", 0), ("ties", 0)])
def test_only_linear_equations_are_worth_a_gpu(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models, base = random_models(2)
    used: list[Any] = []
    original = engine.MergeJob.__init__

    def record(self: engine.MergeJob, *arguments: Any) -> None:
        original(self, *arguments[:3])
        used.extend(arguments[3])

    monkeypatch.setattr(engine.MergeJob, "__init__", record)
    merge_tensors(name, models, base, devices=None)
    assert used == [torch.device("cuda", number) for number in range(count)]
