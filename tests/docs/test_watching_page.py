"""docs/watching.md and the examples of services."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from posttrain import __version__
from posttrain.cli.main import app
from posttrain.loop.adjust import VALUE_NAMES as ADJUST_VALUES
from posttrain.loop.config import Config
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
IMAGE = f"registry.example.com/posttrain:{__version__}"
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
        assert container["image"] == IMAGE
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001


def test_the_image_has_its_files_and_runs_a_command_that_exists_as_a_user_without_rights() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"docker build -t {IMAGE} ." in text
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", "").splitlines() if line and line[0] != "#"]
    values = dict(lines)  # the last of a name counts
    check_command([*json.loads(values["ENTRYPOINT"]), *json.loads(values["CMD"])])
    assert (values["USER"], values["VOLUME"], values["WORKDIR"]) == ("10001", "/workspace", "/workspace")
    assert f"useradd --uid {values['USER']}" in text
    copied = {name for word, rest in lines if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.search(r"'\.\[(.*)\]'", text)[1].split(","):  # type: ignore[index]
        assert extra in project["optional-dependencies"]
    # Each build has the same packages.
    assert all("--no-cache-dir" in part for part in re.findall(r"pip install.*", text))
    assert text.count("--constraint constraints.txt") == text.count("pip install")
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert images
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+", image) for image in images)


def test_the_commands_of_containers_exist() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    commands = re.findall(rf"^docker run .*{re.escape(IMAGE)}(.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in filter(None, commands):
        check_command(["posttrain", *shlex.split(command)])
