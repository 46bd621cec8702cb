"""Batches packed ahead are those that the training would have packed itself."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models.chat import ChatTemplate, TokenizedExample
from posttrain.models.packing import Unit, micro_batches, pack
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import CurriculumConfig, LoaderConfig, PhaseConfig
from posttrain.train.data.encoding import Encoder
from posttrain.train.data.loader import Batch, BatchLengths, BatchLoader
from posttrain.train.data.tokenise import tokenise

WAYS = [(0, 1), (1, 1), (1, 2), (2, 3), (3, 8)]
"""Threads, and steps ahead."""


def order(stages: Sequence[PhaseConfig] = (PhaseConfig(epochs=3),), **known: Any) -> BatchSampler:
    return BatchSampler(10, 4, 3, stages, **known)


def content(batch: Batch) -> dict[str, Any]:
    """All of a batch as plain values."""
    rows = [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(item).items()}
        for item in batch.packed
    ]
    for item in rows:
        plan = item.pop("plan")
        item["plan"] = (plan.order.tolist(), plan.inverse.tolist())
    return {"step": batch.step, "epoch": batch.epoch, "rows": batch.rows, "lengths": batch.lengths, "packed": rows}


@pytest.fixture
def units(records: pa.Table, tmp_path: Path) -> Sequence[Unit]:
    tokenizer = byte_tokenizer()
    encoder = Encoder(
        ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id])), TaskConfig(system="Name the intent.")
    )
    return tokenise(encoder, records, 100, "completion", tmp_path / "tokens")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_loads_what_no_loader_would(units: Sequence[Unit], workers: int, prefetch: int, padded: bool) -> None:
    config = LoaderConfig(workers=workers, prefetch=prefetch)
    with BatchLoader(units, order(), 130, padded=padded, config=config) as loader:
        actual = [content(batch) for batch in loader]
    expected = []
    for step in range(9):
        epoch, rows = step // 3, order().rows(step)
        parts = list(micro_batches([units[row] for row in rows], 130))
        left = iter(rows)
        groups = [[next(left) for _ in part] for part in parts]
        packed = [pack(part, padded=padded) for part in parts]
        lengths = BatchLengths.of([units[row] for row in rows], packed)
        assert lengths.sequences == [len(units[row][0].ids) for row in rows]
        expected.append(content(Batch(step, epoch, groups, packed, lengths)))
    assert actual == expected
    assert max(len(batch["packed"]) for batch in actual) > 1


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 2)])
def test_it_starts_at_any_step(units: Sequence[Unit], workers: int, prefetch: int, step: int) -> None:
    with BatchLoader(units, order(), 130, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        whole = [content(batch) for batch in loader]
        loader.seek(step)
        assert [content(batch) for batch in loader] == whole[step:]
        loader.seek(0)
        assert content(next(loader)) == whole[0]
        loader.seek(0)
        assert content(next(loader)) == whole[0]


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
def test_a_new_budget_holds_from_the_next_batch_on(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    config = LoaderConfig(workers=workers, prefetch=prefetch)
    with BatchLoader(units, order(), 10_000, config=config) as loader, BatchLoader(units, order(), 1) as single:
        one_by_one = [content(batch) for batch in single]
        first = next(loader)
        assert (loader.budget, len(first.packed)) == (10_000, 1)
        loader.budget = 1
        assert content(next(loader)) == one_by_one[1]
        loader.seek(0)  # as after an out-of-memory error in step 0
        assert [content(batch) for batch in loader] == one_by_one


class Slow(Sequence[Unit]):
    """Units that take a while to read, or cannot be."""

    def __init__(self, units: Sequence[Unit], seconds: float = 0.0, broken: int | None = None) -> None:
        self.units, self.seconds, self.broken = units, seconds, broken

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, row: Any) -> Any:
        time.sleep(self.seconds)
        if row == self.broken:
            raise OSError("the disk is gone")
        return self.units[row]


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
def test_what_goes_wrong_in_a_thread_is_raised(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    spoilt = Slow(units, broken=7)
    place = next(step for step in range(3) if 7 in order().rows(step))
    with BatchLoader(spoilt, order(), 130, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        for step in range(place):
            assert next(loader).step == step
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)
        spoilt.broken = None
        assert next(loader).step == place, "nothing was left out"


@pytest.mark.slow
def test_waiting_is_measured(units: Sequence[Unit]) -> None:
    for workers in (0, 1):
        with BatchLoader(Slow(units, seconds=0.1), order(), 130, config=LoaderConfig(workers=workers)) as loader:
            next(loader)
            assert loader.waited >= 0.4
            wait(loader._prefetched)
            next(loader)
            assert (loader.waited < 0.4) == bool(workers), "it was packed meanwhile"


def test_it_goes_no_further_ahead_than_it_may(units: Sequence[Unit]) -> None:
    read: list[int] = []

    class Counted(Slow):
        def __getitem__(self, row: Any) -> Any:
            read.append(row)
            return self.units[row]

    with BatchLoader(Counted(units), order(), 130, config=LoaderConfig(workers=2, prefetch=3)) as loader:
        assert not read, "nothing is loaded before it is asked for"
        next(loader)
        time.sleep(0.2)
        assert len(read) <= 4 * 4


def test_an_interrupted_training_leaves_no_thread(units: Sequence[Unit]) -> None:
    def work() -> None:
        with BatchLoader(Slow(units, seconds=0.01), order(), 130, config=LoaderConfig(workers=2, prefetch=8)) as loader:
            next(loader)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
def test_an_adaptive_order_is_told_of_losses_in_time(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    curriculum = CurriculumConfig(name="adaptive", start=0.4, every=2, duration=0.9)

    def build_sampler() -> BatchSampler:
        return order([PhaseConfig(steps=10, curriculum=curriculum)], difficulties=np.arange(10))

    alone, ours = build_sampler(), build_sampler()
    with BatchLoader(units, ours, 130, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        for batch in loader:
            assert [row for rows in batch.rows for row in rows] == alone.rows(batch.step)
            for item in (alone, ours):
                item.observe(batch.step, 4.0 - batch.step / 3)
    assert ours.seen().tolist() == alone.seen().tolist()


def test_a_step_whose_rows_are_not_known_cannot_be_loaded(units: Sequence[Unit]) -> None:
    curriculum = CurriculumConfig(name="adaptive", every=2)
    waiting = order([PhaseConfig(steps=10, curriculum=curriculum)], difficulties=np.arange(10))
    with BatchLoader(units, waiting, 130) as loader:
        next(loader), next(loader)
        with pytest.raises(IndexError, match="the rows of step 2 are not decided"):
            next(loader)


def test_units_need_not_lie_on_a_disk(examples: list[TokenizedExample]) -> None:
    with BatchLoader([[example] for example in examples], order(), 130) as loader:
        assert sum(len(batch.lengths.sequences) for batch in loader) == 30


class Computing(TorchDispatchMode):
    """Notes what PyTorch computes meanwhile; a view of what is there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not function.is_view:
            self.seen.add(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_packing_has_pytorch_compute_nothing(padded: bool) -> None:
    # OpenMP would start threads for the loader's own, and with more than there are cores let the model's sleep.
    units = [[TokenizedExample(list(range(50 + more)), [True] * (50 + more))] for more in range(4)]
    with Computing() as computing:
        pack(units, padded=padded)
    assert not computing.seen
