"""The names that other trainers have for our keys."""

import pytest

from posttrain.cli.config import config_keys
from posttrain.loop.config import Config
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.key_aliases import KEY_ALIASES
from posttrain.train.standalone import TrainJobConfig


def test_every_target_is_a_key_of_both_configs() -> None:
    for config in (Config, TrainJobConfig):
        keys = {entry.key for entry in config_keys(config)}
        assert {alias.key for alias in KEY_ALIASES.values()} <= keys


def test_no_alias_is_a_key_that_it_would_hide() -> None:
    names = {*Config.model_fields, *TrainJobConfig.model_fields, *TrainConfig.model_fields}
    assert not names & set(KEY_ALIASES)


@pytest.mark.parametrize("prefix", ["", "train"])
@pytest.mark.parametrize("name", KEY_ALIASES)
def test_an_unknown_key_names_ours(prefix: str, name: str) -> None:
    values = {name: 1}
    with pytest.raises(UserError) as caught:
        TrainJobConfig.read({"model": "tiny", "data": "a", **({prefix: values} if prefix else values)}, "--set")
    assert f"did you mean `{KEY_ALIASES[name].key}`" in str(caught.value)


def test_a_key_without_a_near_name_names_the_list() -> None:
    with pytest.raises(UserError, match=r"unknown key `train.zzzzz`; `posttrain config keys train` lists the keys$"):
        TrainJobConfig.read({"model": "tiny", "data": "a", "train": {"zzzzz": 1}}, "--set")
