"""The available memory, from planted system files and from the real ones."""

import os
from pathlib import Path

import pytest

from posttrain.jobs import memory
from posttrain.jobs.memory import anonymous_bytes, peak_bytes, process_bytes
from posttrain.train.memory.token_budget import available_bytes

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free, on which this process holds 1 GiB and held 3 GiB at its peak."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {9 << 20} kB\nMemAvailable:   {8 << 20} kB\nSwap: 0 kB\n")
    (tmp_path / "proc" / "self" / "status").write_text(f"Name:\tx\nVmHWM:\t {3 << 20} kB\nVmRSS:\t {1 << 20} kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    return tmp_path


def test_without_a_limit_all_free_memory_is_available(system: Path) -> None:
    assert available_bytes() == 9 * GIB
    assert (process_bytes(), peak_bytes()) == (GIB, 3 * GIB)


@pytest.mark.parametrize(("limit", "expected"), [("max", 9), (str(6 * GIB), 4), (str(60 * GIB), 9)])
def test_a_cgroup_limits_the_memory(system: Path, limit: str, expected: int) -> None:
    group = system / "cgroup"
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(str(5 * GIB))
    (group / "memory.stat").write_text(f"anon 1\nfile {2 * GIB}\n")
    assert available_bytes() == expected * GIB


def test_a_version_1_cgroup_limits_the_memory(system: Path) -> None:
    group = system / "cgroup" / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(4 * GIB))
    (group / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (group / "memory.stat").write_text(f"cache 0\ntotal_cache {GIB}\n")
    assert available_bytes() == 3 * GIB
    (group / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert available_bytes() == 9 * GIB


def test_an_unknown_system_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert available_bytes() is None
    assert process_bytes() == 0


def test_available_memory_of_this_machine() -> None:
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert 64 << 20 < anonymous_bytes(os.getpid()) < process_bytes() <= peak_bytes()
    result = available_bytes()
    assert result is not None
    assert result > 64 << 20
