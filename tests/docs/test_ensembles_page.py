"""docs/ensembles.md: its files are valid, its table is that of the methods, and its Python runs."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml
from text_models import ROWS

from posttrain.label.config import LabelConfig
from posttrain.models.ensembles.config import EnsembleConfig
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig

PAGE = (Path(__file__).parents[2] / "docs" / "ensembles.md").read_text(encoding="utf-8")


def test_the_files_are_valid(tmp_path: Path) -> None:
    pool, cascade, _, config = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    assert len(EnsembleConfig.read(pool, "pool").models) == 4
    assert EnsembleConfig.read(cascade, "cascade").tolerance == 0.02
    (tmp_path / "ensemble.yaml").write_text(yaml.safe_dump(pool))
    LabelConfig.read(config["label"], "label").check_models(True, tmp_path)


def test_the_file_of_free_text_runs(text_workspace: Path, run: Callable[[str, Path], str]) -> None:
    (block,) = re.findall(r"```yaml\n(method: gate.*?)```", PAGE, re.DOTALL)
    values = yaml.safe_load(block)
    for name, model in zip(values["models"], ("bank", "home"), strict=True):
        (text_workspace / name).symlink_to(text_workspace / "models" / model)
    records = [{"text": row["text"], "label": row["label"]} for row in ROWS[:16]]
    (text_workspace / values["data"]).write_text("\n".join(map(json.dumps, records)))
    (text_workspace / "ensemble.yaml").write_text(yaml.safe_dump(values))
    output = run("posttrain eval --model ensemble.yaml --json", text_workspace)
    result = json.loads(output[output.index("{") :])  # behind the lines of progress
    assert result["metrics"]["accuracy"] == 1
    assert "ensemble" in result


def test_the_table_names_every_method() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == list(get_args(EnsembleConfig.model_fields["method"].annotation))


def test_the_python_runs(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"method": "cascade", "models": ["small", "large"], "tolerance": 0.5, "data": "held_out.csv"}
    (tmp_path / "ensemble.yaml").write_text(yaml.safe_dump(values))
    task = TaskConfig(labels=["card", "cash"])
    model = load_language_model(tiny_model, task, "float32")
    names = {
        **{"small": model, "large": model, "task": task},
        "prompts": [[{"role": "user", "content": text}] for text in ("one", "two")],
        "answers": ["card", "cash"],
    }
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "page.py").write_text(code)
    after = runpy.run_path(str(tmp_path / "page.py"), names)
    assert {answer.text for answer in after["answers"]} <= {"card", "cash"}
