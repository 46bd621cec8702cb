"""The page of the config matches the code."""

import re
from pathlib import Path

import yaml

from posttrain.cli.config import config_keys
from posttrain.cli.main import app
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS
from posttrain.loop.config import Config
from posttrain.loop.triggers import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_defaults_and_a_model_are_a_config(capsys) -> None:
    app(["config", "show", "--defaults"], standalone_mode=False)
    values = yaml.safe_load(capsys.readouterr().out)
    assert Config.read({**values, "model": "tiny"}, "docs").model_dump() == Config(model="tiny", data={}).model_dump()


def test_the_page_says_where_each_section_is_explained() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.partition("## Every key")[2], re.MULTILINE)
    sections = {entry.key.partition(".")[0] for entry in config_keys(Config) if "." in entry.key}
    assert sections - {"task"} <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_the_page_opens_with_about_thirty_keys_that_exist() -> None:
    opening = PAGE.partition("## Rules")[0]
    keys = re.findall(r"^\| `([\w.]+)` \|", opening, re.MULTILINE)
    assert 25 <= len(keys) <= 35
    assert set(keys) <= {entry.key for entry in config_keys(Config)}


def test_the_tables_name_every_scorer_metric_suite_key_and_trigger() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for name, scorer in SCORERS.items():
        metrics = re.findall(r"`(\w+)`", rows[name])
        assert metrics[0] == scorer.main
        assert set(metrics) == scorer.metrics | scorer.label_metrics
    assert set(SuiteConfig.model_fields) <= set(rows)
    assert all(f"`{name}`" in PAGE for name in NAMES)
