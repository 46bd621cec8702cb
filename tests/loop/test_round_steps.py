"""The list of a round's steps: built-in ones, and stages that a config adds by name or dotted path."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from posttrain.loop.config import Config
from posttrain.loop.round import ROUND, STAGES, round_steps
from posttrain.store.errors import UserError

_MODULE = """
from posttrain.loop.stage import Stage


class Count(Stage):
    name, kind = "count", "count"

    def run(self, context, out, scratch):
        return {}


class Compress(Count):
    name, after = "compress", "train"


class Lost(Count):
    name, after = "lost", "prune"


class Twin(Count):
    name = "train"


class Unfinished(Stage):
    name, kind = "unfinished", "nothing"


NUMBER = 1
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_round.py").write_text(_MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "my_round", raising=False)
    monkeypatch.setattr(STAGES, "_loaded", {})


def config_with(*stages: str) -> Config:
    data = {"pool": "pool.csv", "test": "test.csv"}
    return Config.read({"model": "tiny", "data": data, "stages": list(stages)}, "posttrain.yaml")


def test_a_stage_follows_the_one_that_it_names() -> None:
    names = [step.name for step in round_steps(config_with("my_round:Count", "my_round:Compress"))]
    assert names == [
        *("collect", "fetch", "drift", "score", "select", "answer", "suggest", "label", "dataset", "count"),
        *("pseudo", "negatives", "tune", "train", "compress", "merge", "evaluate", "decide", "adjust", "deploy"),
    ]


def test_a_package_publishes_a_stage_under_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAGES, "_published", {"count": EntryPoint("count", "my_round:Count", "posttrain.stages")})
    names = [step.name for step in round_steps(config_with("count"))]
    assert names[names.index("dataset") + 1] == "count"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["my_round:Lost"], r"stages: `my_round:Lost` follows the stage `prune`, .* `after` to one of collect, "),
        (["my_round:Twin"], "the round has a stage `train` already"),
        (["my_round:Count", "my_round:Count"], "the round has a stage `count` already"),
        (["evaluate"], "the round has a stage `evaluate` already"),
        (["evalaute"], "there is no stage `evalaute`.*`evaluate`"),
        (["my_round:NUMBER"], "`my_round:NUMBER` is not a stage"),
        (["my_round:Unfinished"], "`my_round:Unfinished` does not define run"),
        (["my_round:Absent"], "module `my_round` has no `Absent`"),
        (["no_such_module:Stage"], "cannot import `no_such_module`"),
    ],
)
def test_a_wrong_stage_is_reported_with_its_key(stages: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        round_steps(config_with(*stages))
    assert error.value.where == "stages"


def test_steps_that_nobody_stops_after() -> None:
    assert [step.name for step in ROUND if not step.can_stop(1)] == ["fetch"]
    assert [step.name for step in ROUND if not step.can_stop(0)] == ["fetch", "dataset"]
    assert [step.name for step in ROUND if step.ends_round] == ["deploy"]
