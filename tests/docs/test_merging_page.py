"""docs/merging.md: its recipes and configs are valid, its commands exist, and its table is that of the methods."""

import re
import shlex
from pathlib import Path

import yaml
from typer.main import get_command

from posttrain.cli.main import app
from posttrain.loop.config import Config
from posttrain.merge.methods.registry import METHODS, load_method
from posttrain.merge.recipe import Recipe
from posttrain.tune.merges.search_space import search_space
from posttrain.tune.merges.suites import MergeSuitesConfig

PAGE = (Path(__file__).parents[2] / "docs" / "merging.md").read_text(encoding="utf-8")


def test_the_recipes_and_the_config_are_valid() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    recipes = [Recipe.read(block, "recipe") for block in blocks if {"models", "experts"} & block.keys()]
    assert {recipe.method for recipe in recipes} >= {"ties", "by_importance", "mixture_of_experts"}
    (searched,) = [recipe for recipe in recipes if recipe.search]
    assert list(search_space(searched)[0].parameters) == ["weight 1", "weight 2", "density"]
    (suites,) = [MergeSuitesConfig.read(block, "suites") for block in blocks if "suites" in block]
    assert suites.suites["intents"].specialist == "chat"
    (config,) = [block for block in blocks if "merge" in block]
    read = Config.read({"model": "tiny", "data": {"pool": ["p"]}, **config}, "posttrain.yaml")
    read.merge.check()
    assert read.merge.models == ["champion"]


def test_the_table_names_every_method_with_its_options() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", PAGE, re.MULTILINE))
    assert list(rows) == list(METHODS.builtin)
    for name, row in rows.items():
        assert {f"`{option}`" for option in load_method(name).options} <= set(re.findall(r"`\w+`", row))


def test_the_commands_exist() -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    command = get_command(app)
    for line in lines:
        words = shlex.split(line)[1:]
        _, verb, rest = command.resolve_command(command.make_context("x", words, resilient_parsing=True), words)
        used = {word for word in rest if word.startswith("--")}
        assert used <= {option for parameter in verb.params for option in parameter.opts}, line
    assert len(lines) >= 12
