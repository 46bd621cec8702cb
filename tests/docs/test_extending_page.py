"""The page's extensions load from outside the package, are short, and pass their contracts."""

import json
import re
import shutil
import sqlite3
import sys
from pathlib import Path

import forked
import pytest

from posttrain.data.steps.registry import STEPS
from posttrain.evaluate.config import EvaluateConfig
from posttrain.evaluate.metric_names import check_suites, metric_names
from posttrain.loop.stage import Stage
from posttrain.select.config import SelectConfig
from posttrain.store.errors import UserError
from posttrain.store.extensions import load_object
from posttrain.store.workspace import open_artifacts
from posttrain.train.config import TrainConfig

PAGES = Path(__file__).parents[2] / "docs"
PAGE = (PAGES / "extending.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def test_every_extension_has_less_than_thirty_lines_and_a_contract() -> None:
    extensions = {name for name in BLOCKS if not name.startswith("test_")}
    assert len(extensions) >= 7
    assert {f"test_{name}" for name in extensions} == BLOCKS.keys() - extensions
    assert all(text.count("\n") < 30 for text in BLOCKS.values())


@pytest.mark.slow
def test_the_contracts_pass(folder: Path) -> None:
    log = folder / "output"
    process = forked.start(["-q", "-p", "no:cacheprovider", "--rootdir", str(folder)], folder, log, "pytest")
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert "passed" in log.read_text()


def test_the_extensions_load_by_their_dotted_paths(folder: Path) -> None:
    assert STEPS["my_step:Shout"].__name__ == "Shout"
    config = EvaluateConfig.read({"suites": {"short": {"scorer": "my_scorer:BREVITY"}}}, "posttrain.yaml")
    check_suites(config, has_labels=False)
    assert {"score", "longest", "gain.score.low"} <= metric_names(config, has_labels=False)
    SelectConfig(strategy="my_selector:unsure_and_usual", options={"power": 0.5}, scores=["perplexity"]).check(
        has_labels=True
    )
    select = SelectConfig(strategy="top", options={"by": "my_score:LENGTH"})
    select.check(has_labels=True)
    assert select.wanted_scores() == ["my_score:LENGTH"]
    train = TrainConfig.read({"objective": {"name": "my_objective:EXPONENTIAL", "beta": 0.2}}, "file")
    assert train.spec.reference
    assert train.model_dump()["objective"] == {"name": "my_objective:EXPONENTIAL", "beta": 0.2}
    with pytest.raises(UserError, match=r"`objective\.beta`: .*greater than 0"):
        TrainConfig.read({"objective": {"name": "my_objective:EXPONENTIAL", "beta": 0}}, "file")
    assert issubclass(load_object("my_stage:CountLabels", "stages"), Stage)
    assert open_artifacts("my_store:LoggedArtifacts://shared", folder / ".posttrain").root == folder / "shared"


_CONFIG = """
model: tiny
rounds: 1
task: {system: Name the intent of the message., labels: labels.txt, max_new_tokens: 8}
data:
  pool: inputs.csv
  test: test.csv
  columns: {prompt: text, completion: label}
  steps: [normalise, "my_step:Shout"]
select: {strategy: "my_selector:unsure_and_usual", options: {power: 0.5}, scores: [perplexity, "my_score:LENGTH"]}
label: {annotator: oracle, file: answers.csv, per_round: 8}
train: {epochs: 1, precision: float32}
evaluate: {suites: {short: {scorer: "my_scorer:BREVITY"}}, latency: {prompts: 2}}
stages: ["my_stage:CountLabels"]
store: {artifacts: "my_store:LoggedArtifacts://artifacts"}
"""


@pytest.mark.slow
def test_a_round_runs_with_every_extension_in_the_workspaces_folder(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(PAGES.parent / "src" / "posttrain" / "cli" / "example", workspace)
    for name, text in BLOCKS.items():
        (workspace / name).write_text(text, encoding="utf-8")
    (workspace / "posttrain.yaml").write_text(_CONFIG, encoding="utf-8")
    # From another folder: neither is on the path.
    process = forked.start(["run", "-w", str(workspace)], tmp_path, log := tmp_path / "output")
    process.join()
    assert process.exitcode == 0, log.read_text()
    with sqlite3.connect(workspace / ".posttrain" / "store.db") as database:
        stages = {stage for (stage,) in database.execute("select stage from runs where round = 1 and status = 'done'")}
    assert {"select", "count_labels", "train", "evaluate"} <= stages
    folders = {path.name for path in (workspace / "artifacts").iterdir() if not path.name.startswith(".")}
    assert set((workspace / "artifacts.log").read_text().split()) == folders
    (count,) = (workspace / "artifacts").glob("count-*/count.json")
    assert json.loads(count.read_text())["labels"] == 8
