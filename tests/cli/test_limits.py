"""What the README says that posttrain does not do yet is refused today, in one line."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.store.files import write_atomically

ROOT = Path(__file__).parents[2]
LIMITS = yaml.safe_load((ROOT / "docs" / "limits.yaml").read_text(encoding="utf-8"))
REFUSED = [entry for limit in LIMITS for entry in limit.get("refused", ())]


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.get("command") or str(entry["config"]))
def test_what_is_not_done_yet_is_refused(
    entry: dict[str, Any], posttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in entry.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    if "command" in entry:
        Path("task.yaml").write_text("space: {x: [0, 1]}\n", encoding="utf-8")
        words = shlex.split(entry["command"].replace("FILE", str(ROOT / "examples" / "training" / "answers.jsonl")))
    else:
        assert posttrain("init", "support", "--example").code == 0
        file = Path("support", "posttrain.yaml")
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        for section, values in entry["config"].items():
            config[section] = {**config.get(section, {}), **values}
        write_atomically(file, yaml.safe_dump(config).encode())
        words = ["config", "check", "-w", "support"]
    assert entry["says"] in posttrain(*words).mistake
    assert not Path("new").exists()


def test_every_limit_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for limit in LIMITS:
        assert limit.get("refused") or limit["classifiers"], limit["en"]
        if classifiers := limit.get("classifiers"):
            assert classifiers == [name for name in project["classifiers"] if name.startswith("Operating System")]
