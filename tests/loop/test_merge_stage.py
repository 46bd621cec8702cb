"""Rounds whose candidate is merged with other models before the gate decides."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.evaluate.suite import read_evaluation
from posttrain.inspect.show import show
from posttrain.loop.config import load_config
from posttrain.store.errors import UserError

Open = Callable[[Path], Any]

pytestmark = pytest.mark.slow


def weights(loop: Any, id: str) -> dict[str, torch.Tensor]:
    return load_file(loop.store.artifacts.path(id) / "model.safetensors")


MERGE = {"models": ["champion"], "weights": [0.75, 0.25]}


@pytest.fixture(scope="module")
def merged_workspace(finished_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace in round 3, whose candidate is merged with the champion and evaluated; read-only."""

    def build(folder: Path) -> None:
        shutil.copytree(finished_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, rounds=3, merge=MERGE)
        loop = loop_class(folder)
        loop.run(until="evaluate")
        loop.store.close()

    return Path(build_once("merged", build))


@pytest.fixture
def merged_loop(merged_workspace: Path, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a copy of `merged_workspace`."""
    return open_loop(Path(shutil.copytree(merged_workspace, tmp_path / "merged", symlinks=True)))


def test_the_gate_deploys_a_merged_candidate_and_the_round_records_what_it_kept(merged_loop: Any) -> None:
    loop = merged_loop
    loop.run()
    row = loop.metadata.rounds()[3]
    trained = loop.metadata.runs(stage="train", round=3)[-1].output
    merged = loop.metadata.runs(stage="merge", round=3)[-1]
    champion = row.champion_before
    assert loop.champion == row.candidate == merged.output == row.detail["outputs"]["merge"] != trained
    assert merged.inputs == {"model 0": trained, "model 1": champion}
    assert row.decision["action"] == "deploy"
    parts = weights(loop, trained), weights(loop, champion)
    for name, tensor in weights(loop, row.candidate).items():
        expected = 0.75 * parts[0][name].double() + 0.25 * parts[1][name].double()
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    (kept,) = row.detail["results"]["evaluate"]
    assert (kept["model"], kept["suite"], kept["metric"]) == (champion, "test", "accuracy")
    results = [
        read_evaluation(loop.store.artifacts.path(row.detail[name]))["test"].metrics["accuracy"]
        for name in ("evaluation", "champion_evaluation")
    ]
    assert kept["ratio"] == pytest.approx(results[0] / results[1])
    assert kept["low"] <= kept["ratio"] <= (kept["high"] or kept["ratio"])
    (sentence,) = show(loop.store, "round 3")["sentences"]["evaluate"]
    assert champion in sentence
    assert loop.status["rounds"][3]["retention"] == row.detail["results"]["evaluate"]
    assert f"<p>{sentence[0].upper() + sentence[1:]}.</p>" in loop.page
    # The trained model itself is not measured: it would cost an evaluation that decides nothing.
    evaluated = [run.inputs["model"] for run in loop.metadata.runs(stage="evaluate")]
    assert row.candidate in evaluated
    assert trained not in evaluated
    assert len(evaluated) == len(set(evaluated))
    assert "retention" not in loop.metadata.rounds()[2].detail
    # The same command again does nothing.
    runs = loop.stages()
    loop.run()
    assert loop.stages() == runs


def test_the_gate_refuses_a_merged_candidate(small: Any, merged_loop: Any) -> None:
    loop = merged_loop
    small.configure(loop.root, rounds=3, merge=MERGE, gate={"deploy": ["accuracy > 1"]})
    loop.run()
    row = loop.metadata.rounds()[3]
    assert row.decision["action"] == "refuse"
    assert row.candidate == row.detail["outputs"]["merge"]
    assert loop.champion == loop.metadata.rounds()[2].candidate


def test_the_artifact_is_the_same_on_another_day(begun_loop: Callable[..., Any]) -> None:
    models = []
    for name in ("one", "other"):
        loop = begun_loop(name, merge={"models": ["base"], "method": "linear"})
        loop.run(1, until="merge")
        models.append(loop.metadata.runs(stage="merge")[-1].output)
        merge = json.loads((loop.store.artifacts.path(models[-1]) / "merge.json").read_text())
        assert not {"seconds", "peak_memory", "models"} & merge.keys()
    assert models[0] == models[1]


def test_task_vectors_skip_the_base_and_earlier_rounds_take_part(
    small: Any, begun_loop: Callable[..., Any], copied_loop: Any
) -> None:
    merge = {"models": ["champion", "round 2"], "method": "ties", "parameters": {"density": 0.5}}
    loop = begun_loop(merge=merge | {"models": ["champion"]})
    loop.run(1, until="merge")
    # In round 1 the champion is the base, whose task vector is zero.
    assert loop.metadata.runs(stage="merge") == []
    loop = copied_loop
    small.configure(loop.root, merge=merge)
    loop.run(3, until="merge")
    (run,) = loop.metadata.runs(stage="merge")
    trained = loop.metadata.runs(stage="train", round=3)[-1].output
    base, _, second = (row.candidate for row in loop.metadata.rounds()[:3])
    # The champion is the model of round 2, which counts once.
    assert run.inputs == {"model 0": trained, "model 1": second, "base": base}


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        ({"method": "tiess"}, "did you mean `ties`"),
        ({"models": ["champion"], "weights": [1.0]}, "1 weight for the candidate and 1 model"),
        ({"models": ["champion"], "method": "ties", "parameters": {"densty": 1}}, "did you mean `density`"),
    ],
)
def test_a_wrong_section_is_named_before_any_work(small: Any, merge: dict[str, Any], message: str) -> None:
    root = small(merge=merge)
    with pytest.raises(UserError, match=message):
        load_config(root)


def test_an_unknown_model_ends_the_round_in_one_line(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(rounds=1, merge={"models": ["round 7"]})
    with pytest.raises(UserError, match="round 7 trained no model"):
        loop.run()


def test_methods_with_statistics_read_the_training_set(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(rounds=1, merge={"models": ["base"], "method": "fisher"})
    loop.run(until="merge")
    (run,) = loop.metadata.runs(stage="merge")
    assert run.inputs["dataset"] == loop.metadata.runs(stage="train", round=1)[-1].inputs["dataset"]
    merge = json.loads((loop.store.artifacts.path(run.output) / "merge.json").read_text())
    assert {entry["data"] for entry in merge["statistics"]} == {run.inputs["dataset"]}
    assert [entry["statistic"] for entry in merge["statistics"]] == ["fisher", "fisher"]
