"""docs/from_trl.md: its keys exist, and its commands and script run."""

import ast
import re
from pathlib import Path

from posttrain.cli.config import config_keys
from posttrain.loop.config import Config
from posttrain.train.objectives.registry import OBJECTIVES

PAGE = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")
KEYS = {entry.key for entry in config_keys(Config)}


def test_every_key_of_the_page_exists() -> None:
    named = set(re.findall(r"\btrain(?:\.[a-z_]+)+", PAGE))
    assert len(named) >= 15
    # A section, such as `train.lora`, stands for its keys.
    assert not {name for name in named if name not in KEYS and not any(key.startswith(f"{name}.") for key in KEYS)}


def test_the_objectives_of_the_page_exist_and_its_script_is_python() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `beta`, `loss_type`"))
    assert {"dpo", "ipo", "hinge", "robust_dpo"} <= {*re.findall(r"`(?:--objective )?([a-z_]+)`", row)} & set(
        OBJECTIVES
    )
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ast.parse(script)
