"""The names that other trainers have for our keys."""

import pytest

from posttrain.cli.config import config_keys
from posttrain.loop.config import Config
from posttrain.store.errors import UserError
from posttrain.store.section import describe_alias
from posttrain.train.config import TrainConfig
from posttrain.train.key_aliases import KEY_ALIASES, VALUE_ALIASES
from posttrain.train.standalone import TrainJobConfig


def read(**values: object) -> TrainJobConfig:
    return TrainJobConfig.read({"model": "tiny", "data": "a", **values}, "--set")


def test_unknown_keys_name_ours_or_say_why_there_is_none() -> None:
    known = [{entry.key for entry in config_keys(config)} for config in (Config, TrainJobConfig)]
    names = {*Config.model_fields, *TrainJobConfig.model_fields, *TrainConfig.model_fields}
    for name, alias in KEY_ALIASES.items():
        assert name not in names, "it would hide a key"
        assert not alias.name or all(alias.name in keys for keys in known)
        for values in ({name: 1}, {"train": {name: 1}}):
            with pytest.raises(UserError) as caught:
                read(**values)
            assert describe_alias(alias) in str(caught.value)
            assert ("did you mean" in str(caught.value)) == bool(alias.name)


def test_unknown_values_name_ours_which_are_accepted() -> None:
    for key, aliases in VALUE_ALIASES.items():
        section, *path = key.split(".")
        for value, alias in aliases.items():
            with pytest.raises(UserError) as caught:
                read(**{section: {path[0]: {path[1]: value} if path[1:] else value}})
            assert str(caught.value) == f"--set: `{key}`: there is no `{value}`; {describe_alias(alias)}"
            if alias.name:
                read(**{section: {path[0]: {path[1]: alias.name} if path[1:] else alias.name}})


def test_a_key_without_a_near_name_names_the_list() -> None:
    with pytest.raises(UserError, match=r"unknown key `train.zzzzz`; `posttrain config keys train` lists the keys$"):
        read(train={"zzzzz": 1})


def test_quantised_adapters_are_answered_with_lora() -> None:
    for value in ("qlora", "dora", "peft"):
        with pytest.raises(UserError, match=f"there is no `{value}`; .*`lora`"):
            read(train={"method": value})
