"""Rounds that tune the settings of their training: when, from what, on which records, and what holds afterwards."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.inspect.show import show
from posttrain.loop.config import load_config
from posttrain.loop.tuning import Tuning
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.tune.transfer.past import read_kept_study

Open = Callable[[Path], Any]

RATE = "train.learning_rate"
TUNE = {
    "space": {RATE: {"float": [1e-6, 1e-2], "log": True}, "train.batch_size": [4, 8]},
    "when": "records >= 2.5 * tuned_records",
    "held_out": "50%",
    "sampler": "random",
    "budget": "3 trials",
}
TRAIN = {"learning_rate": 1e-6, "epochs": 1, "batch_size": 8}


def tuning(loop: Any, number: int) -> Tuning:
    return Tuning(**loop.metadata.rounds()[number].detail["results"]["tune"])


def trials(loop: Any, number: int) -> list[dict[str, Any]]:
    folder = loop.store.artifacts.path(loop.metadata.rounds()[number].detail["outputs"]["tune"])
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def trained_with(loop: Any, number: int) -> dict[str, Any]:
    (run,) = loop.metadata.runs(stage="train", round=number, status="done")
    settings: dict[str, Any] = run.config["train"]
    return settings


@pytest.fixture(scope="module")
def tuned_workspace(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace after a round that tuned its settings; read-only."""

    def build(folder: Path) -> None:
        shutil.copytree(begun_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, rounds=3, tune=TUNE, train=TRAIN)
        loop = loop_class(folder)
        loop.run(1)
        loop.store.close()

    return Path(build_once("tuned", build))


@pytest.fixture
def tuned_loop(tuned_workspace: Path, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a copy of `tuned_workspace`."""
    return open_loop(Path(shutil.copytree(tuned_workspace, tmp_path / "tuned", symlinks=True)))


@pytest.mark.slow
def test_rounds_tune_as_the_data_grow(tuned_loop: Any) -> None:
    loop = tuned_loop
    loop.run(2)
    loop.run(until="train")
    # The first round with labels, and the third, whose labels are three times as many.
    assert [run.round for run in loop.metadata.runs(stage="tune")] == [1, 3]
    first, third = tuning(loop, 1), tuning(loop, 3)
    assert (first.records, first.held_out, first.trials, third.records) == (12, 6, 3, 36)
    assert first.values == "records = 12, tuned_records = 0"
    assert third.values == "records = 36, tuned_records = 12"
    # The settings in force are tried first, and something is better than a rate of 1e-6.
    assert trials(loop, 1)[0]["settings"] == {RATE: 1e-6, "train.batch_size": 8} == dict(first.before)
    assert first.value is not None
    assert first.value_before is not None
    assert first.value == min(trial["value"] for trial in trials(loop, 1)) < first.value_before
    # They hold in the round itself and in the next one, which tunes nothing.
    for number, held in ((1, first), (2, first), (3, third)):
        train = trained_with(loop, number)
        assert {RATE: train["learning_rate"], "train.batch_size": train["batch_size"]} == held.settings
    assert "output tune" not in loop.metadata.rounds()[2].detail
    # The third round begins with the settings in force and the best of the first round's trials.
    assert dict(third.before) == dict(first.settings)
    ranked = sorted(trials(loop, 1), key=lambda trial: (trial["value"], trial["number"]))
    assert [trial["settings"] for trial in trials(loop, 3)] == [trial["settings"] for trial in ranked]
    assert third.value <= third.value_before  # type: ignore[operator]
    # Everybody says so.
    sentences = show(loop.store, "round 1")["sentences"]["tune"]
    assert sentences == first.sentences == loop.status["rounds"][1]["sentences"]["tune"]
    assert any(f"{RATE} 1e-06 → " in sentence for sentence in sentences)
    page = loop.page
    for sentence in sentences:
        assert f"<p>{sentence[0].upper() + sentence[1:]}.</p>" in page
    # The third says what it learned from the first. The page draws the searches of finished rounds.
    assert first.warm_start == []
    assert third.warm_start[0].startswith("the search starts from 3 settings of round 1 (distance ")
    assert all(sentence in third.sentences for sentence in third.warm_start)
    assert page.count('<span class="soft">3 trials</span>') == 1
    assert "held-out loss by trial" in page
    assert "held-out loss by seconds" not in page
    folder = loop.store.artifacts.path(loop.metadata.rounds()[3].detail["outputs"]["tune"])
    goal, kept, events = read_kept_study(folder)
    assert (goal.objective, len(kept), events) == ("held-out loss", 3, ())
    assert [trial.value for trial in kept] == [trial["value"] for trial in trials(loop, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.long)])
def test_a_round_tunes_ranks_by_patterns(begun_loop: Callable[..., Any], engine: str) -> None:
    attention, feed_forward = "train.lora.ranks.self_attn.*", "train.lora.ranks.layers.1.mlp.*"
    space = {attention: [0, 2], feed_forward: [0, 4, 8]}
    lora = {"rank": 4, "ranks": {"layers.1.mlp.*": 8}}
    train = {**TRAIN, "learning_rate": 1e-2, "method": "lora", "lora": lora}
    loop = begun_loop(rounds=1, tune={**TUNE, "space": space, "engine": engine}, train=train)
    loop.run(until="train")
    result = tuning(loop, 1)
    # A pattern that the config lacks has the rank of the rest, which is not a point of this space.
    assert result.before == {attention: 4, feed_forward: 8} == result.configured
    assert result.trials == 3
    assert result.value is not None
    assert result.value_before is not None
    assert result.value <= result.value_before
    ranks = trained_with(loop, 1)["lora"]["ranks"]
    expected = {key.removeprefix("train.lora.ranks."): value for key, value in result.settings.items()}
    assert {"self_attn.*": 4, **ranks} == {"self_attn.*": 4, **expected}
    assert set(result.settings) == {attention, feed_forward}


@pytest.mark.slow
def test_a_killed_search_ends_like_one_that_was_not(
    tuned_loop: Any, begun_loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.tune.trainings.training_trial import TrainingTrial

    whole, killed = tuned_loop, begun_loop(rounds=1, tune=TUNE, train=TRAIN)
    measure, calls = TrainingTrial.measure, []

    def kill_in_the_second(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingTrial, "measure", kill_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            killed.run()
    assert killed.metadata.runs(stage="tune", status="done") == []
    with monkeypatch.context() as patch:
        patch.setattr(TrainingTrial, "measure", lambda *arguments: calls.append(1) or measure(*arguments))
        killed.run(until="train")
    assert len(calls) == 4  # the first trial is not measured again
    ids = [loop.metadata.rounds()[1].detail["outputs"]["tune"] for loop in (whole, killed)]
    assert ids[0] == ids[1]
    assert whole.metadata.rounds()[1].candidate == killed.metadata.runs(stage="train")[-1].output
    files = [
        {path.name: file_digest(path) for path in loop.store.artifacts.path(ids[0]).iterdir() if path.is_file()}
        for loop in (whole, killed)
    ]
    assert files[0] == files[1]
    assert {"best.yaml", "trials.jsonl"} <= files[0].keys()


@pytest.mark.slow
def test_settings_stay_where_nothing_is_better(small: Any, begun_loop: Callable[..., Any]) -> None:
    # No rate of the space trains anything; the one in force is outside of it, and measured beside the study.
    space = {RATE: {"float": [1e-9, 1e-8], "log": True}}
    train = {"learning_rate": 4e-3, "epochs": 2}
    loop = begun_loop(rounds=1, tune={**TUNE, "space": space, "budget": "2 trials"}, train=train)
    loop.run()
    result = tuning(loop, 1)
    assert (result.settings, result.value) == ({RATE: 4e-3}, result.value_before)
    assert result.value < min(trial["value"] for trial in trials(loop, 1))
    assert (result.trials, result.trained) == (2, 3)
    assert result.sentences[0].startswith("tuned, and the settings stay: nothing better than ")
    assert trained_with(loop, 1)["learning_rate"] == 4e-3
    best = loop.store.artifacts.path(loop.metadata.rounds()[1].detail["outputs"]["tune"]) / "best.yaml"
    assert yaml.safe_load(best.read_text()) == {RATE: 4e-3}
    # A key that the user sets again counts for more than what was tuned.
    small.configure(loop.root, rounds=2, tune={**TUNE, "space": space}, train={**train, "learning_rate": 2e-3})
    loop.run(until="train")
    assert trained_with(loop, 2)["learning_rate"] == 2e-3


@pytest.mark.slow
def test_settings_that_the_scheduler_stops_are_measured_to_their_end(begun_loop: Callable[..., Any]) -> None:
    scheduler = {"name": "successive_halving", "max_resource": 3}
    loop = begun_loop(rounds=1, tune={**TUNE, "scheduler": scheduler}, train={**TRAIN, "epochs": 3})
    loop.run(until="tune")
    result, lines = tuning(loop, 1), trials(loop, 1)
    assert [line["state"] for line in lines].count("finished") == 1
    assert lines[0]["state"] == "paused"
    # Three parts of the best, one of the others, and the whole training of the settings before.
    assert result.trained == pytest.approx((3 + 1 + 1) / 3 + 1)
    best = next(line for line in lines if line["state"] == "finished")
    # At its end the winner is worse than the settings before, which were behind after a third: they stay.
    assert min(line["reports"][0][1] for line in lines) < lines[0]["reports"][0][1]
    assert result.value == result.value_before < best["value"]
    assert result.settings == result.before


@pytest.mark.slow
def test_too_few_records_leave_the_settings_as_they_are(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(rounds=1, tune={**TUNE, "held_out": "20%"}, train=TRAIN)
    loop.run(until="train")
    assert loop.metadata.runs(stage="tune") == []
    why = "not tuned: 2 of 12 records can be held out, and 5 are needed"
    assert loop.status["rounds"][1]["sentences"]["tune"] == [why]
    assert trained_with(loop, 1)["learning_rate"] == 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": None}, "tune.budget: says nothing of what it may spend; give one, such as 20 trials"),
        ({"budget": "lots"}, "tune.budget: `lots` is not a budget"),
        ({"space": {"train.lr": [1, 2]}}, "tune.space: unknown key `train.lr`"),
        ({"space": {"rate": [1, 2]}}, "tune.space: `rate` is not a setting of a training, and no formula"),
        ({"space": {"train.start": ["base", "champion"]}}, "`train.start` is the same for a whole round"),
        ({"when": "record > 1"}, "tune.when: rule `record > 1`: no value `record`; did you mean `records`"),
        ({"when": "1 > 0"}, "tune.when: rule `1 > 0` names no value"),
        ({"sampler": "tpee"}, "tune.sampler: there is no sampler `tpee`"),
        ({"scheduler": "best"}, "there is no scheduler `best`"),
        ({"metric": "acuracy"}, "tune.metric: there is no metric `acuracy` here"),
        ({"held_out": "nothing.csv"}, "tune.held_out: no such file: nothing.csv"),
        ({"engine": "procs"}, "tune.engine: there is no engine `procs`; did you mean `processes`"),
        (
            {"workers": 2},
            "tune.workers: inline runs one at a time, so it cannot have 2 workers; use tune.engine processes",
        ),
        ({"storage": "postgresql://h/d"}, "tune.storage: a round keeps its study in the workspace"),
        ({"objectives": ["loss", "seconds"]}, "tune.objectives: a round chooses settings by one metric; name a metric"),
        ({"one_shot": True}, "tune.one_shot: leaves a model, and a round trains its own"),
        ({"warm_start": "studies"}, "tune.warm_start: a round starts from the studies of the rounds before it"),
        ({"budget": "5 EUR"}, "tune.budget: `5 EUR` is not a budget"),
        ({"initial": [{RATE: 1.0}]}, "tune.initial: {train.learning_rate: 1.0} is not a point of the space"),
        (
            {"scheduler": {"name": "pbt", "max_resource": 4}},
            "tune.scheduler: finds a schedule of settings, which the round's training cannot follow",
        ),
    ],
)
def test_mistakes_are_named_before_any_work(small: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(small(tune={**TUNE, **changes}))
    assert message in str(error.value)


def test_a_key_has_one_owner(small: Any) -> None:
    adjust = [{"round >= 2": "train.learning_rate * 0.5"}]
    message = f"adjust: `{RATE}` would have two owners, a rule here and `{RATE}` of tune.space"
    with pytest.raises(UserError, match=message):
        load_config(small(tune=TUNE, adjust=adjust))
    load_config(small("other", tune=TUNE, adjust=[{"round >= 2": "train.epochs + 1"}]))


def test_the_default_rule_tunes_at_first_and_after_growth_or_drift(small: Any) -> None:
    from posttrain.loop.tuning import tuning_rule

    config = load_config(small(tune={key: value for key, value in TUNE.items() if key != "when"}))
    assert config.tune is not None
    rule, nan = tuning_rule(config.tune), float("nan")

    def holds(records: float, tuned: float, psi: float) -> bool:
        return rule.holds({"records": records, "tuned_records": tuned, "drift.psi": psi})

    assert holds(12, 0, nan)
    assert not holds(17, 12, nan)
    assert not holds(17, 12, 0.2)
    assert holds(18, 12, nan)
    assert holds(12, 12, 0.3)
