"""Ready spaces: every entry is a key of a training, names are joined, and own entries go before them."""

from typing import Any

import numpy as np
import pytest

from posttrain.loop.config import Config
from posttrain.loop.tuning import tuned_keys
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.tune import Space, minimize, spaces
from posttrain.tune.lint import check_space
from posttrain.tune.parameters import Float, Int
from posttrain.tune.spaces import READY, expand, ready
from posttrain.tune.trainings.checks import check_settings
from posttrain.tune.trainings.config import TuneJobConfig


def job(space: Any, **train: Any) -> TuneJobConfig:
    tune = {"space": space, "held_out": "10%", "budget": "3 trials"}
    return TuneJobConfig.read({"model": "tiny", "data": "a.jsonl", "train": train, "tune": tune}, "tune.yaml")


@pytest.mark.parametrize("name", READY)
def test_every_entry_is_a_key_of_a_training(name: str) -> None:
    part = READY[name]
    train = {part.key.removeprefix("train."): part.value} if part.key else {}
    config = job(name, **train)
    assert config.tune.space == ready(name)
    # Each point of the space is read as a config.
    check_settings(Space(config.tune.space), config.training.model_dump(mode="json"))


@pytest.mark.parametrize("name", READY)
def test_defaults_lie_within_the_ranges(name: str) -> None:
    # But SimPO's: the config has TRL's, far below the paper's.
    part = READY[name]
    for key, entry in part.entries.items():
        value: Any = TrainConfig.read({"objective": part.value} if part.key == "train.objective" else {}, "test")
        for name_ in key.split(".")[1:]:
            value = getattr(value, name_)
        if isinstance(entry, Float | Int) and value and name != "simpo":
            assert entry.low <= value <= entry.high, key


@pytest.mark.parametrize(
    ("train", "names"),
    [
        ({}, ["optimizer"]),
        ({"method": "lora"}, ["optimizer", "lora"]),
        ({"objective": "dpo"}, ["optimizer", "dpo"]),
        ({"objective": "simpo", "method": "lora"}, ["optimizer", "lora", "simpo"]),
        ({"objective": "reward"}, ["optimizer"]),
    ],
)
def test_auto_has_what_method_and_objective_have(train: dict[str, str], names: list[str]) -> None:
    assert job("auto", **train).tune.space == ready(*names) == ready("auto", **train)


def test_the_section_of_a_loop_has_them() -> None:
    values = {"model": "tiny", "data": {"pool": "a.jsonl"}, "train": {"method": "lora"}}
    config = Config.read({**values, "tune": {"space": "auto", "held_out": "10%", "budget": 3}}, "posttrain.yaml")
    assert config.tune is not None
    assert tuned_keys(config.tune) == list(ready("optimizer", "lora"))


@pytest.mark.parametrize(
    ("space", "method", "low", "high"),
    [
        ("optimizer", "full", 1e-6, 1e-3),
        ("optimizer", "lora", 1e-5, 1e-2),
        ("auto", "lora", 1e-5, 1e-2),
        ({"ready": "auto", "train.method": ["full", "lora"]}, "full", 1e-6, 1e-2),
        ({"ready": "optimizer", "train.method": "lora"}, "full", 1e-5, 1e-2),
    ],
)
def test_learning_rates_follow_the_method(space: Any, method: str, low: float, high: float) -> None:
    assert job(space, method=method).tune.space["train.learning_rate"] == {"float": [low, high], "log": True}


def test_alpha_is_twice_the_rank() -> None:
    space = Space(ready("lora"))
    generator = np.random.default_rng(0)
    points = [space.complete(space.draw(generator)) for _ in range(100)]
    assert all(point["train.lora.alpha"] == 2 * point["train.lora.rank"] for point in points)
    assert {point["train.lora.rank"] for point in points} <= set(range(4, 65))


def test_own_entries_go_before_ready_ones() -> None:
    own = {"train.learning_rate": [1e-4, 1e-3], "train.lora.rank": 8, "train.epochs": [1, 2]}
    space = Space(job({"ready": ["optimizer", "lora"], **own}, method="lora").tune.space)
    assert space.parameters["train.learning_rate"].to_json() == {"choice": [1e-4, 1e-3]}
    assert "train.lora.rank" not in space.parameters
    point = space.complete(space.draw(np.random.default_rng(0)))
    assert (point["train.lora.rank"], point["train.lora.alpha"]) == (8, 16)
    assert point["train.epochs"] in (1, 2)


def test_a_space_over_methods_has_their_entries_under_a_condition() -> None:
    space = Space(job({"ready": "auto", "train.method": ["full", "lora"]}).tune.space)
    generator = np.random.default_rng(0)
    points = [space.complete(space.draw(generator)) for _ in range(50)]
    assert {point["train.method"] for point in points} == {"full", "lora"}
    for point in points:
        assert ("train.lora.alpha" in point) == ("train.lora.rank" in point) == (point["train.method"] == "lora")
    with pytest.raises(UserError, match="`lora` belongs to"):
        expand({"ready": "lora", "train.method": "full"}, method="lora")


def test_a_space_over_objectives_spans_their_ranges() -> None:
    config = job({"ready": "auto", "train.objective": ["sft", "dpo", "simpo"]})
    beta = config.tune.space["train.objective.beta"]
    assert (beta["float"], beta["when"]) == ([0.001, 10.0], "train.objective == 'dpo' or train.objective == 'simpo'")
    space = Space(config.tune.space)
    check_settings(space, config.training.model_dump(mode="json"))
    generator = np.random.default_rng(0)
    points = [space.complete(space.draw(generator)) for _ in range(50)]
    for point in points:
        assert ("train.objective.beta" in point) == (point["train.objective"] != "sft")
        assert ("train.objective.gamma" in point) == (point["train.objective"] == "simpo")


@pytest.mark.parametrize(
    ("space", "train", "problem"),
    [
        ("lorra", {}, "tune.space: there is no ready space `lorra`; did you mean `lora`?"),
        (["optimizer", 3], {}, "tune.space: there is no ready space `3`; one of auto, optimizer"),
        ({"ready": "dppo"}, {}, "there is no ready space `dppo`; did you mean `dpo`?"),
        ([], {}, "tune.space.ready: names no ready space; one of auto"),
        ("lora", {}, "`lora` belongs to train.method=lora, and the training has full; set train.method=lora, or leave"),
        ("dpo", {"objective": "ipo"}, "`dpo` belongs to train.objective=dpo, and the training has ipo"),
        ({"ready": "auto", "train.method": {"float": [0, 1]}}, {}, "tune.space.train.method: is not a choice of names"),
    ],
)
def test_mistakes(space: Any, train: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(space, **train)
    assert problem in str(error.value)


def test_a_wrong_training_is_named_first() -> None:
    with pytest.raises(UserError, match=r"train\.method"):
        job("auto", method="lorra")


def test_the_linter_reads_a_ready_space() -> None:
    warnings = check_space(Space(ready("auto", method="lora")))
    assert not warnings


def test_a_study_of_any_function_has_them() -> None:
    space = {**spaces.ready("optimizer"), "train.batch_size": 8}
    result = minimize(lambda trial: trial["train.schedule.warmup"], space, budget=5, sampler="random")
    assert result.value == min(trial.settings["train.schedule.warmup"] for trial in result.trials)


def test_objectives_exist() -> None:
    assert {part.value for part in READY.values() if part.key == "train.objective"} <= set(OBJECTIVES.builtin)
