"""docs/watching.md and the examples of services."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from posttrain.cli.main import app
from posttrain.loop.adjust import VALUE_NAMES as ADJUST_VALUES
from posttrain.loop.config import Config
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
SERVICES = ROOT / "examples" / "service"


def check_command(words: list[str]) -> None:
    """Raises unless the words are a command of posttrain with options that exist."""
    command, rest = get_command(app), words[1:]
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(command.make_context("x", rest, resilient_parsing=True), rest)
    used = {word for word in rest if word.startswith("-")}
    assert used <= {option for parameter in command.params for option in parameter.opts}, words


def test_the_configs_of_the_page_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        Config.read({"model": "tiny", "data": {"pool": ["p"]}, **yaml.safe_load(block)}, "posttrain.yaml")


def test_the_page_names_every_value() -> None:
    for name in (*DRIFT_VALUES, *ADJUST_VALUES):
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", ["posttrain-watch.service", "posttrain-serve.service"])
def test_the_units_start_commands_that_exist(name: str) -> None:
    text = (SERVICES / name).read_text(encoding="utf-8")
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    words = shlex.split(settings["ExecStart"])
    assert Path(words[0]).name == "posttrain"
    check_command(words)
    assert (settings["Restart"], settings["SuccessExitStatus"]) == ("on-failure", "143")


def test_the_cron_job_runs_commands_that_exist_one_at_a_time() -> None:
    job = yaml.safe_load((SERVICES / "cronjob.yaml").read_text(encoding="utf-8"))
    assert (job["kind"], job["spec"]["concurrencyPolicy"]) == ("CronJob", "Forbid")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        check_command(container["command"])
