"""The training page's commands run in order and write their files."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.train_options import read_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run: Callable[[str, Path], str]) -> Path:
    """The folder in which the page's commands ran."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples" / "training", folder / "examples" / "training")
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    run(commands, folder)
    return folder


@pytest.fixture
def run_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, Any]]:
    """``run_block(number)``: the variables of one of the page's Python blocks, by name."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def call(number: int) -> dict[str, Any]:
        (folder / "call.py").write_text(blocks[number], encoding="utf-8")
        monkeypatch.chdir(folder)
        return runpy.run_path("call.py")

    return call


def test_values_are_joined_to_their_records(folder: Path, run_block: Callable[[int], dict[str, Any]]) -> None:
    run_block(1)
    before, after = (folder / name for name in ("examples/training/answers.jsonl", "weighted.jsonl"))
    rows = [json.loads(line) for line in after.read_text(encoding="utf-8").splitlines()]
    assert [row.pop("weight") for row in rows] == [(1, 0.5)[row % 2] for row in range(len(rows))]
    assert rows == [json.loads(line) for line in before.read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "paced" / "summary.json").read_bytes())
    assert summary["steps"] == 3 * -(-len(rows) // 4)


def test_the_python_call_gives_the_same_model(folder: Path, run_block: Callable[[int], dict[str, Any]]) -> None:
    run_block(0)
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("trained", "trained-in-python")]
    assert models[0] == models[1]


def test_the_summary_counts_the_mix(folder: Path) -> None:
    (mix,) = json.loads((folder / "mixed" / "summary.json").read_bytes())["mixes"]
    files = ["examples/training/answers.jsonl", "examples/training/pairs.jsonl"]
    assert sorted(mix["kinds"]) == files
    assert sum(mix["kinds"][file]["met"] for file in files) == 16


@pytest.mark.parametrize("name", ["trained", "mixed", "preferred"])
def test_a_training_writes_model_config_and_metrics(folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / name)
    assert (folder / name / "config.yaml").is_file()
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == json.loads((folder / name / "summary.json").read_bytes())["steps"]


def test_the_report_is_written(folder: Path) -> None:
    assert '<figure class="chart">' in (folder / "trained" / "report.html").read_text(encoding="utf-8")


def test_the_evaluated_training_stops_and_the_longer_one_is_trained_on(folder: Path) -> None:
    evaluated, longer = (json.loads((folder / name / "summary.json").read_bytes()) for name in ("evaluated", "longer"))
    assert evaluated["evaluation"]["steps"] == evaluated["steps"] - 3 * 3 < 20 * 3
    assert longer["steps"] == 8
    assert (folder / "evaluated" / "report.html").is_file()
    page = (folder / "compared.html").read_text(encoding="utf-8")
    assert "train.max_steps" in page.replace("<wbr>", "")


def test_every_setting_of_the_page_is_valid() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    # Adjacent settings belong together.
    passages = re.findall(r"(?:--(?:set|objective|out) [^\s`]+[\s\\]*)+", page)
    assert any("train.recompute=" in passage for passage in passages)
    for passage in passages:
        if "FOLDER" in passage:  # which the reader replaces
            continue
        objective = re.search(r"--objective (\S+)", passage)
        options = {"model": "tiny", "train.objective": objective and objective[1].strip("`")}
        read_settings(None, options, re.findall(r"--set ([^\s`]+)", passage), plan=True)
