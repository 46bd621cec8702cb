"""Rounds whose candidate is merged with other models before the gate decides."""

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.evaluate.suite import read_evaluation
from posttrain.inspect.show import show
from posttrain.loop.config import load_config
from posttrain.store.errors import UserError
from posttrain.web.report import render_report
from posttrain.web.report_reader import read_report

Open = Callable[[Path], Any]

pytestmark = pytest.mark.slow


def weights(loop: Any, id: str) -> dict[str, torch.Tensor]:
    return load_file(loop.store.artifacts.path(id) / "model.safetensors")


def test_the_gate_deploys_a_merged_candidate(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(merge={"models": ["champion"], "weights": [0.75, 0.25]}))
    loop.run()
    for row in loop.metadata.rounds()[1:]:
        trained = loop.metadata.runs(stage="train", round=row.number)[-1].output
        merged = loop.metadata.runs(stage="merge", round=row.number)[-1]
        assert row.candidate == merged.output == row.detail["output merge"] != trained
        assert merged.inputs == {"model 0": trained, "model 1": row.champion_before}
        assert row.decision["action"] == "deploy"
        evaluated = loop.metadata.runs(stage="evaluate", round=row.number)
        assert row.candidate in {run.inputs["model"] for run in evaluated}
        parts = weights(loop, trained), weights(loop, row.champion_before)
        for name, tensor in weights(loop, row.candidate).items():
            expected = 0.75 * parts[0][name].double() + 0.25 * parts[1][name].double()
            assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert loop.champion == loop.metadata.rounds()[-1].candidate
    # The same command again does nothing, and another method makes a new model of the next round alone.
    runs = loop.stages()
    loop.run()
    assert loop.stages() == runs


def test_a_round_records_what_its_candidate_kept(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(merge={"models": ["champion"]}))
    loop.run()
    first, second = loop.metadata.rounds()[1:3]
    for row in (first, second):
        (kept,) = row.detail["retention"]
        champion = row.champion_before
        assert (kept["model"], kept["suite"], kept["metric"]) == (champion, "test", "accuracy")
        results = [
            read_evaluation(loop.store.artifacts.path(row.detail[name]))["test"].metrics["accuracy"]
            for name in ("evaluation", "champion_evaluation")
        ]
        assert kept["ratio"] == pytest.approx(results[0] / results[1])
        assert kept["low"] <= kept["ratio"] <= (kept["high"] or kept["ratio"])
        (sentence,) = show(loop.store, f"round {row.number}")["retention_sentences"]
        assert champion in sentence
        assert loop.status["rounds"][row.number]["retention"] == row.detail["retention"]
        page = render_report(read_report(loop.store, load_config(loop.root)))
        assert f"<p>{sentence[0].upper() + sentence[1:]}.</p>" in unescape(page)
    # The trained model itself is not measured: it would cost an evaluation that decides nothing.
    assert len(loop.metadata.runs(stage="evaluate")) == len(
        {r.inputs["model"] for r in loop.metadata.runs(stage="evaluate")}
    )
    assert "retention" not in loop.metadata.rounds()[0].detail


def test_the_gate_refuses_a_merged_candidate(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, merge={"models": ["champion"]}, gate={"deploy": ["accuracy > 1"]})
    loop = open_loop(root)
    loop.run()
    row = loop.metadata.rounds()[1]
    assert row.decision["action"] == "refuse"
    assert row.candidate == row.detail["output merge"]
    assert loop.champion == loop.metadata.rounds()[0].candidate


def test_the_artifact_is_the_same_on_another_day(small: Any, open_loop: Open) -> None:
    models = []
    for name in ("one", "other"):
        loop = open_loop(small(name, rounds=1, merge={"models": ["base"], "method": "linear"}))
        loop.run()
        models.append(loop.metadata.rounds()[1].candidate)
        merge = json.loads((loop.store.artifacts.path(models[-1]) / "merge.json").read_text())
        assert not {"seconds", "peak_memory", "models"} & merge.keys()
    assert models[0] == models[1]


def test_task_vectors_skip_the_base_and_earlier_rounds_take_part(small: Any, open_loop: Open) -> None:
    merge = {"models": ["champion", "round 1"], "method": "ties", "parameters": {"density": 0.5}}
    root = small(rounds=1, merge=merge | {"models": ["champion"]})
    loop = open_loop(root)
    loop.run()
    # In round 1 the champion is the base, whose task vector is zero.
    assert loop.metadata.runs(stage="merge") == []
    first = loop.metadata.rounds()[1].candidate
    small.configure(root, rounds=2, merge=merge)
    loop.run()
    (run,) = loop.metadata.runs(stage="merge")
    trained = loop.metadata.runs(stage="train", round=2)[-1].output
    base = loop.metadata.rounds()[0].candidate
    # The champion is the model of round 1, which counts once.
    assert run.inputs == {"model 0": trained, "model 1": first, "base": base}


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        ({"method": "tiess"}, "did you mean `ties`"),
        ({"models": ["champion"], "weights": [1.0]}, "1 weights for the candidate and 1 models"),
        ({"models": ["champion"], "method": "ties", "parameters": {"densty": 1}}, "did you mean `density`"),
    ],
)
def test_a_wrong_section_is_named_before_any_work(small: Any, merge: dict[str, Any], message: str) -> None:
    root = small(merge=merge)
    with pytest.raises(UserError, match=message):
        load_config(root)


def test_an_unknown_model_ends_the_round_in_one_line(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(rounds=1, merge={"models": ["round 7"]}))
    with pytest.raises(UserError, match="round 7 trained no model"):
        loop.run()


def test_methods_with_statistics_read_the_training_set(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(rounds=1, merge={"models": ["base"], "method": "fisher"}))
    loop.run()
    (run,) = loop.metadata.runs(stage="merge")
    row = loop.metadata.rounds()[1]
    assert run.inputs["dataset"] == loop.metadata.runs(stage="train", round=1)[-1].inputs["dataset"]
    merge = json.loads((loop.store.artifacts.path(row.candidate) / "merge.json").read_text())
    assert {entry["data"] for entry in merge["statistics"]} == {run.inputs["dataset"]}
    assert [entry["statistic"] for entry in merge["statistics"]] == ["fisher", "fisher"]
