"""Batches packed ahead equal those that the training would pack itself."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from itertools import chain
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
from posttrain.parallel.mesh import Mesh
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import CurriculumConfig, LoaderConfig, PhaseConfig
from posttrain.train.data.encoding import Encoder
from posttrain.train.data.loader import Batch, BatchLengths, BatchLoader
from posttrain.train.data.token_set import TokenSet
from posttrain.train.data.tokenise import tokenise

WAYS = [(0, 1), (1, 1), (1, 2), (2, 3), (3, 8)]
"""Threads, and steps ahead."""


def build_sampler(phases: Sequence[PhaseConfig] = (PhaseConfig(epochs=3),), **options: Any) -> BatchSampler:
    return BatchSampler(10, 4, 3, phases, **options)


def batches(loader: BatchLoader, first: int = 0, last: int = 9) -> Iterator[Batch]:
    """The batches of steps one after another."""
    return (loader.next(step) for step in range(first, last))


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
def _no_thread_remains() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
@pytest.mark.parametrize("padded", [False, True])
def test_batches_are_those_packed_without_a_loader(
    units: Sequence[Unit], workers: int, prefetch: int, padded: bool
) -> None:
    config = LoaderConfig(workers=workers, prefetch=prefetch)
    with BatchLoader(units, build_sampler(), 130, padded=padded, config=config) as loader:
        actual = [content(batch) for batch in batches(loader)]
    expected = []
    for step in range(9):
        epoch, rows = step // 3, build_sampler().rows(step)
        parts = list(micro_batches([units[row] for row in rows], 130))
        remaining = iter(rows)
        groups = [[next(remaining) for _ in part] for part in parts]
        packed = [pack(part, padded=padded) for part in parts]
        lengths = BatchLengths.from_packed([units[row] for row in rows], packed)
        assert lengths.sequences == [len(units[row][0].ids) for row in rows]
        expected.append(content(Batch(step, epoch, groups, packed, lengths, [0] * len(parts))))
    assert actual == expected
    assert max(len(batch["packed"]) for batch in actual) > 1


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 2)])
def test_a_loader_continues_at_any_step(units: Sequence[Unit], workers: int, prefetch: int, step: int) -> None:
    with BatchLoader(units, build_sampler(), 130, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        expected = [content(batch) for batch in batches(loader)]
        assert [content(batch) for batch in batches(loader, step)] == expected[step:]
        assert content(loader.next(0)) == expected[0]
        assert content(loader.next(0)) == expected[0]


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
def test_a_step_is_cut_again_by_a_new_budget(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    config = LoaderConfig(workers=workers, prefetch=prefetch)
    with (
        BatchLoader(units, build_sampler(), 10_000, config=config) as loader,
        BatchLoader(units, build_sampler(), 1) as single,
    ):
        assert len(loader.next(0).packed) == 1
        loader.budget = 1  # as after an out-of-memory error in step 0
        assert [content(batch) for batch in batches(loader)] == [content(batch) for batch in batches(single)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_processes_share_the_rows_of_a_step(
    make_units: Callable[..., list[Unit]], make_set: Callable[..., TokenSet], world_size: int
) -> None:
    lengths = np.random.default_rng(1).integers(2, 40, 23).tolist()
    units, sampler = make_set(make_units(lengths), 150), BatchSampler(23, 5, 3, [PhaseConfig(epochs=2)])
    meshes = [Mesh(rank, world_size) for rank in range(world_size)]
    loaders = [BatchLoader(units, sampler, 64, mesh=mesh, config=LoaderConfig(workers=0)) for mesh in meshes]
    tokens = np.zeros(world_size, np.int64)
    for step in range(sampler.steps):
        rows, parts = sampler.rows(step), [list(chain(*loader.next(step).rows)) for loader in loaders]
        assert sorted(row for part in parts for row in part) == sorted(rows)
        for rank, part in enumerate(parts):
            positions = [rows.index(row) for row in part]
            assert positions == sorted(positions)
            tokens[rank] += sum(lengths[row] for row in part)
        if step < 5:
            assert np.ptp(tokens) <= max(lengths)
    with pytest.raises(ValueError, match="rank 2 is not below the world size 2"):
        Mesh(2, 2)


class SlowUnits(Sequence[Unit]):
    """Units that are slow to read, or raise an error."""

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
def test_an_error_in_a_thread_is_raised(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    broken_units = SlowUnits(units, broken=7)
    failing_step = next(step for step in range(3) if 7 in build_sampler().rows(step))
    with BatchLoader(
        broken_units, build_sampler(), 130, config=LoaderConfig(workers=workers, prefetch=prefetch)
    ) as loader:
        for step in range(failing_step):
            assert loader.next(step).step == step
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.next(failing_step)
        broken_units.broken = None
        assert loader.next(failing_step).step == failing_step


@pytest.mark.slow
def test_waiting_is_measured(units: Sequence[Unit]) -> None:
    for workers in (0, 1):
        with BatchLoader(
            SlowUnits(units, seconds=0.1), build_sampler(), 130, config=LoaderConfig(workers=workers)
        ) as loader:
            loader.next(0)
            assert loader.waited >= 0.4
            wait(loader._prefetched)
            loader.next(1)
            assert (loader.waited < 0.4) == bool(workers), "it was packed meanwhile"


def test_prefetch_limits_the_steps_ahead(units: Sequence[Unit]) -> None:
    rows_read: list[int] = []

    class CountingUnits(SlowUnits):
        def __getitem__(self, row: Any) -> Any:
            rows_read.append(row)
            return self.units[row]

    with BatchLoader(CountingUnits(units), build_sampler(), 130, config=LoaderConfig(workers=2, prefetch=3)) as loader:
        assert not rows_read, "nothing is loaded before it is requested"
        loader.next(0)
        time.sleep(0.2)
        assert len(rows_read) <= 4 * 4


def test_an_interrupted_training_leaves_no_thread(units: Sequence[Unit]) -> None:
    def train() -> None:
        with BatchLoader(
            SlowUnits(units, seconds=0.01), build_sampler(), 130, config=LoaderConfig(workers=2, prefetch=8)
        ) as loader:
            loader.next(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()


@pytest.mark.parametrize(("workers", "prefetch"), WAYS)
def test_an_adaptive_sampler_observes_losses_in_time(units: Sequence[Unit], workers: int, prefetch: int) -> None:
    curriculum = CurriculumConfig(name="adaptive", start=0.4, every=2, duration=0.9)

    def adaptive_sampler() -> BatchSampler:
        return build_sampler([PhaseConfig(steps=10, curriculum=curriculum)], difficulties=np.arange(10))

    reference, sampler = adaptive_sampler(), adaptive_sampler()
    with BatchLoader(units, sampler, 130, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        for batch in batches(loader, last=10):
            assert [row for rows in batch.rows for row in rows] == reference.rows(batch.step)
            for observer in (reference, sampler):
                observer.observe(batch.step, 4.0 - batch.step / 3)
    assert sampler.seen().tolist() == reference.seen().tolist()


def test_a_step_with_undecided_rows_cannot_be_loaded(units: Sequence[Unit]) -> None:
    curriculum = CurriculumConfig(name="adaptive", every=2)
    sampler = build_sampler([PhaseConfig(steps=10, curriculum=curriculum)], difficulties=np.arange(10))
    with BatchLoader(units, sampler, 130) as loader:
        loader.next(0), loader.next(1)
        with pytest.raises(IndexError, match="the rows of step 2 are not decided"):
            loader.next(2)


def test_units_may_be_a_list(examples: list[TokenizedExample]) -> None:
    with BatchLoader([[example] for example in examples], build_sampler(), 130) as loader:
        assert sum(len(batch.lengths.sequences) for batch in batches(loader)) == 30


class ComputeRecorder(TorchDispatchMode):
    """Records the functions that PyTorch computes meanwhile, views excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not function.is_view:
            self.seen.add(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_packing_has_pytorch_compute_nothing(padded: bool) -> None:
    # OpenMP would start threads for the loader's threads too, and with more threads than cores the model's would sleep.
    units = [[TokenizedExample(list(range(50 + extra)), [True] * (50 + extra))] for extra in range(4)]
    with ComputeRecorder() as recorder:
        pack(units, padded=padded)
    assert not recorder.seen
