"""Time by phase: nested phases count once, and other threads not at all."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from posttrain.train.monitor import meter
from posttrain.train.monitor.meter import phase

Clock = list[float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still: ``clock[0] += 2`` lets two seconds pass."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_nested_phases_count_once(clock: Clock) -> None:
    before = meter.phase_seconds()
    for _ in range(2):
        with phase("forward"):
            clock[0] += 3
            with phase("head"):
                clock[0] += 1
                with phase("data"):
                    clock[0] += 0.5
            clock[0] += 2
        clock[0] += 7
    assert meter.phase_seconds_since(before) == {"forward": 10, "head": 2, "data": 1}
    assert meter.phase_seconds_since(meter.phase_seconds()) == {}


def test_a_failing_phase_is_counted_and_closed(clock: Clock) -> None:
    before = meter.phase_seconds()

    def fail() -> None:
        with phase("forward"), phase("head"):
            clock[0] += 1
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    with phase("forward"):
        clock[0] += 1
    assert meter.phase_seconds_since(before) == {"head": 1, "forward": 1}


def test_each_thread_has_its_own_phases(clock: Clock) -> None:
    before, result = meter.phase_seconds(), {}

    def save() -> None:
        with phase("checkpoint"):
            clock[0] += 5
        result.update(meter.phase_seconds())

    with phase("forward"):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    assert result == {"checkpoint": 5}
    assert meter.phase_seconds_since(before) == {"forward": 5}


def test_marks_are_opened_and_closed_with_the_phases(clock: Clock) -> None:
    marks: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        marks.append(f"+{name}")
        yield
        marks.append(f"-{name}")

    with meter.mark_phases(mark), phase("forward"), phase("head"):
        pass
    with phase("backward"):
        pass
    assert marks == ["+forward", "+head", "-head", "-forward"]
