"""The rows of every step: stages, mixes, lengths and curricula, and how often each record is met."""

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
from posttrain.train.data.record_columns import category_column, numeric_column

MakeRecords = Callable[..., pa.Table]


def stage(**settings: Any) -> PhaseConfig:
    return PhaseConfig.read(settings, "here")


def all_rows(order: BatchSampler) -> list[list[int]]:
    return [order.rows(step) for step in range(order.decided)]


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_one_stage_is_epoch_after_epoch(count: int, seed: int | None) -> None:
    order = BatchSampler(count, 4, seed, [stage(epochs=3)])
    passes = EpochPlan([MixPart(np.arange(count), count)], 4, seed)
    expected = [(batch // passes.batches, passes.rows(batch).tolist()) for batch in range(3 * passes.batches)]
    assert [(order.position(step).epoch, order.rows(step)) for step in range(order.steps)] == expected
    assert order.seen().tolist() == [3] * count
    assert order.seen(passes.batches).tolist() == [1] * count


def test_stages_go_on_from_each_other() -> None:
    order = BatchSampler(7, 4, 3, [stage(epochs=2), stage(steps=5, learning_rate=1e-5), stage(epochs=1)])
    places = [order.position(step) for step in range(order.steps)]
    assert [(place.phase, place.step, place.steps) for place in places] == [
        *((0, step, 4) for step in range(4)),
        *((1, step, 5) for step in range(5)),
        *((2, step, 2) for step in range(2)),
    ]
    assert [place.epoch for place in places] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5]
    assert [place.config.learning_rate for place in order.phases] == [None, 1e-5, None]
    passes = [order.rows(first) + order.rows(other) for first, other in ((0, 1), (2, 3), (4, 5), (6, 7), (9, 10))]
    assert all(sorted(rows) == list(range(7)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 5, "each is shuffled in its own way"
    assert order.seen().sum() == 4 * 7 + 4 + 7


@pytest.mark.parametrize("step", [-1, 4])
def test_there_is_no_such_step(step: int) -> None:
    order = BatchSampler(8, 4, 3, [stage(epochs=2)])
    for ask in (order.rows, order.position):
        with pytest.raises(IndexError):
            ask(step)


def test_a_mix_has_its_shares() -> None:
    sources = ["a"] * 30 + ["b"] * 10 + ["c"] * 5
    order = BatchSampler(45, 8, 3, [stage(mix={"a": 1, "b": 3}, epochs=4), stage(epochs=1)], kinds={"source": sources})
    mixed = order.phases[0].steps
    times = order.seen(mixed)
    # 40 records a pass: 10 of the 30 and 30 of the 10.
    assert times[:30].sum() == 40
    assert times[30:40].tolist() == [12] * 10
    assert times[40:].tolist() == [0] * 5
    assert set(times[:30]) == {1, 2}
    assert (order.seen() - times).tolist() == [1] * 45


def test_short_records_first(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.array([5, 80, 7, 8, 100, 6])
    with caplog.at_level(logging.INFO, "posttrain"):
        order = BatchSampler(6, 2, 3, [stage(max_length=8, epochs=2), stage(epochs=1)], lengths=lengths)
    assert order.seen(order.phases[0].steps).tolist() == [2, 0, 2, 2, 0, 2]
    assert order.seen().tolist() == [3, 1, 3, 3, 1, 3]
    assert "train.stages.0: 2 of 6 records are not used" in caplog.text
    with pytest.raises(UserError, match=r"train\.stages\.0\.max_length: all records are longer"):
        BatchSampler(2, 2, 3, [stage(max_length=8, epochs=1)], lengths=np.array([9, 10]))


def test_easy_records_come_first_and_all_in_the_end() -> None:
    difficulties = np.random.default_rng(0).permutation(100).astype(np.float32)
    curriculum = CurriculumConfig(name="fixed", start=0.1, duration=0.5, pacing="linear")
    order = BatchSampler(100, 5, 3, [stage(epochs=4, curriculum=curriculum)], difficulties=difficulties)
    assert order.steps == 80
    for step in range(40):
        rows = order.rows(step)
        assert len(set(rows)) == 5
        assert difficulties[rows].max() < 100 * (0.1 + 0.9 * step / 40) + 0.5
    assert max(difficulties[order.rows(step)].max() for step in range(35, 40)) > 60
    assert (order.seen() - order.seen(40)).tolist() == [2] * 100, "then come passes over all"
    other = BatchSampler(100, 5, 4, [stage(epochs=4, curriculum=curriculum)], difficulties=difficulties)
    assert all_rows(other) != all_rows(order)


def adaptive() -> BatchSampler:
    curriculum = CurriculumConfig(name="adaptive", start=0.1, duration=0.5, every=5, target=0.5)
    stages = [stage(steps=60, curriculum=curriculum), stage(epochs=1)]
    return BatchSampler(100, 5, 3, stages, difficulties=np.arange(100))


def test_an_adaptive_curriculum_waits_for_the_loss() -> None:
    order = adaptive()
    assert order.decided == 5
    assert max(max(rows) for rows in all_rows(order)) < 10
    with pytest.raises(IndexError, match="the rows of step 5 are not decided"):
        order.rows(5)
    for step in range(10):
        order.observe(step, 4.0 if step < 5 else 3.0)
        assert order.decided == 5 * (1 + (step + 1) // 5)
    assert max(max(order.rows(step)) for step in range(5, 10)) < 10, "nothing was learnt yet"
    assert 10 <= max(max(order.rows(step)) for step in range(10, 15)) < 55
    for step in range(10, 25):
        order.observe(step, 3.0)
    assert order.decided == order.steps == 80, "from step 30 on all are open, whatever the loss"
    order.observe(25, 3.0)
    assert order.seen().sum() == 80 * 5


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 6, 24, 40])
def test_it_goes_on_from_any_step(kept: int) -> None:
    def loss(step: int) -> float:
        return 4.0 - step / 20

    whole = adaptive()
    met = []
    for step in range(whole.steps):
        met.append(whole.rows(step))
        whole.observe(step, loss(step))
    part = adaptive()
    for step in range(kept):
        part.observe(step, loss(step))
    again = adaptive()
    again.load_state(json.loads(json.dumps(part.state())))
    for step in range(kept, again.steps):
        assert again.rows(step) == met[step]
        again.observe(step, loss(step))
    assert again.seen().tolist() == whole.seen().tolist()


ADAPTIVE = CurriculumConfig(name="adaptive", every=5)
PLAIN, OPENING = stage(steps=10), stage(steps=10, curriculum=ADAPTIVE)
EVERY_3 = stage(steps=10, curriculum=CurriculumConfig(name="adaptive", every=3))


def after_7(*stages: PhaseConfig, state: Any = None) -> BatchSampler:
    order = BatchSampler(100, 5, 3, stages, difficulties=np.arange(100))
    for step in range(7 if state is None else 0):
        order.observe(step, 1.0)
    if state is not None:
        order.load_state(json.loads(json.dumps(state)))
    return order


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ([OPENING], [PLAIN], "0: .* seen 7 steps and looked at them 1 times, and the config's .* seen 0 "),
        ([PLAIN], [OPENING], "0: .* seen 0 steps and looked at them 0 times, and the config's .* seen 7 "),
        ([OPENING], [EVERY_3], "0: .* looked at them 1 times, and the config's .* looked at them 2 times"),
        ([stage(steps=2), OPENING], [PLAIN], "1: .* seen 5 steps .* the config's .* seen 0 "),
        ([stage(steps=2), OPENING], [stage(steps=3), OPENING], "1: .* seen 5 steps .* the config's .* seen 4 "),
    ],
)
def test_it_does_not_go_on_from_another_curriculum(
    before: list[PhaseConfig], now: list[PhaseConfig], says: str
) -> None:
    with pytest.raises(UserError, match=rf"train\.stages\.{says}") as caught:
        after_7(*now, state=after_7(*before).state())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [([PLAIN, OPENING], [PLAIN]), ([PLAIN], [PLAIN, OPENING]), ([PLAIN, OPENING], [stage(steps=20), PLAIN])],
)
def test_a_curriculum_that_was_not_begun_may_change(before: list[PhaseConfig], now: list[PhaseConfig]) -> None:
    order = after_7(*now, state=after_7(*before).state())
    assert order.state()["steps"] == 7
    for step in range(7, order.steps):
        assert order.rows(step)
        order.observe(step, 1.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "either epochs or steps"),
        ({"epochs": 1, "steps": 1}, "either epochs or steps"),
        ({"epochs": 1, "mix": {}}, "mix"),
        ({"epochs": 1, "mix": {"a": 0}}, "above 0"),
        ({"epochs": 1, "mix": {"a": 1}, "curriculum": {"name": "fixed"}}, "a mix or a curriculum"),
    ],
)
def test_stages_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        stage(**settings)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"mix": {"a": 1}}, {}),
        ({"mix": {"a": 1}}, {"kinds": {"source": ["a"]}}),
        ({"max_length": 9}, {}),
        ({"curriculum": {"name": "fixed"}}, {}),
        ({"curriculum": {"name": "fixed"}}, {"difficulties": np.array([1.0, np.nan])}),
    ],
)
def test_what_a_stage_needs_must_be_known(settings: dict[str, Any], known: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not known"):
        BatchSampler(2, 1, 0, [stage(epochs=1, **settings)], **known)


def test_what_the_data_say(make_records: MakeRecords) -> None:
    records = make_records([("hi", "x"), ("hello", "y")])
    meta = pa.array([json.dumps({"topic": topic, "score": 0.5}) for topic in ("cards", "loans")])
    records = records.set_column(records.schema.get_field_index("meta"), "meta", meta)
    assert category_column(records, "source", "here") == ["f", "f"]
    assert category_column(records, "topic", "here") == ["cards", "loans"]
    assert numeric_column(records, "score", "here").tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match=f"f:1: record {1:020x}: it has no `dataset`; .* in here"):
        category_column(records, "dataset", "here")
    with pytest.raises(UserError, match=f"f:1: record {1:020x}: it has no number `topic` but `cards`; .* in here"):
        numeric_column(records, "topic", "here")
