"""``posttrain tune``: a study of trainings on the command line, its table, and the mistakes that it names."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import yaml

from posttrain.store.message import counted
from posttrain.tune import TrialContext, minimize
from posttrain.tune.study import read_study_events

Call = Callable[..., Any]

TUNE: dict[str, Any] = {
    "space": {
        "train.learning_rate": {"float": [1e-4, 1e-2], "log": True},
        "train.batch_size": {"choice": [4, 8], "when": "train.epochs < 4"},
        "train.epochs": 2,
    },
    "held_out": "25%",
    "sampler": "random",
    "scheduler": {"name": "successive_halving", "max_resource": 3},
    "budget": "3 trials",
}


def write(folder: Path, **changes: Any) -> Path:
    rows = [{"prompt": f"message {n}", "completion": "card" if n % 2 else "cash"} for n in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": "tiny",
        "data": "train.jsonl",
        "task": {"labels": ["card", "cash"]},
        "train": {"precision": "float32"},
        "tune": TUNE | changes,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_a_study_and_its_table(posttrain: Call, tmp_path: Path) -> None:
    config, out = write(tmp_path), tmp_path / "out"
    outcome = posttrain("tune", config, "--out", out)
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert lines[0].startswith("best 0.")
    assert lines[0].endswith(" of 3 trials, by held-out loss")
    (model,) = (
        line.removeprefix("the best trial's model: ") for line in lines if line.startswith("the best trial's model: ")
    )
    assert Path(model, "model.safetensors").is_file()
    assert lines[-1] == f"posttrain train --config {out / 'best.yaml'} --out MODEL"
    assert "trial 0 at step 1: 0." in outcome.err
    assert " · 0 done · best 0." in outcome.err
    assert " at step 1 (trial 0) · 2 trials left" in outcome.err
    # The same command has nothing left to do.
    again = posttrain("tune", config, "--out", out)
    assert again.out == outcome.out
    assert "trial" not in again.err
    shown = posttrain("tune", "show", out)
    assert shown.out.splitlines()[0].split() == [
        *["trial", "state", "held-out", "loss", "step", "seconds", "train.learning_rate", "train.batch_size"]
    ]
    assert "3 trials: 2 paused, 1 finished" in shown.out
    values = posttrain("tune", "show", out, "--json").json
    assert values["states"] == {"paused": 2, "finished": 1}
    assert values["best"]["settings"]["train.epochs"] == 2
    assert len(values["trials"]) == 3
    assert values["tokens"] == sum(trial["tokens"] for trial in values["trials"]) > 0
    # Another space says what has changed.
    space = TUNE["space"] | {"train.learning_rate": {"float": [1e-5, 1e-2], "log": True}}
    write(tmp_path, space=space, budget="4 trials")
    mistake = posttrain("tune", config, "--out", out).mistake
    assert "the space has changed: `train.learning_rate` was float [0.0001, 0.01]" in mistake
    assert "name another --out and this folder as warm_start" in mistake


@pytest.mark.slow
def test_the_gain_over_the_settings_of_the_config(posttrain: Call, tmp_path: Path) -> None:
    space, out = {"train.learning_rate": {"float": [1e-4, 1e-2], "log": True}}, tmp_path / "out"
    config = write(tmp_path, space=space, scheduler="none", budget="2 trials")
    values = yaml.safe_load(config.read_text())
    values["train"] |= {"epochs": 1, "learning_rate": 1e-4}
    config.write_text(yaml.safe_dump(values))
    outcome = posttrain("tune", config, "--out", out)
    trials = posttrain("tune", "show", out, "--json").json["trials"]
    assert trials[0]["settings"]["train.learning_rate"] == 1e-4
    assert trials[1]["value"] < trials[0]["value"]
    ending = f" of 2 trials, by held-out loss; the config's own settings {trials[0]['value']:.6g}"
    assert outcome.out.splitlines()[0].endswith(ending)


@pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_page_of_a_study_that_another_process_works_on(
    posttrain: Call, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres_url") if where == "postgres" else None
    folder, page = tmp_path / "study", tmp_path / "page.html"
    options = [] if url is None else ["--storage", url]
    space = {"rate": {"float": [1e-5, 1e-1], "log": True}, "layers": [2, 4, 8]}

    def objective(trial: TrialContext) -> float:
        if trial.number == 11:
            outcome = posttrain("tune", "report", folder, page, *options)
            assert outcome.code == 0, outcome
            assert outcome.out.endswith(f"wrote {page}\n")
            assert "rate explains" in outcome.out
            assert "(fANOVA over 11 trials); the best trial has value" in outcome.out
            assert "11 finished, 1 running" in page.read_text()
        return float(np.log10(trial["rate"]))

    assert len(minimize(objective, space, budget="12 trials", sampler="random", out=folder, storage=url).trials) == 12
    assert posttrain("tune", "report", folder, page, *options).code == 0
    assert "12 finished" in page.read_text()
    assert [path.name for path in tmp_path.glob("page*")] == ["page.html"]


@pytest.mark.slow
def test_a_warm_start_is_shown(posttrain: Call, tmp_path: Path) -> None:
    space = {"x": {"float": [0, 1]}}

    def objective(trial: TrialContext) -> float:
        return 1 + (trial["x"] - 0.3) ** 2

    minimize(objective, space, budget=15, sampler="random", out=tmp_path / "first")
    minimize(objective, space, budget=4, sampler="quasi_random", out=tmp_path / "next", warm_start=tmp_path)
    table = posttrain("tune", "show", tmp_path / "next")
    assert "starts from 3 settings of first (not comparable, 15 trials)" in table.out
    page = tmp_path / "page.html"
    assert posttrain("tune", "report", tmp_path / "next", page).code == 0
    assert "Starts from 3 settings of first" in page.read_text()
    first = json.loads(posttrain("tune", "show", tmp_path / "first", "--json").out)
    assert first["warm_start"] == []


@pytest.mark.slow
def test_a_search_whose_database_is_gone_is_shown(posttrain: Call, tmp_path: Path) -> None:
    space = {"x": {"float": [0, 1]}}
    minimize(lambda trial: (trial["x"] - 0.3) ** 2, space, budget=12, sampler="random", out=tmp_path / "study")
    whole = posttrain("tune", "show", tmp_path / "study", "--json").json
    kept = tmp_path / "kept"  # as the artifact of a round has it, without what a machine changes
    kept.mkdir()
    (kept / "task.json").write_bytes((tmp_path / "study" / "task.json").read_bytes())
    for line in (tmp_path / "study" / "trials.jsonl").read_text().splitlines():
        trial = json.loads(line)
        fields = {name: trial[name] for name in ("number", "state", "value", "settings")}
        with (kept / "trials.jsonl").open("a") as file:
            file.write(json.dumps({**fields, "reports": []}) + "\n")
    shown = posttrain("tune", "show", kept, "--json").json
    assert (shown["best"]["value"], shown["states"]) == (whole["best"]["value"], whole["states"])
    assert "12 trials: 12 finished" in posttrain("tune", "show", kept).out
    page = tmp_path / "page.html"
    assert posttrain("tune", "report", kept, page).code == 0
    text = page.read_text()
    assert "value by trial" in text
    assert "of the study" not in text
    assert "search took is not kept." in text


@pytest.mark.slow
def test_a_study_of_several_objectives_and_its_front(posttrain: Call, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"scheduler": {"name": "none", "max_resource": 3}, "budget": "4 trials"}
    config = write(tmp_path, objectives=["loss", "accuracy", "seconds"], choose="loss within 1%", **options)
    outcome = posttrain("tune", config, "--out", out)
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    values = posttrain("tune", "show", out, "--json").json
    front = values["front"]
    expected = f"front of {counted(len(front), 'trial')}, of which trial {values['best']['number']}: loss 0."
    assert lines[0].startswith(expected)
    assert lines[0].endswith("; 4 trials in all")
    assert lines[1] == f"chosen by the rule: loss within 1%; a config of each: {out / 'front'}"
    assert lines[-1] == f"posttrain train --config {out / 'best.yaml'} --out MODEL"
    assert values["choose"] == "loss within 1%"
    assert [entry["metric"] for entry in values["objectives"]] == ["loss", "accuracy", "seconds"]
    assert [entry["maximize"] for entry in values["objectives"]] == [False, True, False]
    assert sorted(path.name for path in (out / "front").iterdir()) == [f"{number:04d}.yaml" for number in sorted(front)]
    shown = posttrain("tune", "show", out).out.splitlines()
    assert shown[0].split()[:6] == ["trial", "state", "loss", "accuracy", "seconds", "step"]
    rows = [line.split() for line in shown[1:]]
    assert [int(row[0]) for row in rows if row[1:2] == ["finished"]] == front
    assert shown[-1] == "chosen by the rule: loss within 1%"
    page = tmp_path / "page.html"
    assert "are on the front; the rule loss within 1% takes trial" in posttrain("tune", "report", out, page).out
    assert posttrain("train", "--config", out / f"front/{front[0]:04d}.yaml", "--out", tmp_path / "model").code == 0
    assert (
        "the study searches the least loss, greatest accuracy, least seconds"
        in posttrain("tune", write(tmp_path, **options), "--out", out).mistake
    )


@pytest.mark.slow
def test_a_population_shows_its_settings_by_step(posttrain: Call, tmp_path: Path) -> None:
    space, out = {"train.learning_rate": TUNE["space"]["train.learning_rate"]}, tmp_path / "out"
    scheduler = {"name": "pbt", "population": 2, "max_resource": 3}
    config = write(tmp_path, space=space, scheduler=scheduler, sampler=None, budget="4 trials")
    outcome = posttrain("tune", config, "--out", out)
    assert outcome.code == 0, outcome
    values = posttrain("tune", "show", out, "--json").json
    assert values["states"] == {"stopped": 2, "finished": 2}
    assert [trial.get("fork", {}).get("step") for trial in values["trials"]] == [None, None, 1, 2]
    shown = posttrain("tune", "show", out).out
    fork = values["trials"][3]["fork"]
    assert "continues from" in shown.splitlines()[0]
    assert f"{fork['parent']} at 2" in shown
    spans = values["schedule"]
    assert [spans[0]["steps"][0], spans[-1]["steps"][1]] == [1, 3]
    text = (out / "best.yaml").read_text()
    best = yaml.safe_load(text)
    assert best["train"]["learning_rate"] == spans[-1]["settings"]["train.learning_rate"]
    if len(spans) == 1:  # the best never went on from another's checkpoint
        assert "#" not in text
        assert outcome.out.splitlines()[-1].startswith("posttrain train --config")
        return
    assert text.startswith(f"# The settings of the best trial, {values['best']['number']}, changed while it ran")
    assert yaml.safe_load("".join(line[2:] for line in text.splitlines(True)[2:] if line[0] == "#")) == {
        "schedule": spans
    }
    assert f"{spans[0]['steps'][0]} to {spans[0]['steps'][1]}" in shown
    model = out / "trials" / f"{values['best']['number']:04d}" / "model"
    assert f"the best trial's model: {model}" in outcome.out.splitlines()
    assert (model / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_one_shot_study_names_its_model(posttrain: Call, tmp_path: Path) -> None:
    space, out = {"train.lora.ranks.layers.1.*": [0, 2, 4]}, tmp_path / "out"
    options = {"scheduler": "none", "sampler": None, "one_shot": True, "budget": "3 trials"}
    config = write(tmp_path, space=space, **options)
    mistake = posttrain("tune", config, "--out", out).mistake
    assert mistake.endswith("searches ranks of LoRA, and all weights are trained; use method: lora")
    values = yaml.safe_load(config.read_text())
    values["train"] |= {"method": "lora", "epochs": 1}
    config.write_text(yaml.safe_dump(values))
    outcome = posttrain("tune", config, "--out", out)
    assert outcome.code == 0, outcome
    assert "trains the supernet" in outcome.err
    assert "the best sub-network, with an adapter of " in outcome.err
    assert outcome.out.splitlines()[-2:] == [
        f"the best sub-network: {out / 'model'}; to train its ranks alone:",
        f"posttrain train --config {out / 'best.yaml'} --out MODEL",
    ]
    assert (out / "model" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_population_of_ranks_is_refused(posttrain: Call, tmp_path: Path) -> None:
    space = {"train.lora.rank": [4, 8], "train.method": "lora"}
    config = write(tmp_path, space=space, scheduler={"name": "pbt", "max_resource": 3}, sampler=None)
    mistake = posttrain("tune", config, "--out", tmp_path / "out").mistake
    assert "`train.lora.rank` cannot change while a training runs, as it does in a population" in mistake
    assert not (tmp_path / "out").exists()


def count_steps(trials: Path) -> int:
    """Counts the steps of all trainings. No folder is walked in which a training still writes and removes files."""
    return sum(len(path.read_text().splitlines()) for path in trials.glob("*/model/metrics.jsonl"))


@pytest.mark.long
def test_kill_a_study_of_trainings(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
        write(folder)

    def start(name: str) -> Any:
        return forked.start(["tune", "config.yaml", "--out", "out"], folders[name], tmp_path / f"{name}.log")

    process = start("whole")
    process.join()
    assert process.exitcode == 0, (tmp_path / "whole.log").read_text()
    trials, kills = folders["killed"] / "out" / "trials", 0
    for goal, number in ((4, signal.SIGKILL), (9, signal.SIGTERM)):
        process = start("killed")
        while process.is_alive() and count_steps(trials) < goal:
            time.sleep(0.01)
        if process.is_alive():
            os.kill(process.pid, number)
            kills += 1
        process.join()
    assert kills == 2
    assert "stopped; the same command resumes from here" in (tmp_path / "killed.log").read_text()
    process = start("killed")
    process.join()
    assert process.exitcode == 0, (tmp_path / "killed.log").read_text()
    whole, killed = (read_study_events(folder / "out")[1] for folder in folders.values())
    for one, other in zip(whole, killed, strict=True):
        assert (one.settings, one.state, one.value) == (other.settings, other.state, other.value)
        reports = [[(report.step, report.value) for report in trial.reports] for trial in (one, other)]
        assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["config.yaml"], "--out: say where to keep the study"),
        (["none.yaml", "--out", "out"], "none.yaml: cannot be read: No such file or directory"),
        (["config.yaml", "--out", "out", "--engine", "rai"], "--engine: there is no engine `rai`"),
        (
            ["config.yaml", "--out", "out", "--workers", "2"],
            "--workers: inline runs one at a time, so it cannot have 2 workers",
        ),
        (["config.yaml", "--out", "out", "--budget", "much"], "--budget: `much` is not a budget"),
        (["train.jsonl", "--out", "out"], "train.jsonl:2: broken YAML"),
        (["report", "out", "page.html"], "out: holds no study; begin one with posttrain tune CONFIG.yaml --out DIR"),
        (["report", "out", "none/page.html"], "none: there is no such folder; make it first"),
        (["report", "out", "."], ".: is a folder; name a file, such as report.html"),
        (["show", "out"], "out: holds no study; begin one with posttrain tune CONFIG.yaml --out DIR"),
        (["config.yaml", "--out", "."], ".: holds something else already; name another --out"),
    ],
)
def test_mistakes(
    posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    mistake = posttrain("tune", *arguments).mistake
    assert mistake.startswith(problem), mistake
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"metrik": "loss"}, "config.yaml:"),
        ({"space": {"train.epochs": {"int": [3, 1]}}}, "tune.space.train.epochs: 3 to 1 is not a range"),
        ({"objectives": ["loss", {"metrik": "size"}]}, "tune.objectives: `metric`: Field required"),
        ({"objectives": ["loss", "seconds"], "warm_start": "."}, "tune.warm_start: carries over the best"),
        ({"space": "lorra"}, "tune.space: there is no ready space `lorra`; did you mean `lora`?"),
        ({"budget": None}, "tune.budget: says nothing of what it may spend"),
    ],
)
def test_mistakes_in_the_config(
    posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    write(tmp_path, **changes)
    monkeypatch.chdir(tmp_path)
    mistake = posttrain("tune", "config.yaml", "--out", "out").mistake
    assert problem in mistake, mistake
    assert mistake.startswith("config.yaml:"), mistake


def test_a_config_without_the_section(posttrain: Call, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("model: tiny\ndata: train.jsonl\n")
    assert "has no section `tune`" in posttrain("tune", path, "--out", tmp_path / "out").mistake


def test_help(posttrain: Call) -> None:
    group = posttrain("tune", "--help").out
    assert "show" in group
    assert "report" in group
