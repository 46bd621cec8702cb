"""The accelerator's way through a merge, with the processor as the accelerator: it gives the processor's results."""

from typing import Any

import pytest
import torch

from posttrain.merge import engine, tensor_group, tensor_reader
from posttrain.merge.methods.registry import METHODS
from posttrain.testing.merge_methods import merge_tensors, random_models

_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, method in sorted(METHODS.items()) if method.accelerated),
    ("ties", {"density": [0.0, 1.0, 0.4], "weight": [1.0, -1.0, 0.5]}),
    ("ties", {"trim": "model"}),
    ("breadcrumbs", {"density": 0.5, "gamma": 0.2}),
]


@pytest.mark.parametrize(("memory", "workers"), [(0, 1), (1 << 30, 3)])
@pytest.mark.parametrize(("name", "options"), _VARIANTS)
def test_an_accelerator_gives_the_same_bits(
    name: str, options: dict[str, Any], memory: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHODS[name]
    count = method.models[1] or 3
    models, base = random_models(count)
    expected = merge_tensors(method, models, base, **options)
    monkeypatch.setattr(tensor_reader, "_STAGE_BYTES", 1 << 12)
    monkeypatch.setattr(tensor_group, "_ACCELERATOR_BLOCK", 1 << 17)
    devices = [torch.device("cpu")] * 2
    merged = merge_tensors(method, models, base, memory=memory, workers=workers, devices=devices, **options)
    # The products of matrices of other sizes are added up in another order.
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if method.statistic in ("gram", "merged_gram") else {"atol": 0, "rtol": 0}
    for tensor, values in expected.items():
        torch.testing.assert_close(merged[tensor], values, **tolerance)


@pytest.mark.parametrize(("name", "count"), [("regmean", 2), ("regmean_plus_plus", 2), ("linear", 0), ("ties", 0)])
def test_only_linear_equations_are_worth_a_gpu(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models, base = random_models(2)
    used = []
    original = engine.MergeJob.__init__

    def record(self: engine.MergeJob, *arguments: Any, **more: Any) -> None:
        original(self, *arguments[:3])
        used.extend(arguments[3])

    monkeypatch.setattr(engine.MergeJob, "__init__", record)
    merge_tensors(name, models, base, devices=None)
    assert used == [torch.device("cuda", number) for number in range(count)]


def test_random_numbers_and_sums_stay_with_the_processor() -> None:
    for name in ("dare_ties", "della", "sce", "slerp", "model_stock", "karcher"):
        assert not METHODS[name].accelerated
