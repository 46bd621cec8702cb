"""The names that other trainers have for our keys."""

import pytest

from posttrain.cli.config import config_keys
from posttrain.loop.config import Config
from posttrain.store.errors import UserError
from posttrain.store.section import describe_alias
from posttrain.train.config import TrainConfig
from posttrain.train.key_aliases import KEY_ALIASES, VALUE_ALIASES
from posttrain.train.standalone import TrainJobConfig


def test_every_target_is_a_key_of_both_configs() -> None:
    for config in (Config, TrainJobConfig):
        keys = {entry.key for entry in config_keys(config)}
        assert {alias.name for alias in KEY_ALIASES.values() if alias.name} <= keys
        assert VALUE_ALIASES.keys() <= keys


def test_no_alias_is_a_key_that_it_would_hide() -> None:
    names = {*Config.model_fields, *TrainJobConfig.model_fields, *TrainConfig.model_fields}
    assert not names & set(KEY_ALIASES)


@pytest.mark.parametrize("prefix", ["", "train"])
@pytest.mark.parametrize("name", KEY_ALIASES)
def test_an_unknown_key_names_ours_or_says_why_there_is_none(prefix: str, name: str) -> None:
    values = {name: 1}
    with pytest.raises(UserError) as caught:
        TrainJobConfig.read({"model": "tiny", "data": "a", **({prefix: values} if prefix else values)}, "--set")
    alias = KEY_ALIASES[name]
    assert describe_alias(alias) in str(caught.value)
    assert ("did you mean" in str(caught.value)) == bool(alias.name)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALUE_ALIASES for value in VALUE_ALIASES[key]])
def test_an_unknown_value_names_ours_which_is_accepted(key: str, value: str) -> None:
    def read(text: str) -> TrainJobConfig:
        *sections, name = key.split(".")
        values: dict[str, object] = {name: text}
        for section in reversed(sections):
            values = {section: values}
        return TrainJobConfig.read({"model": "tiny", "data": "a", **values}, "--set")

    alias = VALUE_ALIASES[key][value]
    with pytest.raises(UserError) as caught:
        read(value)
    assert str(caught.value) == f"--set: `{key}`: there is no `{value}`; {describe_alias(alias)}"
    if alias.name:
        read(alias.name)


def test_a_key_without_a_near_name_names_the_list() -> None:
    with pytest.raises(UserError, match=r"unknown key `train.zzzzz`; `posttrain config keys train` lists the keys$"):
        TrainJobConfig.read({"model": "tiny", "data": "a", "train": {"zzzzz": 1}}, "--set")
