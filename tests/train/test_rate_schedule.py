import math

import pytest

from posttrain.train.config import TrainConfig
from posttrain.train.schedule import rate


def rates(steps: int, **settings: object) -> list[float]:
    config = TrainConfig.read({"learning_rate": 1.0, **settings}, "test")
    return [rate(config, step, steps) for step in range(steps)]


def test_warm_up_climbs_in_equal_steps_to_the_peak() -> None:
    for schedule in ("cosine", "linear", "constant"):
        assert rates(20, warmup=0.25, schedule=schedule)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine() -> None:
    found = rates(10, warmup=0.2, schedule="cosine", final_rate=0.1)
    assert found[:2] == pytest.approx([0.5, 1.0])
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 8)) / 2 for done in range(8)]
    assert found[2:] == pytest.approx(expected)
    assert rate(TrainConfig(learning_rate=1.0, warmup=0.2), 6, 10) == pytest.approx(0.5)  # half way down
    assert rate(TrainConfig(learning_rate=1.0, final_rate=0.1), 10, 10) == pytest.approx(0.1)  # where it ends


def test_linear() -> None:
    assert rates(5, warmup=0.0, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, warmup=0.0, schedule="linear", final_rate=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


def test_constant() -> None:
    assert rates(4, warmup=0.0, schedule="constant", final_rate=0.3) == [1.0] * 4


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_every_rate_is_between_nothing_and_the_peak(schedule: str, warmup: float, steps: int) -> None:
    found = rates(steps, warmup=warmup, schedule=schedule)
    assert all(0 < value <= 1 for value in found)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert max(found) == 1
