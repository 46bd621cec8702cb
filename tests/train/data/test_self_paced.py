"""Self-paced learning: the observed losses decide which records are open."""

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


def self_paced(**settings: Any) -> CurriculumConfig:
    values = {"name": "self_paced", "start": 0.2, "every": 5, "growth": 1.25, "duration": 0.75}
    return CurriculumConfig.read(values | settings, "here")


def build_sampler(*phases: PhaseConfig, batch_size: int = BATCH, first: np.ndarray = FIRST) -> BatchSampler:
    phases = phases or (PhaseConfig(steps=STEPS, curriculum=self_paced()),)
    return BatchSampler(len(first), batch_size, 3, phases, difficulties=first, lengths=np.arange(len(first)))


def losses(step: int, rows: list[int]) -> np.ndarray:
    """Losses that depend on the step and its rows."""
    return np.random.default_rng([step, *rows]).uniform(0.5, 8, len(rows)).astype(np.float32)


def observe(sampler: BatchSampler, step: int) -> None:
    sampler.observe(step, 1.0, losses(step, sampler.rows(step)) if sampler.wants_unit_losses(step) else None)


def observed_sampler(steps: int, **options: Any) -> BatchSampler:
    sampler = build_sampler(**options)
    for step in range(steps):
        observe(sampler, step)
    return sampler


def test_records_with_a_low_latest_loss_are_open() -> None:
    """Against the definition, v_i = 1 where L_i <= threshold, from all observed losses."""
    sampler, latest_losses = build_sampler(), FIRST.astype(float)
    threshold = np.sort(latest_losses)[11]  # of the 60 records the 12 easiest are open
    harder_rows: list[set[int]] = []
    for step in range(30):
        if step % 5 == 0:
            open_rows = set(np.flatnonzero(latest_losses <= threshold * 1.25 ** (step // 5)).tolist())
            assert sampler.decided >= step + 5
        rows = sampler.rows(step)
        assert len(set(rows)) == BATCH
        assert set(rows) <= open_rows
        harder_rows.append(set(rows) - set(np.flatnonzero(threshold >= FIRST).tolist()))
        step_losses = losses(step, rows)
        sampler.observe(step, 1.0, step_losses)
        latest_losses[rows] = step_losses
    assert any(harder_rows[5:]), "harder records are opened"
    assert not any(harder_rows[:5])
    assert sampler.decided == STEPS
    assert sorted(row for step in range(30, 40) for row in sampler.rows(step)) == sorted(
        {row for step in range(30, 40) for row in sampler.rows(step)}
    ), "then come passes over all"


def test_records_with_a_risen_loss_are_closed() -> None:
    sampler = build_sampler()
    for step in range(5):
        sampler.observe(step, 1.0, np.full(BATCH, 100.0, np.float32))
    removed = {row for step in range(5) for row in sampler.rows(step)}
    assert not removed & {row for step in range(5, 10) for row in sampler.rows(step)}


def test_at_least_a_batch_is_open() -> None:
    """If no record's loss is low enough, the easiest by their latest losses are open."""
    first = np.arange(1, 9, dtype=np.float32)
    sampler = build_sampler(PhaseConfig(steps=8, curriculum=self_paced(every=2, duration=1.0)), first=first)
    for step in range(2):
        sampler.observe(
            step, 1.0, np.array([100, 101, 102, 103], np.float32)[np.argsort(np.argsort(sampler.rows(step)))]
        )
    assert sorted(sampler.rows(2)) == [4, 5, 6, 7]


def test_nan_losses_change_nothing() -> None:
    reference, sampler = build_sampler(), build_sampler()
    for step in range(5):
        reference.observe(step, 1.0, FIRST[reference.rows(step)])
        sampler.observe(step, float("nan"), np.full(BATCH, np.nan, np.float32))
    assert [reference.rows(step) for step in range(10)] == [sampler.rows(step) for step in range(10)]


@pytest.mark.parametrize("observed_steps", [0, 1, 4, 5, 6, 17, 29, 30, 33, 40])
def test_self_paced_sampling_resumes_at_any_step(observed_steps: int) -> None:
    uninterrupted = observed_sampler(STEPS)
    resumed = build_sampler()
    resumed.load_state(json.loads(json.dumps(observed_sampler(observed_steps).state())), observed_steps)
    for step in range(observed_steps, STEPS):
        observe(resumed, step)
    assert [resumed.rows(step) for step in range(STEPS)] == [uninterrupted.rows(step) for step in range(STEPS)]
    assert resumed.state() == uninterrupted.state()
    changes = [step for step in range(STEPS) if uninterrupted.changes_data(step)]
    assert changes
    assert [step for step in range(STEPS) if resumed.changes_data(step)] == changes


def test_an_earlier_state_of_the_same_training_loads() -> None:
    """As after a failed step: the losses observed since then are forgotten."""
    sampler = observed_sampler(12)
    state = json.loads(json.dumps(sampler.state()))
    for step in range(12, 27):
        observe(sampler, step)
    sampler.load_state(state, 12)
    assert sampler.state() == state
    for step in range(12, STEPS):
        observe(sampler, step)
    assert sampler.state() == observed_sampler(STEPS).state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5}, "another size or number"),
        ({"first": FIRST[:30]}, "opened other records"),
        ({"phases": [PhaseConfig(steps=STEPS, curriculum=self_paced(every=6))]}, "another size or number"),
        ({"phases": [PhaseConfig(steps=STEPS, curriculum=self_paced(duration=1.0))]}, "another size or number"),
        ({"phases": [PhaseConfig(steps=STEPS, curriculum=self_paced(every=3))]}, "looked at them 4 times"),
        ({"phases": [PhaseConfig(steps=STEPS, curriculum=self_paced(name="adaptive"))]}, "is of another curriculum"),
    ],
)
def test_another_self_paced_curriculum_does_not_resume(options: dict[str, Any], message: str) -> None:
    sampler = build_sampler(*options.pop("phases", []), **options)
    with pytest.raises(UserError, match=rf"train\.phases\.0: .*{message}"):
        sampler.load_state(observed_sampler(12).state(), 12)


def test_a_new_growth_applies_from_the_next_update() -> None:
    before = observed_sampler(12)
    resumed = build_sampler(PhaseConfig(steps=STEPS, curriculum=self_paced(growth=4.0)))
    resumed.load_state(before.state(), 12)
    assert [resumed.rows(step) for step in range(15)] == [before.rows(step) for step in range(15)]
    for step in range(12, 20):
        observe(resumed, step)
    assert max(FIRST[row] for row in resumed.rows(16)) > 4


def test_losses_must_be_observed() -> None:
    sampler = build_sampler()
    for wrong in (None, np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="step 0 has 4 records"):
            build_sampler().observe(0, 1.0, wrong)
    observe(sampler, 0)
    with pytest.raises(ValueError, match="step 0 does not follow 1 observed steps"):
        observe(sampler, 0)


def test_self_paced_refuses_a_difficulty() -> None:
    with pytest.raises(UserError, match="self_paced uses the records' own losses"):
        self_paced(difficulty="score")


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("distill", r"train\.phases\.N\.curriculum\.name: distill measures no likelihood of single records"),
        ("reward", "reward has no loss before training"),
    ],
)
def test_objectives_without_a_likelihood_are_refused(objective: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        training_phases(TrainConfig(objective=objective, phases=[PhaseConfig(epochs=1, curriculum=self_paced())]))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_with_the_same_losses_sample_the_same(size: int) -> None:
    lengths = np.random.default_rng(1).integers(5, 50, COUNT)
    reference = observed_sampler(STEPS)
    samplers = [build_sampler() for _ in range(size)]
    partitions = [RankPartition(sampler, lengths, size) for sampler in samplers]
    for step in range(STEPS):
        rows = []
        for rank, (sampler, partition) in enumerate(zip(samplers, partitions, strict=True)):
            rows += [
                row
                for row, sample_rank in zip(sampler.rows(step), partition.ranks(step), strict=True)
                if sample_rank == rank
            ]
            observe(sampler, step)
        assert sorted(rows) == sorted(reference.rows(step))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [1, 8])
def test_prefetched_steps_wait_for_the_losses(make_units: MakeUnits, workers: int, prefetch: int) -> None:
    units, sampler, reference = make_units([6] * COUNT), build_sampler(), observed_sampler(STEPS)
    with BatchLoader(units, sampler, 100, config=LoaderConfig(workers=workers, prefetch=prefetch)) as loader:
        for step in range(sampler.steps):
            batch = loader.next(step)
            assert [row for rows in batch.rows for row in rows] == reference.rows(batch.step)
            observe(sampler, batch.step)
