import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.train.optim.schedule import ScheduleConfig, scheduled_lr

NAMES = ["constant", "linear", "cosine", "wsd"]
STEPS, WARMUP, PEAK = 60, 12, 0.3

MakeScheduler = Callable[[Any, torch.optim.Optimizer], Any]


def rates(steps: int, peak: float = 1.0, **settings: Any) -> list[float]:
    """The rate of every step, and the rate at the end."""
    config = ScheduleConfig(**settings)
    return [scheduled_lr(config, peak, step, steps) for step in range(steps + 1)]


def reference_rates(make: MakeScheduler, steps: int) -> list[float]:
    """The rates of transformers' scheduler with a peak of ``PEAK``."""
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = make(transformers, optimizer)
    result = []
    for _ in range(steps + 1):
        result.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return result


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"name": "constant"}, lambda hf, o: hf.get_constant_schedule_with_warmup(o, WARMUP)),
        ({"name": "linear"}, lambda hf, o: hf.get_linear_schedule_with_warmup(o, WARMUP, STEPS)),
        ({"name": "cosine"}, lambda hf, o: hf.get_cosine_schedule_with_warmup(o, WARMUP, STEPS)),
        (
            {"name": "wsd", "decay": 0.25},
            lambda hf, o: hf.get_wsd_schedule(o, WARMUP, 15, STEPS, decay_type="1-sqrt"),
        ),
    ],
)
def test_schedules_are_those_of_transformers(settings: dict[str, Any], make: MakeScheduler) -> None:
    """Except for the warm-up, whose first step is not wasted on a rate of zero."""
    expected = reference_rates(make, STEPS)
    actual = rates(STEPS, PEAK, warmup=WARMUP, **settings)
    assert actual[:WARMUP] == pytest.approx(expected[1 : WARMUP + 1], rel=1e-12)
    assert actual[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (
            {"name": "cosine"},
            lambda hf, o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, WARMUP, STEPS, min_lr_rate=0.1),
        ),
        (
            {"name": "linear"},
            lambda hf, o: hf.get_polynomial_decay_schedule_with_warmup(o, WARMUP, STEPS, lr_end=0.1 * PEAK),
        ),
        (
            {"name": "wsd", "decay": 0.25},
            lambda hf, o: hf.get_wsd_schedule(o, WARMUP, 15, STEPS, decay_type="1-sqrt", min_lr_ratio=0.1),
        ),
    ],
)
def test_the_final_rate_is_transformers_minimum(settings: dict[str, Any], make: MakeScheduler) -> None:
    result = rates(STEPS, PEAK, warmup=WARMUP, final_rate=0.1, **settings)
    assert result[WARMUP:] == pytest.approx(reference_rates(make, STEPS)[WARMUP:], rel=1e-12)


def test_decays_by_hand() -> None:
    assert rates(8, name="wsd", warmup=0.25, decay=0.5) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]
    )


@pytest.mark.parametrize("share", [0.2, 0.19])
def test_warm_up_by_share_or_by_steps(share: float) -> None:
    for name in NAMES:
        assert rates(10, name=name, warmup=share, decay=0.1) == rates(10, name=name, warmup=2, decay=0.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("final_rate", [0.0, 0.1])
def test_rates_are_continuous(name: str, final_rate: float) -> None:
    steps = 20_000
    result = rates(steps, name=name, final_rate=final_rate, warmup=0.1, decay=0.2)
    assert max(abs(after - before) for before, after in pairwise(result)) <= 0.02
    assert result[0] > 0
    assert result[1999] == result[2000] == 1, "the warm-up ends at the peak, and the schedule starts there"
    if name != "constant":
        assert result[steps] == pytest.approx(final_rate, abs=1e-12)


@given(
    name=st.sampled_from(NAMES),
    peak=st.floats(1e-8, 10),
    final_rate=st.floats(0, 1),
    warmup=st.floats(0, 0.5) | st.integers(1, 60).map(float),
    decay=st.floats(0.01, 0.5),
    steps=st.integers(1, 60),
)
def test_every_rate_is_between_the_floor_and_the_peak(
    name: Any,
    peak: float,
    final_rate: float,
    warmup: float,
    decay: float,
    steps: int,
) -> None:
    config = ScheduleConfig(name=name, final_rate=final_rate, warmup=warmup, decay=decay)
    result = [scheduled_lr(config, peak, step, steps) for step in range(steps + 1)]
    assert all(0 <= value <= peak for value in result)
    warmup_end = min(config.warmup_length(steps), steps)
    assert result[:warmup_end] == sorted(result[:warmup_end])
    assert all(value > 0 for value in result[:warmup_end])
    assert all(value >= peak * final_rate for value in result[max(warmup_end, config.warmup_length(steps)) :])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "cosin"}, r"^test: `name`: .*'linear', 'cosine' or 'wsd'"),
        ({"warmup": 1.5}, r"^test: `warmup`: 1.5 is not a share below 1 nor a whole number of steps"),
        ({"warmup": -1}, r"^test: `warmup`: .*greater than or equal to 0"),
        ({"decay": 0}, r"^test: `decay`: .*greater than 0"),
        ({"final_rate": 2}, r"^test: `final_rate`: .*less than or equal to 1"),
        ({"name": "wsd", "warmup": 0.6, "decay": 0.5}, r"^test: warmup and decay together exceed the whole training"),
        ({"decays": 2}, r"^test: unknown key `decays`; did you mean `decay`"),
    ],
)
def test_a_wrong_value_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ScheduleConfig.read(values, "test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ({"warmup": 11}, 10, r"^train.schedule.warmup: 11 warm-up steps are more than the 10 "),
        ({"name": "wsd", "warmup": 6, "decay": 0.5}, 10, r"^train.schedule.decay: warm-up \(6 steps\)"),
    ],
)
def test_a_schedule_longer_than_the_training_is_a_one_line_error(
    settings: dict[str, Any], steps: int, message: str
) -> None:
    config = ScheduleConfig(**settings)
    with pytest.raises(UserError, match=message) as caught:
        config.check(steps)
    assert "\n" not in str(caught.value)
    config.check(2 * steps)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_fit_short_trainings(name: Any) -> None:
    for steps in (5, 6, 30, 1000):
        ScheduleConfig(name=name).check(steps)
