"""Loaders stop at any sample and resume, in any number of threads and processes."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.models.chat import TokenizedExample
from posttrain.store.errors import UserError
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import LoaderConfig, PhaseConfig
from posttrain.train.data.loader import BatchLoader
from posttrain.train.data.row_loader import RowBatch, RowLoader
from posttrain.train.data.token_set import Tokens, TokenSet

COUNT = 23
OPTIONS = [(0, 1), (1, 2), (3, 5)]
"""Threads, and steps ahead."""


def build_sampler(seed: int = 3, batch_size: int = 5) -> BatchSampler:
    return BatchSampler(COUNT, batch_size, seed, [PhaseConfig(epochs=2)])


def config(options: tuple[int, int] = (0, 1)) -> LoaderConfig:
    return LoaderConfig(workers=options[0], prefetch=options[1])


def content(batch: RowBatch) -> tuple[Any, ...]:
    rows = [{name: values.tolist() for name, values in row.items()} for row in batch.packed]
    return batch.step, batch.epoch, batch.rows, rows


@pytest.fixture
def units(make_units: Callable[..., list[list[TokenizedExample]]], make_set: Callable[..., TokenSet]) -> TokenSet:
    lengths = np.random.default_rng(1).integers(2, 40, COUNT).tolist()
    return make_set(make_units(lengths), 150)


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_do_not_depend_on_threads(units: TokenSet, options: tuple[int, int]) -> None:
    assert len(units.shards) > 2
    with (
        RowLoader(units, build_sampler(), 64) as reference,
        RowLoader(units, build_sampler(), 64, config=config(options)) as loader,
    ):
        expected = [content(batch) for batch in reference]
        assert [content(batch) for batch in loader] == expected
    assert [(step, epoch) for step, epoch, *_ in expected] == [(step, step // 5) for step in range(10)]
    assert [rows for _, _, rows, _ in expected] == [build_sampler().rows(step) for step in range(10)]
    for _, _, rows, packed in expected:
        assert [id for row in packed for id in row["ids"]] == [id for row in rows for id in units[row][0].ids]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loader_resumes_at_any_sample(units: TokenSet, options: tuple[int, int]) -> None:
    with RowLoader(units, build_sampler(), 64, config=config(options)) as loader:
        all_rows = [row for batch in loader for row in batch.rows]
        used = 0
        for step in range(build_sampler().steps):
            for samples in range(len(build_sampler().rows(step)) + 1):
                loader.seek(step)
                next(loader)
                state = json.loads(json.dumps(loader.state(samples)))
                loader.seek(0)
                loader.load_state(state)
                assert [row for batch in loader for row in batch.rows] == all_rows[used + samples :]
            used += len(build_sampler().rows(step))


def test_the_state_after_complete_steps(units: TokenSet) -> None:
    with BatchLoader(units, build_sampler(), 64) as loader:
        batches = [batch.rows for batch in loader]
        assert loader.state()["epoch"] is None
        for step in range(len(batches)):
            loader.seek(step)
            state = json.loads(json.dumps(loader.state()))
            assert state == {
                "set": units.id,
                "records": COUNT,
                "batch_size": 5,
                "seed": 3,
                "steps": 10,
                "epoch": step // 5,
                "step": step,
                "samples": 0,
                "world_size": 1,
                "since": [0, 0],
            }
            loader.seek(0)
            loader.load_state(state)
            assert [batch.rows for batch in loader] == batches[step:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_processes_share_the_rows_of_a_step(units: TokenSet, world_size: int) -> None:
    loaders = [RowLoader(units, build_sampler(), 64, rank=rank, world_size=world_size) for rank in range(world_size)]
    tokens = np.zeros(world_size, np.int64)
    for step in range(build_sampler().steps):
        rows, parts = build_sampler().rows(step), [next(loader) for loader in loaders]
        assert sorted(row for part in parts for row in part.rows) == sorted(rows)
        for rank, part in enumerate(parts):
            positions = [rows.index(row) for row in part.rows]
            assert positions == sorted(positions)
            tokens[rank] += len(part.packed.ids)
        if step < 5:
            assert np.ptp(tokens) <= units.longest.max()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2), (4, 3), (3, 16)])
def test_the_number_of_processes_may_change(units: TokenSet, before: int, after: int) -> None:
    first = [RowLoader(units, build_sampler(), 64, rank=rank, world_size=before) for rank in range(before)]
    for step in range(3):
        rows = sorted(row for loader in first for row in next(loader).rows)
        assert rows == sorted(build_sampler().rows(step))
    states = [loader.state(2) for loader in first]  # two of step 2's samples were used
    assert all(state == states[0] for state in states)
    second = [RowLoader(units, build_sampler(), 64, rank=rank, world_size=after) for rank in range(after)]
    for loader in second:
        loader.load_state(json.loads(json.dumps(states[0])))
    remaining = [sorted(row for loader in second for row in next(loader).rows) for _ in range(2, 10)]
    assert remaining == [sorted(build_sampler().rows(step)[2 if step == 2 else 0 :]) for step in range(2, 10)]
    fresh_loaders = [RowLoader(units, build_sampler(), 64, rank=rank, world_size=after) for rank in range(after)]
    second[0].seek(4)
    state = json.loads(json.dumps(second[0].state()))
    assert state["since"] == ([2, 2] if before != after else [0, 0])
    for fresh_loader, loader in zip(fresh_loaders, second, strict=True):
        fresh_loader.load_state(state)
        loader.seek(4)
        assert [batch.rows for batch in fresh_loader] == [batch.rows for batch in loader]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(OPTIONS), st.integers(0, 5), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    budget=st.integers(1, 100),
)
def test_every_sample_is_used_once_across_restarts(
    units: TokenSet, runs: list[tuple[int, tuple[int, int], int, int]], budget: int
) -> None:
    """Consecutive runs, each with its number of processes, threads, steps, and samples of the last step."""
    state, counts = None, Counter[int]()
    expected_counts = Counter(row for step in range(build_sampler().steps) for row in build_sampler().rows(step))
    for number, (world_size, options, steps, samples) in enumerate(runs):
        with ExitStack() as stack:
            build_loader = partial(
                RowLoader, units, build_sampler(), budget, config=config(options), world_size=world_size
            )
            loaders = [stack.enter_context(build_loader(rank=rank)) for rank in range(world_size)]
            for loader in loaders if state else []:
                loader.load_state(state)
            last = number == len(runs) - 1
            batches = list(zip(*(loader if last else islice(loader, steps) for loader in loaders), strict=True))
            used = None
            if batches and not last:
                used = min(samples, len(build_sampler().rows(batches[-1][0].step)))
            for step in batches:
                rows = build_sampler().rows(step[0].step)
                remaining = set(rows[:used]) if step is batches[-1] and used is not None else set(rows)
                for batch in step:
                    counts.update(row for row in batch.rows if row in remaining)
                    expected = [id for row in batch.rows for id in units[row][0].ids]
                    assert batch.packed.ids.tolist() == expected
            before = state["samples"] if state and len(batches) == 1 else 0
            states = [loader.state(None if used is None else max(used, before)) for loader in loaders]
            assert all(item == states[0] for item in states)
            state = json.loads(json.dumps(states[0]))
    assert counts == expected_counts


@pytest.mark.parametrize("world_size", [1, 3])
def test_used_samples_are_not_read_again(units: TokenSet, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    rows_read: list[int] = []
    take = TokenSet.take

    def record_rows(self: TokenSet, rows: list[int]) -> Tokens:
        rows_read.extend(rows)
        return take(self, rows)

    with RowLoader(units, build_sampler(), 64, world_size=world_size) as loader:
        loader.seek(9)
        next(loader)
        state = loader.state(1)
    monkeypatch.setattr(TokenSet, "take", record_rows)
    with RowLoader(units, build_sampler(), 64, world_size=world_size) as loader:
        loader.load_state(state)
        assert next(loader).rows == rows_read
        assert set(rows_read) <= set(build_sampler().rows(9)[1:])


def test_a_state_of_another_set_seed_or_batch_size_is_refused(
    units: TokenSet, make_units: Callable[..., list[list[TokenizedExample]]], make_set: Callable[..., TokenSet]
) -> None:
    other_set = make_set(make_units([7] * COUNT))
    with RowLoader(units, build_sampler(), 64) as loader:
        state = loader.state()
        for other_loader in (
            RowLoader(other_set, build_sampler(), 64),
            RowLoader(units, build_sampler(seed=4), 64),
            RowLoader(units, build_sampler(batch_size=6), 64),
        ):
            with pytest.raises(UserError, match=r"the loader's state has (set|seed|batch_size)"):
                other_loader.load_state(state)
        for samples in (-1, 0, 6):
            with pytest.raises(ValueError, match="the last step has no"):
                loader.state(samples)
    with pytest.raises(ValueError, match="rank 2 is not below the world size 2"):
        RowLoader(units, build_sampler(), 64, rank=2, world_size=2)
