"""Self-paced learning: which records are open is what the losses that were told make it."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain.models.packing import Unit
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import CurriculumConfig, LoaderConfig, PhaseConfig
from posttrain.train.data.loader import BatchLoader
from posttrain.train.data.rank_partition import RankPartition

COUNT, BATCH, STEPS = 60, 4, 40
FIRST = np.random.default_rng(0).permutation(COUNT).astype(np.float32) / 10 + 1
MakeUnits = Callable[..., list[Unit]]


def paced(**settings: Any) -> CurriculumConfig:
    values = {"name": "self_paced", "start": 0.2, "every": 5, "growth": 1.25, "duration": 0.75}
    return CurriculumConfig.read(values | settings, "here")


def order(*stages: PhaseConfig, batch_size: int = BATCH, first: np.ndarray = FIRST) -> BatchSampler:
    stages = stages or (PhaseConfig(steps=STEPS, curriculum=paced()),)
    return BatchSampler(len(first), batch_size, 3, stages, difficulties=first, lengths=np.arange(len(first)))


def losses(step: int, rows: list[int]) -> np.ndarray:
    """What a step measures: anything that hangs on both."""
    return np.random.default_rng([step, *rows]).uniform(0.5, 8, len(rows)).astype(np.float32)


def tell(one: BatchSampler, step: int) -> None:
    one.observe(step, 1.0, losses(step, one.rows(step)) if one.wants_unit_losses(step) else None)


def paced_order(steps: int, **given: Any) -> BatchSampler:
    sampler = order(**given)
    for step in range(steps):
        tell(sampler, step)
    return sampler


def test_open_are_the_records_whose_latest_loss_is_low_enough() -> None:
    """Against the definition, v_i = 1 where L_i <= threshold, from all that was told."""
    sampler, known = order(), FIRST.astype(float)
    threshold = np.sort(known)[11]  # of the 60 records the 12 easiest are open
    met: list[set[int]] = []
    for step in range(30):
        if step % 5 == 0:
            opened = set(np.flatnonzero(known <= threshold * 1.25 ** (step // 5)).tolist())
            assert sampler.decided >= step + 5
        rows = sampler.rows(step)
        assert len(set(rows)) == BATCH
        assert set(rows) <= opened
        met.append(set(rows) - set(np.flatnonzero(threshold >= FIRST).tolist()))
        measured = losses(step, rows)
        sampler.observe(step, 1.0, measured)
        known[rows] = measured
    assert any(met[5:]), "harder ones came in"
    assert not any(met[:5])
    assert sampler.decided == STEPS
    assert sorted(row for step in range(30, 40) for row in sampler.rows(step)) == sorted(
        {row for step in range(30, 40) for row in sampler.rows(step)}
    ), "then all come in passes"


def test_records_that_the_model_forgets_leave() -> None:
    sampler = order()
    for step in range(5):
        sampler.observe(step, 1.0, np.full(BATCH, 100.0, np.float32))
    removed = {row for step in range(5) for row in sampler.rows(step)}
    assert not removed & {row for step in range(5, 10) for row in sampler.rows(step)}


def test_a_batch_is_open_at_least() -> None:
    """The easiest by their latest losses, where no record's is low enough."""
    first = np.arange(1, 9, dtype=np.float32)
    sampler = order(PhaseConfig(steps=8, curriculum=paced(every=2, duration=1.0)), first=first)
    for step in range(2):
        sampler.observe(
            step, 1.0, np.array([100, 101, 102, 103], np.float32)[np.argsort(np.argsort(sampler.rows(step)))]
        )
    assert sorted(sampler.rows(2)) == [4, 5, 6, 7]


def test_what_is_no_number_changes_nothing() -> None:
    plain, lost = order(), order()
    for step in range(5):
        plain.observe(step, 1.0, FIRST[plain.rows(step)])
        lost.observe(step, float("nan"), np.full(BATCH, np.nan, np.float32))
    assert [plain.rows(step) for step in range(10)] == [lost.rows(step) for step in range(10)]


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 6, 17, 29, 30, 33, 40])
def test_it_goes_on_from_any_step(kept: int) -> None:
    whole = paced_order(STEPS)
    again = order()
    again.load_state(json.loads(json.dumps(paced_order(kept).state())))
    for step in range(kept, STEPS):
        tell(again, step)
    assert [again.rows(step) for step in range(STEPS)] == [whole.rows(step) for step in range(STEPS)]
    assert again.state() == whole.state()


def test_it_goes_back_in_its_own_training() -> None:
    """As after a step that went wrong: what was told since is forgotten."""
    sampler = paced_order(12)
    state = json.loads(json.dumps(sampler.state()))
    for step in range(12, 27):
        tell(sampler, step)
    sampler.load_state(state)
    assert sampler.state() == state
    for step in range(12, STEPS):
        tell(sampler, step)
    assert sampler.state() == paced_order(STEPS).state()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": 5}, "another size or number"),
        ({"first": FIRST[:30]}, "opened other records"),
        ({"stages": [PhaseConfig(steps=STEPS, curriculum=paced(every=6))]}, "another size or number"),
        ({"stages": [PhaseConfig(steps=STEPS, curriculum=paced(duration=1.0))]}, "another size or number"),
        ({"stages": [PhaseConfig(steps=STEPS, curriculum=paced(every=3))]}, "looked at them 4 times"),
        ({"stages": [PhaseConfig(steps=STEPS, curriculum=paced(name="adaptive"))]}, "is of another curriculum"),
    ],
)
def test_it_does_not_go_on_from_another_one(given: dict[str, Any], says: str) -> None:
    now = order(*given.pop("stages", []), **given)
    with pytest.raises(UserError, match=rf"train\.stages\.0: .*{says}"):
        now.load_state(paced_order(12).state())


def test_another_growth_holds_from_the_next_look_on() -> None:
    before = paced_order(12)
    now = order(PhaseConfig(steps=STEPS, curriculum=paced(growth=4.0)))
    now.load_state(before.state())
    assert [now.rows(step) for step in range(15)] == [before.rows(step) for step in range(15)]
    for step in range(12, 20):
        tell(now, step)
    assert max(FIRST[row] for row in now.rows(16)) > 4


def test_losses_must_be_told() -> None:
    sampler = order()
    for wrong in (None, np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="step 0 has 4 records"):
            order().observe(0, 1.0, wrong)
    tell(sampler, 0)
    with pytest.raises(ValueError, match="step 0 does not follow 1 observed steps"):
        tell(sampler, 0)


def test_it_has_no_other_difficulty() -> None:
    with pytest.raises(UserError, match="self_paced uses the records' own losses"):
        paced(difficulty="score")


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ("distill", r"train\.curriculum\.name: distill measures no likelihood of single records"),
        ("reward", "reward has no loss before training"),
    ],
)
def test_objectives_that_measure_no_likelihood(objective: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        training_phases(TrainConfig(objective=objective, curriculum=paced()))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_are_told_the_same_decide_the_same(size: int) -> None:
    lengths = np.random.default_rng(1).integers(5, 50, COUNT)
    whole = paced_order(STEPS)
    orders = [order() for _ in range(size)]
    worlds = [RankPartition(item, lengths, size) for item in orders]
    for step in range(STEPS):
        met = []
        for rank, (item, world) in enumerate(zip(orders, worlds, strict=True)):
            met += [row for row, its in zip(item.rows(step), world.ranks(step), strict=True) if its == rank]
            tell(item, step)
        assert sorted(met) == sorted(whole.rows(step))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [1, 8])
def test_steps_that_are_made_ahead_wait_for_the_losses(make_units: MakeUnits, workers: int, prefetch: int) -> None:
    units, sampler, whole = make_units([6] * COUNT), order(), paced_order(STEPS)
    with BatchLoader(units, sampler, 100, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        for batch in loader:
            assert [row for rows in batch.rows for row in rows] == whole.rows(batch.step)
            tell(sampler, batch.step)
