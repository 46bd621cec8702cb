"""What a unit counts in the loss: as if it were there more often, less often, or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.packing import pack
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.rank_partition import RankPartition

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("sft", {"sft": {"label_smoothing": 0.2}}),
    ("dpo", {}),
    ("ipo", {}),
    ("orpo", {}),
    ("simpo", {"simpo": {"nll_weight": 0.5}}),
    ("cpo", {}),
    ("reward", {"reward": {"centring": 0.1}}),
    ("classification", {}),
    ("classification", {"classification": {"label_weights": {"card": 0.1, "refund": 0.02, "top up": 0.03}}}),
]
every_case = pytest.mark.parametrize(
    ("objective", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
TIMES = [2, 1, 0, 3, 1, 0, 1, 2]
ALL = list(range(8))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-6, "there is something to compare"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] / largest, gradient / largest, atol=2e-5, rtol=0, msg=name)


@every_case
def test_a_weight_is_how_often_a_unit_is_met(school: Any, objective: str, settings: dict[str, Any]) -> None:
    taken = school(objective, settings)
    loss, gradients, _ = taken.gradients([[row for row, times in enumerate(TIMES) for _ in range(times)]])
    taken.lesson.weights = torch.tensor(TIMES, dtype=torch.float64) / 7
    for parts in ([ALL], [[row] for row in ALL], [ALL[:3], ALL[3:]]):
        found, weighted, _ = taken.gradients(parts)
        assert found == pytest.approx(loss, rel=1e-5)
        same(weighted, gradients)


@every_case
def test_weights_that_are_the_same_change_nothing(school: Any, objective: str, settings: dict[str, Any]) -> None:
    taken = school(objective, settings)
    plain, expected, metrics = taken.gradients([ALL[:3], ALL[3:]])
    taken.lesson.weights = torch.ones(8, dtype=torch.float64)
    loss, gradients, measured = taken.gradients([ALL[:3], ALL[3:]])
    assert loss == pytest.approx(plain, rel=1e-7)
    assert measured == pytest.approx(metrics, rel=1e-6)
    same(gradients, expected)


@pytest.mark.parametrize("processes", [2, 3])
def test_the_shares_of_several_processes_add_up(school: Any, processes: int) -> None:
    """Each sums and counts its own units; the whole is what one process finds of all."""
    taken = school("sft")
    taken.lesson.weights = torch.tensor(TIMES, dtype=torch.float64) / 1.25
    loss, gradients, _ = taken.gradients([ALL])
    order = BatchSampler(8, 8, 3, [PhaseConfig(epochs=1)])
    ranks = RankPartition(order, np.array([len(unit[0].ids) for unit in taken.lesson.units]), processes).ranks(0)
    shares = [[row for row, rank in zip(order.rows(0), ranks, strict=True) if rank == one] for one in range(processes)]
    whole = sum(taken.lesson.begin_step(taken.lm, [share]) for share in shares)
    assert whole == pytest.approx(taken.lesson.begin_step(taken.lm, [ALL]), rel=1e-12)
    total = 0.0
    for share in shares:
        found = taken.lesson.loss(taken.lm, pack([taken.lesson.units[row] for row in share]), share)
        (found.sum / whole).backward()
        total += found.sum.item()
    assert total / whole == pytest.approx(loss, rel=1e-5)
    same(
        {name: weight.grad for name, weight in taken.lm.model.named_parameters() if weight.grad is not None}, gradients
    )


@pytest.mark.parametrize("objective", ["sft", "dpo", "simpo", "orpo", "kto"])
def test_each_unit_has_a_loss_of_its_own(school: Any, tiny_model: Path, objective: str) -> None:
    """Nats a supervised token, of a pair's chosen sequence, whatever the objective makes of it and how rows are cut."""
    taken = school(objective)
    lesson, lm = taken.lesson, taken.lm
    lesson.begin_step(lm, [ALL])
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain.load_state_dict(lm.model.state_dict())
    expected = []
    for unit in lesson.units:
        ids, supervised = torch.tensor(unit[0].ids), torch.tensor(unit[0].supervised)
        logits = plain(input_ids=ids[None]).logits[0, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[supervised[1:]]
        expected.append(nll.mean().item())
    for parts in ([ALL], [ALL[:3], ALL[3:]]):
        found = [lesson.loss(lm, pack([lesson.units[row] for row in rows]), rows).unit_losses for rows in parts]
        assert torch.cat(found).tolist() == pytest.approx(expected, rel=2e-5)
        assert not any(losses.requires_grad for losses in found)
