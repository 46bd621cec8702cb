"""The rate of matrix products: the best of several measurements, kept per machine, raised by faster work."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from posttrain.models import machine_rate
from posttrain.models.machine_rate import matmul_rate, raise_matmul_rate
from posttrain.store.files import write_checked

Measure = Callable[..., None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, and a quiet machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_rate, "_rates", {})
    monkeypatch.setattr(machine_rate, "busy_reason", lambda: None)
    return tmp_path / "posttrain" / "matmul"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """``measure(best, middle)``: the outcome of the measurement in a process that starts now; none: it must not be."""

    def start_process(best: float | None = None, middle: float | None = None) -> None:
        monkeypatch.setattr(machine_rate, "_rates", {})

        def result(*_: object) -> tuple[float, float]:
            assert best is not None, "measured again"
            return best, best if middle is None else middle

        monkeypatch.setattr(machine_rate, "_measure", result)

    return start_process


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({512: 0.001, 1024: 0.002, 2048: 0.004}, 2 * 2048**3 / 0.004),
        ({512: 0.001, 1024: 0.002, 2048: 0.1}, 2 * 1024**3 / 0.002),
        ({512: 0.4}, 2 * 512**3 / 0.4),  # the others would take too long
    ],
)
def test_the_rate_is_the_best_of_the_matrix_sizes(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], expected: float
) -> None:
    """With a clock that only matrix products advance."""
    clock = [0.0]

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        assert left.shape == right.shape
        clock[0] += seconds[len(left)]

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(machine_rate, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert matmul_rate(torch.float32) == pytest.approx(expected)
    assert clock[0] < 1.5


def test_the_best_of_three_processes_is_kept(measure: Measure) -> None:
    for best in (2e9, 3e9, 1e9):
        measure(best)
        matmul_rate(torch.float32)
    measure()
    assert matmul_rate(torch.float32) == 3e9


def test_each_dtype_thread_count_and_instruction_set_has_its_own_rate(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(1e9)
    assert matmul_rate(torch.float32) == 1e9
    measure(2e9)
    assert matmul_rate(torch.bfloat16) == 2e9
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    measure(3e8)
    assert matmul_rate(torch.bfloat16) == 3e8
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    measure(1e8)
    assert matmul_rate(torch.bfloat16) == 1e8


def test_measurements_on_a_busy_machine_are_reported_and_repeated(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_rate, "busy_reason", lambda: "load 9.0 on 2 cores")
    measure(1e9)
    matmul_rate(torch.float32)
    assert caplog.messages == [
        "the machine is busy (load 9.0 on 2 cores): its peak of 0.001 TFLOP/s may be too low",
    ]
    monkeypatch.setattr(machine_rate, "busy_reason", lambda: None)
    measure(2e9, middle=1e9)
    assert matmul_rate(torch.float32) == 2e9
    assert "half of the products took 2 times as long as the fastest" in caplog.messages[1]
    # A quiet moment at last: three count, whatever was measured before.
    for best in (1.5e9, 4e9, 1.5e9):
        measure(best)
        matmul_rate(torch.float32)
    measure()
    assert matmul_rate(torch.float32) == 4e9
    assert len(caplog.messages) == 2


def test_an_always_busy_machine_is_measured_ten_times(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rate, "busy_reason", lambda: "load 9.0 on 2 cores")
    for _ in range(10):
        measure(1e9)
        matmul_rate(torch.float32)
    measure()
    assert matmul_rate(torch.float32) == 1e9


@pytest.mark.parametrize(("load", "busy"), [(2.9, False), (3.1, True)])
def test_a_load_above_the_cores_is_busy(load: float, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine_rate, "_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert (machine_rate.busy_reason() is not None) is busy


def test_faster_work_raises_the_rate(measure: Measure) -> None:
    measure(1e9)
    matmul_rate(torch.float32)
    raise_matmul_rate(9e8, torch.float32)
    assert matmul_rate(torch.float32) == 1e9
    raise_matmul_rate(2e9, torch.float32)
    assert matmul_rate(torch.float32) == 2e9
    for _ in range(3):
        measure(1e9)
        assert matmul_rate(torch.float32) == 2e9


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 100, b"{}", b'{"value": {}}', b'{"value": {"flops": NaN, "measurements": 3, "quiet": 3}}']
)
@pytest.mark.parametrize("checksum", [False, True])
def test_a_damaged_file_is_ignored_and_written_anew(
    cache: Path, measure: Measure, damage: bytes, checksum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    measure(1e9)
    matmul_rate(torch.float32)
    (file,) = cache.iterdir()
    if checksum:
        write_checked(file, damage)
    else:
        file.write_bytes(damage)
    for _ in range(3):
        measure(2e9)
        assert matmul_rate(torch.float32) == 2e9
    measure()
    assert matmul_rate(torch.float32) == 2e9


@pytest.mark.parametrize("cache_file", ["posttrain", "posttrain/matmul"])
def test_a_cache_that_cannot_be_used_costs_a_measurement_only(
    tmp_path: Path, measure: Measure, cache_file: str
) -> None:
    (tmp_path / cache_file).parent.mkdir(exist_ok=True)
    (tmp_path / cache_file).write_text("a file in the folder's place")
    for best in (1e9, 2e9):
        measure(best)
        assert matmul_rate(torch.float32) == best
