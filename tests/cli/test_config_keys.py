"""``posttrain config keys`` lists keys with default, type and meaning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from posttrain.cli.config import config_keys, reference
from posttrain.loop.config import Config
from posttrain.train.lora_config import LoraConfig


def test_a_prefix_selects_keys(posttrain: Callable[..., Any]) -> None:
    lora = posttrain("config", "keys", "train.lora", "--json").json
    assert {entry["key"].split(".")[2] for entry in lora} == set(LoraConfig.model_fields)
    assert all(entry["key"].startswith("train.lora.") for entry in lora)
    assert lora[0]["default"] == "16"
    assert lora[0]["type"] == "integer"
    assert "train.lora.rank" in posttrain("config", "keys", "train.lora").out


def test_an_unknown_prefix_suggests_the_nearest_key(posttrain: Callable[..., Any]) -> None:
    assert "train.epochs" in posttrain("config", "keys", "train.epoch_").mistake


def test_every_key_of_the_reference_is_listed() -> None:
    keys = {entry.key for entry in config_keys(Config)}
    assert {"model", "evaluate.suites.NAME.sample", "train.phases.N.epochs", "data.splits.test"} <= keys
    assert all(entry.meaning and entry.type for entry in config_keys(Config))

    def leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            leaf
            for name, value in values.items()
            for leaf in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"})
        }

    reference_keys = {
        leaf for leaf in leaves(yaml.safe_load(reference(Config))) if not leaf.startswith("evaluate.suites.")
    }
    assert reference_keys <= keys


def test_the_config_is_shown_without_passwords(posttrain: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "posttrain.yaml").write_text(
        "model: tiny\ndata: {pool: a.csv, test: b.csv}\nstore: {database: 'postgresql://me:hunter2@host/loop'}\n"
    )
    for options in ((), ("--json",)):
        shown = posttrain("config", "show", "-w", tmp_path, *options)
        assert (shown.code, "hunter2" in shown.out + shown.err) == (0, False)
        assert "@host/loop" in shown.out
