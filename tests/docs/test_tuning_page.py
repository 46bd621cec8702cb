"""docs/tuning.md: its commands and its Python run, and its tables are those of the parts."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from posttrain.store.extensions import Registry
from posttrain.train.config import _RESUMABLE
from posttrain.tune.formula import FUNCTIONS
from posttrain.tune.samplers.registry import SAMPLERS
from posttrain.tune.schedulers.registry import SCHEDULERS, make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.trainings.config import VALUE_NAMES, TuneConfig

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_study_runs(run: Callable[[str, Path], str], tmp_path: Path) -> None:
    rows = [{"prompt": f"message {n}", "completion": "card" if n % 2 else "cash"} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = blocks("yaml")[0]
    (tmp_path / "tune.yaml").write_text(config)
    (commands,) = blocks("sh")
    output = run(commands, tmp_path)
    assert "posttrain train --config study/best.yaml --out MODEL" in output
    assert re.search(r"^4 trials: ", output, re.MULTILINE)
    assert {"best.yaml", "study.db", "trials.jsonl", "trials"} <= {path.name for path in (tmp_path / "study").iterdir()}
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_keys_that_a_population_may_change_are_those_of_checkpoints() -> None:
    section = PAGE.split("A checkpoint can continue with other values of ")[1].split("What decides")[0]
    keys = set(re.findall(r"`([a-z_.]+)`", section)) - {"name", "offload"}
    judges = {"centring"}  # no trial can measure reward models
    assert {key.removeprefix("objective.") for key in _RESUMABLE} - judges == keys


def test_the_population_is_a_config() -> None:
    config = next(block for block in blocks("yaml") if "name: pbt" in block)
    tune = TuneConfig.read(yaml.safe_load(config)["tune"], "tune")
    assert make_scheduler(tune.scheduler).has_forks
    # 8 trainings, and 2 more after each of 9 intervals.
    assert tune.budget == f"{8 + 2 * 9} trials"


def test_the_python_runs(run: Callable[[str, Path], str], tmp_path: Path) -> None:
    (code,) = blocks("python")
    output = run(f"python - <<'EOF'\n{code}EOF\n", tmp_path)
    value, *_, trials = output.split()
    assert 0.1 < float(value) < 0.5
    assert trials == "20"


def test_the_tables_name_every_part_with_its_options() -> None:
    samplers, schedulers = PAGE.split("\n## Samplers\n")[1].split("\n## Schedulers\n")
    parts: list[tuple[str, Registry[Any], int]] = [(samplers, SAMPLERS, 3), (schedulers, SCHEDULERS, 0)]
    for section, registry, own in parts:
        for name in registry.builtin:
            (row,) = re.findall(rf"^\| `{name}` \|(.*?)\|", section, re.MULTILINE)
            options = list(inspect.signature(registry[name]).parameters)[own:]
            assert re.findall(r"`(\w+)`", row) == options, name


def test_the_keys_and_the_entries() -> None:
    keys = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))))
    assert set(TuneConfig.model_fields) <= keys
    entries = re.findall(r"^\| `(\{.*?\}|\[.*?\])`", PAGE, re.MULTILINE)
    read = {f"a{number}": yaml.safe_load(entry) for number, entry in enumerate(entries)}
    Space({**read, "train.lora.rank": [1, 2]})
    assert len(read) == 4
    assert all(f"`{name}`" in PAGE for name in FUNCTIONS)


def test_the_section_of_a_loop() -> None:
    config = blocks("yaml")[-1]
    read = TuneConfig.read(yaml.safe_load(config)["tune"], "tune")
    assert read.when == TuneConfig.model_fields["when"].default
    names = set(
        re.findall(r"^\| `(\w+)` \|", PAGE.split("## In the loop")[1].split("## Any function")[0], re.MULTILINE)
    )
    assert names == set(VALUE_NAMES)
