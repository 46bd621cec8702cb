"""Settings of a training as points of a space, and the search that begins with those of the config."""

from pathlib import Path
from typing import Any

import pytest
from tune_records import RATES, RECORDS, job, tune_config

from posttrain.loop.stages.tune import search_settings
from posttrain.tune.api import TuneResult
from posttrain.tune.space import Space
from posttrain.tune.trainings.search import tune_trainings
from posttrain.tune.trainings.settings import apply_settings, configured_values, find_point, warmup_share


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"engine": "processes", "workers": 2}, True),
        ({"silence": 60}, True),
        ({"limits": {}}, True),
        ({"limits": {"parameters": 5}}, False),
        ({"budget": 3}, False),
    ],
)
def test_a_round_searches_again_only_where_the_result_may_change(changes: dict[str, Any], same: bool) -> None:
    assert (search_settings(tune_config(**changes)) == search_settings(tune_config())) is same


def test_settings_are_laid_over_the_config() -> None:
    base = {"seed": 1, "train": {"epochs": 1, "lora": {"rank": 4}}}
    settings = {"train.lora.rank": 8, "train.optimizer.name": "lion", "helper": 3}
    assert apply_settings(base, settings) == {
        "seed": 1,
        "train": {"epochs": 1, "lora": {"rank": 8}, "optimizer": {"name": "lion"}},
    }
    assert base["train"] == {"epochs": 1, "lora": {"rank": 4}}


@pytest.mark.parametrize(
    ("space", "train", "drawn"),
    [
        (RATES, {"learning_rate": 2e-3}, {"train.learning_rate": 2e-3}),
        (RATES, {"learning_rate": 2e-2}, None),
        ({"train.lora.rank": [4, 8], "train.lora.alpha": {"derive": "2 * train.lora.rank"}}, {}, None),
        (
            {"train.lora.rank": [4, 8], "train.lora.alpha": {"derive": "2 * train.lora.rank"}},
            {"lora": {"rank": 4, "alpha": 8}},
            {"train.lora.rank": 4},
        ),
        # What the config has of a parameter that does not exist there does not count.
        (
            {"train.method": ["full", "lora"], "train.lora.rank": {"choice": [4, 8], "when": "train.method == 'lora'"}},
            {},
            {"train.method": "full"},
        ),
        ({"train.lora.ranks.self_attn.*": [0, 16]}, {"method": "lora"}, {"train.lora.ranks.self_attn.*": 16}),
        ({"train.lora.gates": [0.2, 0.5]}, {"method": "lora"}, None),
        (RATES | {"train.epochs": 2}, {"learning_rate": 2e-3}, None),
    ],
)
def test_the_settings_of_the_config_as_a_point(
    tiny_model: Path, space: dict[str, Any], train: dict[str, Any], drawn: dict[str, Any] | None
) -> None:
    base, read = job(tiny_model, **train).model_dump(mode="json"), Space(space)
    assert find_point(read, base, configured_values(base, read.to_json()["entries"]), {}) == drawn


@pytest.mark.slow
def test_a_new_study_begins_with_the_settings_of_the_config(tiny_model: Path, held_out_folder: Path) -> None:
    config = job(tiny_model, epochs=1, learning_rate=1e-3)

    def run(budget: int) -> TuneResult:
        tune = tune_config(space=RATES, initial=[{"train.learning_rate": 5e-3}], budget=f"{budget} trials")
        return tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)

    def rates(result: TuneResult) -> list[float]:
        return [trial.settings["train.learning_rate"] for trial in result.trials]

    begun = run(2)
    assert rates(begun) == [1e-3, 5e-3]
    assert begun.current == begun.trials[0]
    assert rates(run(3))[:2] == [1e-3, 5e-3]


_WARMUP = "train.schedule.warmup"


@pytest.mark.parametrize(
    ("schedule", "space", "share"),
    [
        ({"warmup": 0.4}, {}, 0.4),
        ({"warmup": 0.1}, {_WARMUP: {"float": [0.0, 0.4]}}, 0.4),
        ({"warmup": 0.5}, {_WARMUP: {"float": [0.0, 0.4]}}, 0.5),
        # Of 100 records, 2 epochs in batches of 4 are 50 steps, in batches of 10 they are 20.
        ({"warmup": 5}, {}, 0.1),
        ({"warmup": 5}, {"train.batch_size": [4, 10]}, 0.25),
        ({}, {_WARMUP: [0.0, 10, 20]}, 0.4),
        ({"name": "constant", "warmup": 0.2}, {}, 0.2),
        ({"name": "wsd", "warmup": 0.1}, {_WARMUP: [0.2, 0.9], "train.schedule.decay": 0.5}, 0.2),
    ],
)
def test_the_longest_warmup_of_config_and_space(
    tiny_model: Path, schedule: dict[str, Any], space: dict[str, Any], share: float
) -> None:
    base = job(tiny_model, epochs=2, batch_size=4, schedule=schedule).model_dump(mode="json")
    constraints = ["train.schedule.warmup < 0.5"] if "train.schedule.decay" in space else []
    assert warmup_share(Space(RATES | space, constraints), base, 100) == pytest.approx(share)


def test_a_study_spares_the_warmup(
    tiny_model: Path, held_out_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedulers: list[Any] = []

    def optimize(*arguments: object, scheduler: Any, **options: object) -> TuneResult:
        schedulers.append(scheduler)
        return TuneResult(None, ())

    monkeypatch.setattr("posttrain.tune.trainings.search.optimize", optimize)
    monkeypatch.setattr("posttrain.tune.trainings.search.log.propagate", True)
    for name in ("early_stopping", "asha"):
        tune = tune_config(space=RATES, scheduler={"name": name, "max_resource": 9}, budget="2 trials")
        config = job(tiny_model, schedule={"warmup": 0.4})
        tune_trainings(config, tune, RECORDS, held_out_folder / "out", root=held_out_folder)
    assert schedulers[0]._warmup == pytest.approx(0.4, abs=0.06)  # of 18 steps
    assert "trials are compared after 1 of 9 parts, and up to 44% are warm-up" in caplog.text
