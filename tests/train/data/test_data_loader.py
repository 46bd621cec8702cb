"""Loaders stop at any sample and go on, in any number of threads and processes."""

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
WAYS = [(0, 1), (1, 2), (3, 5)]
"""Threads, and steps ahead."""


def order(seed: int = 3, batch_size: int = 5) -> BatchSampler:
    return BatchSampler(COUNT, batch_size, seed, [PhaseConfig(epochs=2)])


def config(way: tuple[int, int] = (0, 1)) -> LoaderConfig:
    return LoaderConfig(workers=way[0], prefetch=way[1])


def content(batch: RowBatch) -> tuple[Any, ...]:
    rows = [{name: values.tolist() for name, values in row.items()} for row in batch.packed]
    return batch.step, batch.epoch, batch.rows, rows


@pytest.fixture
def units(make_units: Callable[..., list[list[TokenizedExample]]], make_set: Callable[..., TokenSet]) -> TokenSet:
    lengths = np.random.default_rng(1).integers(2, 40, COUNT).tolist()
    return make_set(make_units(lengths), 150)


@pytest.mark.parametrize("way", WAYS)
def test_rows_do_not_depend_on_threads(units: TokenSet, way: tuple[int, int]) -> None:
    assert len(units.shards) > 2
    with RowLoader(units, order(), 64) as alone, RowLoader(units, order(), 64, config=config(way)) as loader:
        expected = [content(batch) for batch in alone]
        assert [content(batch) for batch in loader] == expected
    assert [(step, epoch) for step, epoch, *_ in expected] == [(step, step // 5) for step in range(10)]
    assert [rows for _, _, rows, _ in expected] == [order().rows(step) for step in range(10)]
    for _, _, rows, packed in expected:
        assert [id for row in packed for id in row["ids"]] == [id for row in rows for id in units[row][0].ids]


@pytest.mark.parametrize("way", WAYS)
def test_it_stops_at_any_sample_and_goes_on(units: TokenSet, way: tuple[int, int]) -> None:
    with RowLoader(units, order(), 64, config=config(way)) as loader:
        everything = [row for batch in loader for row in batch.rows]
        met = 0
        for step in range(order().steps):
            for samples in range(len(order().rows(step)) + 1):
                loader.seek(step)
                next(loader)
                state = json.loads(json.dumps(loader.state(samples)))
                loader.seek(0)
                loader.load_state(state)
                assert [row for batch in loader for row in batch.rows] == everything[met + samples :]
            met += len(order().rows(step))


def test_a_state_after_whole_steps(units: TokenSet) -> None:
    with BatchLoader(units, order(), 64) as loader:
        whole = [batch.rows for batch in loader]
        assert loader.state()["epoch"] is None
        for step in range(len(whole)):
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
            assert [batch.rows for batch in loader] == whole[step:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_processes_together_load_what_one_would(units: TokenSet, world_size: int) -> None:
    loaders = [RowLoader(units, order(), 64, rank=rank, world_size=world_size) for rank in range(world_size)]
    tokens = np.zeros(world_size, np.int64)
    for step in range(order().steps):
        whole, parts = order().rows(step), [next(loader) for loader in loaders]
        assert sorted(row for part in parts for row in part.rows) == sorted(whole)
        for rank, part in enumerate(parts):
            places = [whole.index(row) for row in part.rows]
            assert places == sorted(places)
            tokens[rank] += len(part.packed.ids)
        if step < 5:
            assert np.ptp(tokens) <= units.longest.max()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2), (4, 3), (3, 16)])
def test_another_number_of_processes_goes_on(units: TokenSet, before: int, after: int) -> None:
    first = [RowLoader(units, order(), 64, rank=rank, world_size=before) for rank in range(before)]
    for step in range(3):
        met = sorted(row for loader in first for row in next(loader).rows)
        assert met == sorted(order().rows(step))
    states = [loader.state(2) for loader in first]  # two of step 2's samples were used
    assert all(state == states[0] for state in states)
    second = [RowLoader(units, order(), 64, rank=rank, world_size=after) for rank in range(after)]
    for loader in second:
        loader.load_state(json.loads(json.dumps(states[0])))
    left = [sorted(row for loader in second for row in next(loader).rows) for _ in range(2, 10)]
    assert left == [sorted(order().rows(step)[2 if step == 2 else 0 :]) for step in range(2, 10)]
    again = [RowLoader(units, order(), 64, rank=rank, world_size=after) for rank in range(after)]
    second[0].seek(4)
    state = json.loads(json.dumps(second[0].state()))
    assert state["since"] == ([2, 2] if before != after else [0, 0])
    for one, loader in zip(again, second, strict=True):
        one.load_state(state)
        loader.seek(4)
        assert [batch.rows for batch in one] == [batch.rows for batch in loader]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(WAYS), st.integers(0, 5), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    budget=st.integers(1, 100),
)
def test_whatever_happens_every_sample_is_met_once(
    units: TokenSet, runs: list[tuple[int, tuple[int, int], int, int]], budget: int
) -> None:
    """Runs one after another, each of so many processes, with so many threads, steps, and samples of the last step."""
    state, met = None, Counter[int]()
    whole = Counter(row for step in range(order().steps) for row in order().rows(step))
    for number, (world_size, way, steps, samples) in enumerate(runs):
        with ExitStack() as stack:
            made_of = partial(RowLoader, units, order(), budget, config=config(way), world_size=world_size)
            loaders = [stack.enter_context(made_of(rank=rank)) for rank in range(world_size)]
            for loader in loaders if state else []:
                loader.load_state(state)
            last = number == len(runs) - 1
            batches = list(zip(*(loader if last else islice(loader, steps) for loader in loaders), strict=True))
            used = None
            if batches and not last:
                used = min(samples, len(order().rows(batches[-1][0].step)))
            for step in batches:
                rows = order().rows(step[0].step)
                left = set(rows[:used]) if step is batches[-1] and used is not None else set(rows)
                for batch in step:
                    met.update(row for row in batch.rows if row in left)
                    expected = [id for row in batch.rows for id in units[row][0].ids]
                    assert batch.packed.ids.tolist() == expected
            before = state["samples"] if state and len(batches) == 1 else 0
            states = [loader.state(None if used is None else max(used, before)) for loader in loaders]
            assert all(item == states[0] for item in states)
            state = json.loads(json.dumps(states[0]))
    assert met == whole


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_was_met_is_not_read_again(units: TokenSet, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    read: list[int] = []
    take = TokenSet.take

    def noted(self: TokenSet, rows: list[int]) -> Tokens:
        read.extend(rows)
        return take(self, rows)

    with RowLoader(units, order(), 64, world_size=world_size) as loader:
        loader.seek(9)
        next(loader)
        state = loader.state(1)
    monkeypatch.setattr(TokenSet, "take", noted)
    with RowLoader(units, order(), 64, world_size=world_size) as loader:
        loader.load_state(state)
        assert next(loader).rows == read
        assert set(read) <= set(order().rows(9)[1:])


def test_a_state_of_something_else_is_refused(
    units: TokenSet, make_units: Callable[..., list[list[TokenizedExample]]], make_set: Callable[..., TokenSet]
) -> None:
    other = make_set(make_units([7] * COUNT))
    with RowLoader(units, order(), 64) as loader:
        state = loader.state()
        for changed in (
            RowLoader(other, order(), 64),
            RowLoader(units, order(seed=4), 64),
            RowLoader(units, order(batch_size=6), 64),
        ):
            with pytest.raises(UserError, match=r"the loader's state has (set|seed|batch_size)"):
                changed.load_state(state)
        for samples in (-1, 0, 6):
            with pytest.raises(ValueError, match="the last step has no"):
                loader.state(samples)
    with pytest.raises(ValueError, match="rank 2 is not below the world size 2"):
        RowLoader(units, order(), 64, rank=2, world_size=2)
