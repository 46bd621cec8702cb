"""The rows of every step: phases, mixes, lengths and curricula, and how often each record is used."""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.store.errors import UserError
from posttrain.train.data.batch_sampler import BatchSampler, EpochPlan
from posttrain.train.data.config import CurriculumConfig, PhaseConfig
from posttrain.train.data.mix import MixPart
from posttrain.train.data.record_columns import RecordColumns

MakeRecords = Callable[..., pa.Table]


def phase(**settings: Any) -> PhaseConfig:
    return PhaseConfig.read(settings, "here")


def all_rows(sampler: BatchSampler) -> list[list[int]]:
    return [sampler.rows(step) for step in range(sampler.decided)]


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_a_phase_is_consecutive_epochs(count: int, seed: int | None) -> None:
    sampler = BatchSampler(count, 4, seed, [phase(epochs=3)])
    plan = EpochPlan([MixPart(np.arange(count), count)], 4, seed)
    expected = [(batch // plan.batches, plan.rows(batch).tolist()) for batch in range(3 * plan.batches)]
    assert [(sampler.position(step).epoch, sampler.rows(step)) for step in range(sampler.steps)] == expected
    assert sampler.seen().tolist() == [3] * count
    assert sampler.seen(plan.batches).tolist() == [1] * count


def test_a_phase_continues_the_epoch_count() -> None:
    sampler = BatchSampler(7, 4, 3, [phase(epochs=2), phase(steps=5, learning_rate=1e-5), phase(epochs=1)])
    positions = [sampler.position(step) for step in range(sampler.steps)]
    assert [(position.phase, position.step, position.steps) for position in positions] == [
        *((0, step, 4) for step in range(4)),
        *((1, step, 5) for step in range(5)),
        *((2, step, 2) for step in range(2)),
    ]
    assert [position.epoch for position in positions] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5]
    assert [position.config.learning_rate for position in sampler.phases] == [None, 1e-5, None]
    rows_by_epoch = [
        sampler.rows(first) + sampler.rows(other) for first, other in ((0, 1), (2, 3), (4, 5), (6, 7), (9, 10))
    ]
    assert all(sorted(rows) == list(range(7)) for rows in rows_by_epoch)
    assert len({tuple(rows) for rows in rows_by_epoch}) == 5, "each is shuffled in its own way"
    assert sampler.seen().sum() == 4 * 7 + 4 + 7


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_out_of_range_is_an_error(step: int) -> None:
    sampler = BatchSampler(8, 4, 3, [phase(epochs=2)])
    for method in (sampler.rows, sampler.position):
        with pytest.raises(IndexError):
            method(step)


def test_a_mix_has_its_shares() -> None:
    sources = ["a"] * 30 + ["b"] * 10 + ["c"] * 5
    sampler = BatchSampler(
        45, 8, 3, [phase(mix={"a": 1, "b": 3}, epochs=4), phase(epochs=1)], kinds={"source": sources}
    )
    mixed_steps = sampler.phases[0].steps
    times = sampler.seen(mixed_steps)
    # 40 records a pass: 10 of the 30 and 30 of the 10.
    assert times[:30].sum() == 40
    assert times[30:40].tolist() == [12] * 10
    assert times[40:].tolist() == [0] * 5
    assert set(times[:30]) == {1, 2}
    assert (sampler.seen() - times).tolist() == [1] * 45


def test_max_length_excludes_longer_records(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.array([5, 80, 7, 8, 100, 6])
    with caplog.at_level(logging.INFO, "posttrain"):
        sampler = BatchSampler(6, 2, 3, [phase(max_length=8, epochs=2), phase(epochs=1)], lengths=lengths)
    assert sampler.seen(sampler.phases[0].steps).tolist() == [2, 0, 2, 2, 0, 2]
    assert sampler.seen().tolist() == [3, 1, 3, 3, 1, 3]
    assert "train.phases.0: 2 of 6 records are not used" in caplog.text
    with pytest.raises(UserError, match=r"train\.phases\.0\.max_length: all records are longer"):
        BatchSampler(2, 2, 3, [phase(max_length=8, epochs=1)], lengths=np.array([9, 10]))


def test_a_fixed_curriculum_starts_with_easy_records() -> None:
    difficulties = np.random.default_rng(0).permutation(100).astype(np.float32)
    curriculum = CurriculumConfig(name="fixed", start=0.1, duration=0.5)
    sampler = BatchSampler(100, 5, 3, [phase(epochs=4, curriculum=curriculum)], difficulties=difficulties)
    assert sampler.steps == 80
    for step in range(40):
        rows = sampler.rows(step)
        assert len(set(rows)) == 5
        assert difficulties[rows].max() < 100 * (0.01 + 0.99 * step / 40) ** 0.5 + 0.5
    assert max(difficulties[sampler.rows(step)].max() for step in range(35, 40)) > 60
    assert (sampler.seen() - sampler.seen(40)).tolist() == [2] * 100, "then come passes over all"
    other = BatchSampler(100, 5, 4, [phase(epochs=4, curriculum=curriculum)], difficulties=difficulties)
    assert all_rows(other) != all_rows(sampler)


def test_each_step_draws_its_own_rows_and_all_open_ones_as_often() -> None:
    curriculum = CurriculumConfig(name="adaptive", start=0.25, duration=1.0, every=2000)
    sampler = BatchSampler(100, 5, 1, [phase(steps=3000, curriculum=curriculum)], difficulties=np.arange(100))
    drawn = np.bincount(np.concatenate(all_rows(sampler)))
    # Each of 25 open rows is in a step with a probability of 0.2.
    assert sampler.decided == 2000
    assert len(drawn) == 25
    assert np.abs(drawn - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


def adaptive_sampler() -> BatchSampler:
    curriculum = CurriculumConfig(name="adaptive", start=0.1, duration=0.5, every=5, target=0.5)
    phases = [phase(steps=60, curriculum=curriculum), phase(epochs=1)]
    return BatchSampler(100, 5, 3, phases, difficulties=np.arange(100))


def test_an_adaptive_curriculum_waits_for_the_loss() -> None:
    sampler = adaptive_sampler()
    assert sampler.decided == 5
    assert max(max(rows) for rows in all_rows(sampler)) < 10
    with pytest.raises(IndexError, match="the rows of step 5 are not decided"):
        sampler.rows(5)
    for step in range(10):
        sampler.observe(step, 4.0 if step < 5 else 3.0)
        assert sampler.decided == 5 * (1 + (step + 1) // 5)
    assert max(max(sampler.rows(step)) for step in range(5, 10)) < 10, "nothing was learnt yet"
    assert 10 <= max(max(sampler.rows(step)) for step in range(10, 15)) < 55
    for step in range(10, 25):
        sampler.observe(step, 3.0)
    assert sampler.decided == sampler.steps == 80, "from step 30 on all records are open, whatever the loss"
    sampler.observe(25, 3.0)
    assert sampler.seen().sum() == 80 * 5


def test_the_data_change_with_phases_and_where_a_curriculum_opens_many_records() -> None:
    sampler = adaptive_sampler()
    for step in range(60):
        sampler.observe(step, 4.0 if step < 10 else 3.0)
    # A fall by a quarter opens half of the rest; then come the end of the curriculum and the second phase.
    assert [step for step in range(sampler.steps) if sampler.changes_data(step)] == [15, 30, 60]


def test_the_data_do_not_change_where_a_curriculum_opens_little_by_little() -> None:
    phases = [phase(steps=200, curriculum=CurriculumConfig(name="fixed", start=0.2))]
    sampler = BatchSampler(100, 5, 3, phases, difficulties=np.arange(100))
    assert not any(map(sampler.changes_data, range(200)))


@pytest.mark.parametrize("observed_steps", [0, 1, 4, 5, 6, 24, 40])
def test_a_sampler_resumes_at_any_step(observed_steps: int) -> None:
    def loss(step: int) -> float:
        return 4.0 - step / 20 if step < 10 else 3.5

    uninterrupted = adaptive_sampler()
    expected = []
    for step in range(uninterrupted.steps):
        expected.append(uninterrupted.rows(step))
        uninterrupted.observe(step, loss(step))
    interrupted = adaptive_sampler()
    for step in range(observed_steps):
        interrupted.observe(step, loss(step))
    resumed = adaptive_sampler()
    resumed.load_state(json.loads(json.dumps(interrupted.state())), observed_steps)
    for step in range(observed_steps, resumed.steps):
        assert resumed.rows(step) == expected[step]
        resumed.observe(step, loss(step))
    assert resumed.seen().tolist() == uninterrupted.seen().tolist()


ADAPTIVE = CurriculumConfig(name="adaptive", every=5)
NO_CURRICULUM, WITH_CURRICULUM = phase(steps=10), phase(steps=10, curriculum=ADAPTIVE)
EVERY_3 = phase(steps=10, curriculum=CurriculumConfig(name="adaptive", every=3))


def sampler_after_7_steps(*phases: PhaseConfig, state: Any = None) -> BatchSampler:
    sampler = BatchSampler(100, 5, 3, phases, difficulties=np.arange(100))
    for step in range(7 if state is None else 0):
        sampler.observe(step, 1.0)
    if state is not None:
        sampler.load_state(json.loads(json.dumps(state)), 7)
    return sampler


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            [WITH_CURRICULUM],
            [NO_CURRICULUM],
            "0: .* seen 7 steps and looked at them 1 times, and the config's .* seen 0 ",
        ),
        (
            [NO_CURRICULUM],
            [WITH_CURRICULUM],
            "0: .* seen 0 steps and looked at them 0 times, and the config's .* seen 7 ",
        ),
        ([WITH_CURRICULUM], [EVERY_3], "0: .* looked at them 1 times, and the config's .* looked at them 2 times"),
        ([phase(steps=2), WITH_CURRICULUM], [NO_CURRICULUM], "1: .* seen 5 steps .* the config's .* seen 0 "),
        (
            [phase(steps=2), WITH_CURRICULUM],
            [phase(steps=3), WITH_CURRICULUM],
            "1: .* seen 5 steps .* the config's .* seen 4 ",
        ),
    ],
)
def test_another_curriculum_does_not_resume(before: list[PhaseConfig], now: list[PhaseConfig], message: str) -> None:
    with pytest.raises(UserError, match=rf"train\.phases\.{message}") as caught:
        sampler_after_7_steps(*now, state=sampler_after_7_steps(*before).state())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([NO_CURRICULUM, WITH_CURRICULUM], [NO_CURRICULUM]),
        ([NO_CURRICULUM], [NO_CURRICULUM, WITH_CURRICULUM]),
        ([NO_CURRICULUM, WITH_CURRICULUM], [phase(steps=20), NO_CURRICULUM]),
    ],
)
def test_a_curriculum_that_has_not_started_may_change(before: list[PhaseConfig], now: list[PhaseConfig]) -> None:
    sampler = sampler_after_7_steps(*now, state=sampler_after_7_steps(*before).state())
    for step in range(7, sampler.steps):
        assert sampler.rows(step)
        sampler.observe(step, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either epochs or steps"),
        ({"epochs": 1, "steps": 1}, "either epochs or steps"),
        ({"epochs": 1, "mix": {}}, "mix"),
        ({"epochs": 1, "mix": {"a": 0}}, "above 0"),
        ({"epochs": 1, "mix": {"a": 1}, "curriculum": {"name": "fixed"}}, "a mix or a curriculum"),
    ],
)
def test_an_impossible_phase_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        phase(**settings)


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({"mix": {"a": 1}}, {}),
        ({"mix": {"a": 1}}, {"kinds": {"source": ["a"]}}),
        ({"max_length": 9}, {}),
        ({"curriculum": {"name": "fixed"}}, {}),
        ({"curriculum": {"name": "fixed"}}, {"difficulties": np.array([1.0, np.nan])}),
    ],
)
def test_a_phase_needs_its_columns(settings: dict[str, Any], columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not known"):
        BatchSampler(2, 1, 0, [phase(epochs=1, **settings)], **columns)


def test_kinds_and_scores_come_from_the_records(make_records: MakeRecords) -> None:
    records = make_records([("hi", "x"), ("hello", "y")])
    meta = pa.array([json.dumps({"topic": topic, "score": 0.5}) for topic in ("cards", "loans")])
    records = records.set_column(records.schema.get_field_index("meta"), "meta", meta)
    assert RecordColumns(records).categories("source", "here") == ["f", "f"]
    assert RecordColumns(records).categories("topic", "here") == ["cards", "loans"]
    assert RecordColumns(records).numbers("score", "here").tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match=f"f:1: record {1:020x}: it has no `dataset`; .* in here"):
        RecordColumns(records).categories("dataset", "here")
    with pytest.raises(UserError, match=f"f:1: record {1:020x}: it has no number `topic` but `cards`; .* in here"):
        RecordColumns(records).numbers("topic", "here")


def test_equally_difficult_records_come_in_their_order() -> None:
    """Else the first batches would depend on how the platform sorts."""
    curriculum = {"name": "fixed", "start": 0.01, "duration": 1.0}
    difficulties = np.repeat([2.0, 1.0], 300)
    sampler = BatchSampler(600, 5, 3, [phase(epochs=4, curriculum=curriculum)], difficulties=difficulties)
    assert set(sampler.rows(0)) <= set(range(300, 306))
