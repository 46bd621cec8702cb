"""The use of the machine: shares are shares, and whatever cannot be read is left out."""

import os
import subprocess
from pathlib import Path

import pytest

from posttrain.inspect import system_use
from posttrain.inspect.system_use import SystemMonitor, Use, parse_gpus


def test_this_machine_is_in_use_and_not_all_of_it(tmp_path: Path) -> None:
    uses = {use.kind: use for use in SystemMonitor(tmp_path).read()}
    assert uses.keys() >= {"cpu", "memory", "disk"}
    assert uses["cpu"].total == os.cpu_count()
    for use in uses.values():
        assert use.used >= 0
        assert 0 <= use.share <= 1
    assert uses["memory"].used > 1e6


def test_processors_are_measured_between_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_use, "_SAMPLE_SECONDS", 0.0)
    monitor = SystemMonitor(tmp_path)
    times = [
        "cpu  100 0 100 700 100 0 0 0 0 0\n",
        "cpu  150 0 150 700 100 0 0 0 0 0\n",
        "cpu  150 0 150 790 110 0 0 0\n",
    ]
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda path: times.pop(0))
    assert [monitor._processors() for _ in range(3)] == pytest.approx([0.8, 4.0, 0.0])


@pytest.mark.parametrize(
    ("output", "uses"),
    [
        ("", []),
        (
            "NVIDIA H100, 80GB, 37, 2048, 81559\n",
            [Use("gpu", "NVIDIA H100, 80GB", 0.37, 1.0), Use("gpu_memory", "NVIDIA H100, 80GB", 2**31, 81559 * 2**20)],
        ),
        ("MIG, [N/A], 1, 2\n", [Use("gpu", "MIG", 0.0, 1.0), Use("gpu_memory", "MIG", 2**20, 2**21)]),
    ],
)
def test_gpus_are_parsed(output: str, uses: list[Use]) -> None:
    assert parse_gpus(output) == uses


@pytest.mark.parametrize("failure", [OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 5), "no devices found"])
def test_a_driver_that_fails_hides_only_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | str
) -> None:
    def run(*arguments: object, **options: object) -> object:
        if isinstance(failure, str):
            return subprocess.CompletedProcess([], 0, failure, "")
        raise failure

    monkeypatch.setattr(system_use.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert not any(use.kind.startswith("gpu") for use in SystemMonitor(tmp_path).read())
