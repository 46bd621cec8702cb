"""Weights of units over several processes, and the loss of each unit."""

from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models.packing import pack
from posttrain.testing.objectives import assert_same_gradients
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.rank_partition import RankPartition

REPEATS = [2, 1, 0, 3, 1, 0, 1, 2]
ALL = list(range(8))


@pytest.mark.parametrize("processes", [2, 3])
def test_the_losses_of_several_processes_add_up(prepare: Any, processes: int) -> None:
    """Each process sums and counts its own units; the total is that of a single process."""
    prepared = prepare("sft")
    prepared.objective.weights = torch.tensor(REPEATS, dtype=torch.float64) / 1.25
    loss, gradients, _ = prepared.gradients([ALL])
    sampler = BatchSampler(8, 8, 3, [PhaseConfig(epochs=1)])
    ranks = RankPartition(sampler, np.array([len(unit[0].ids) for unit in prepared.objective.units]), processes).ranks(
        0
    )
    shares = [
        [row for row, rank in zip(sampler.rows(0), ranks, strict=True) if rank == process]
        for process in range(processes)
    ]
    count = sum(prepared.objective.begin_step(prepared.lm, [share]) for share in shares)
    assert count == pytest.approx(prepared.objective.begin_step(prepared.lm, [ALL]), rel=1e-12)
    total = 0.0
    for share in shares:
        share_loss = prepared.objective.loss(prepared.lm, pack([prepared.objective.units[row] for row in share]), share)
        (share_loss.sum / count).backward()
        total += share_loss.sum.item()
    assert total / count == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(
        {name: weight.grad for name, weight in prepared.lm.model.named_parameters() if weight.grad is not None},
        gradients,
    )
