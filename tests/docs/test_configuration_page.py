"""The page of the config says what the code says."""

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
EVERY_KEY = "\n".join(re.findall(r"^```yaml\n(.*?)\n```$", PAGE.partition("## Every key")[2], re.MULTILINE | re.DOTALL))


def test_every_key_stands_there_as_the_command_prints_it(capsys) -> None:
    app(["config", "show", "--defaults"], standalone_mode=False)
    printed = capsys.readouterr().out.strip()
    assert len(printed.splitlines()) > 100
    assert printed == EVERY_KEY, "run: python docs/update.py"


def test_the_defaults_are_a_config_but_for_the_model() -> None:
    values = yaml.safe_load(EVERY_KEY)
    assert Config.read({**values, "model": "tiny"}, "docs").model_dump() == Config(model="tiny", data={}).model_dump()


def test_the_page_opens_with_about_thirty_keys_that_exist() -> None:
    opening = PAGE.partition("## Rules")[0]
    named = re.findall(r"^\| `([\w.]+)` \|", opening, re.MULTILINE)
    assert 25 <= len(named) <= 35
    assert set(named) <= {entry.key for entry in config_keys(Config)}


def test_the_tables_name_every_scorer_metric_suite_key_and_trigger() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for name, scorer in SCORERS.items():
        named = re.findall(r"`(\w+)`", rows[name])
        assert named[0] == scorer.main
        assert set(named) == scorer.metrics | scorer.label_metrics
    assert set(SuiteConfig.model_fields) <= set(rows)
    assert all(f"`{name}`" in PAGE for name in NAMES)
