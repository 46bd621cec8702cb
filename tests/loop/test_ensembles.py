"""Ensembles in a workspace: evaluated by their file, kept once they are fitted, and as a model that labels."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from posttrain.inspect.evaluation import evaluate_model
from posttrain.loop.config import load_config
from posttrain.loop.stages.suggest import SUGGESTIONS
from posttrain.models.linear_head import LinearHead
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

OpenLoop = Any


def ensemble(root: Path, name: str = "ensemble.yaml", **values: Any) -> str:
    (root / name).write_text(json.dumps(values))
    return str(root / name)


def evaluated(root: Path, model: str | None, **options: Any) -> dict[str, Any]:
    config = load_config(root)
    with Workspace.open(root, config.store) as store:
        return evaluate_model(store, config, model, **options)


def hold_out(small: Any, root: Path) -> None:
    small.write(root / "held.csv", small.rows()[80:])


def runs(root: Path, stage: str) -> int:
    with Workspace.open(root, load_config(root).store, write=False) as store:
        return len(store.metadata.runs(stage=stage, status="done"))


def test_an_ensemble_of_one_model_is_that_model(finished_copy: Path) -> None:
    alone = evaluated(finished_copy, None)
    together = evaluated(finished_copy, ensemble(finished_copy, method="average", models=["champion"]))
    assert together["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    assert together["model"].startswith("ensemble-")
    (row,) = together["ensemble"]["test"]["models"]
    assert row["model"] == "champion"
    assert row["accuracy"] == alone["metrics"]["accuracy"]
    assert row["seconds"] > 0


def test_models_outside_of_the_workspace_are_fetched(finished_copy: Path) -> None:
    write_tiny_model(finished_copy / "models" / "other", seed=5)
    file = ensemble(finished_copy, method="vote", models=["champion", "base", "round 1", "models/other"])
    report = evaluated(finished_copy, file)["ensemble"]["test"]
    assert [row["model"] for row in report["models"]] == ["champion", "base", "round 1", "models/other"]
    assert [row["weight"] for row in report["models"]] == [0.25] * 4


def test_a_finished_ensemble_is_found_again(small: Any, finished_copy: Path) -> None:
    hold_out(small, finished_copy)
    values = {"method": "cascade", "models": ["base", "champion"], "tolerance": 0.5, "data": "held.csv"}
    first = evaluated(finished_copy, ensemble(finished_copy, **values))
    again = evaluated(finished_copy, ensemble(finished_copy, "copy.yaml", **values))
    assert again == first
    assert runs(finished_copy, "ensemble") == 1
    # Other records are another ensemble.
    small.write(finished_copy / "held.csv", small.rows()[90:])
    assert evaluated(finished_copy, str(finished_copy / "copy.yaml"))["model"] != first["model"]


def test_a_cascade_reports_its_curve(small: Any, finished_copy: Path) -> None:
    hold_out(small, finished_copy)
    file = ensemble(finished_copy, method="cascade", models=["base", "champion"], tolerance=0.5, data="held.csv")
    report = evaluated(finished_copy, file)["ensemble"]["test"]
    curve = report["curve"]
    assert curve[0]["shares"] == [0, 1]
    assert curve[0]["accuracy"] == report["models"][1]["accuracy"]
    assert curve[-1]["shares"] == [1, 0]
    assert curve[-1]["accuracy"] == report["models"][0]["accuracy"]
    assert report["fitted"]["records"] == 88
    assert report["fitted"]["shown"]


def test_a_linear_head_of_a_folder_is_a_model(finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ("card", "cash", "loan", "rate")
    head = LinearHead(labels, np.zeros((4, 4), np.float32), np.array([0, 1, 0, 0], np.float32))
    head.save(finished_copy / "head")
    monkeypatch.setattr("posttrain.models.embedder.Embedder.load", lambda name: _FourWords())
    file = ensemble(finished_copy, method="cascade", models=["head", "champion"], thresholds=[0.6])
    report = evaluated(finished_copy, file)["ensemble"]["test"]
    assert report["models"][0]["accuracy"] == pytest.approx(0.25, abs=0.15)  # always `cash`
    assert report["chosen"]["shares"] == [0, 1]


class _FourWords:
    """Embeds every text as zeros."""

    key = "zeros"
    pooling = type("Pooling", (), {"max_length": 8})

    def __init__(self) -> None:
        import torch

        self.model = torch.nn.Module()
        self.model.get_input_embeddings = lambda: torch.nn.Embedding(1, 1)
        self.model.weight = torch.nn.Parameter(torch.zeros(5))

    def tokenizer(self, texts: list[str], truncation: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * len(text.split()) for text in texts]}

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.zeros((len(texts), 4), np.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "vote", "models": ["champion", "nobody"]}, "nothing here is called `nobody`"),
        ({"method": "vote", "models": ["champion", "./none"]}, "./none"),
        ({"method": "vote", "models": ["linear"]}, "there is no linear head"),
        ({"method": "gate", "models": ["base"], "data": "none.csv"}, "no such file: none.csv"),
        ({"method": "gate", "models": ["base"], "data": "test.csv"}, "20 of its 20 inputs are in suite `test`"),
        ({"method": "gate", "models": ["champion"], "data": "answers.csv"}, "are in suite `test`"),
    ],
)
def test_a_mistake_is_one_clear_line(finished_copy: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        evaluated(finished_copy, ensemble(finished_copy, **values))
    assert message in str(caught.value)
    assert runs(finished_copy, "ensemble") == 0


def test_records_that_a_model_learned_from_fit_nothing(small: Any, finished_copy: Path) -> None:
    small.write(finished_copy / "learned.csv", small.rows()[:60])
    values = {"method": "cascade", "tolerance": 0.5, "data": "learned.csv"}
    with pytest.raises(UserError, match=r"of its 60 inputs are in the training set that `champion` learned from"):
        evaluated(finished_copy, ensemble(finished_copy, models=["base", "champion"], **values))
    # Models that learned nothing here may be fitted on them.
    evaluated(finished_copy, ensemble(finished_copy, models=["base", "tiny"], **values))


def test_a_scorer_of_single_models_refuses_an_ensemble(small: Any, finished_copy: Path) -> None:
    small.configure(finished_copy, evaluate={"suites": {"test": {}, "fluency": {"scorer": "perplexity"}}})
    with pytest.raises(UserError, match="scorer `perplexity` measures a single model, not an ensemble"):
        evaluated(finished_copy, ensemble(finished_copy, method="vote", models=["champion", "base"]))


def test_an_ensemble_writes_texts(small: Any, finished_copy: Path) -> None:
    suites = {"test": {"scorer": "exact_match"}}
    small.configure(finished_copy, task={"labels": None, "max_new_tokens": 2}, evaluate={"suites": suites})
    result = evaluated(finished_copy, ensemble(finished_copy, method="vote", models=["champion", "base"]))
    assert "accuracy" in result["metrics"]
    assert [row["weight"] for row in result["ensemble"]["test"]["models"]] == [0.5, 0.5]
    with pytest.raises(UserError, match="averages probabilities of labels"):
        evaluated(finished_copy, ensemble(finished_copy, method="average", models=["champion", "base"]))


def test_an_ensemble_labels(small: Any, begun_loop: Callable[..., OpenLoop]) -> None:
    loop = begun_loop()
    ensemble(loop.root, method="cascade", models=["base", "tiny"], thresholds=[0.3])
    small.configure(loop.root, label={"annotator": "ensemble", "ensemble": "ensemble.yaml", "per_round": 6})
    loop.run(1, until="label")
    state = loop.metadata.rounds()[1].detail
    rows = parquet.read_table(loop.store.artifacts.path(state["outputs"]["suggest"]) / SUGGESTIONS).to_pylist()
    assert len(rows) == 6
    assert all(row["accepted"] and row["answer"] in small.labels for row in rows)
    labels = parquet.read_table(loop.store.artifacts.path(state["labelled"]) / "labels.parquet")
    assert {json.loads(meta)["labelled_by"]["annotator"] for meta in labels["meta"].to_pylist()} == {"model:ensemble"}


def test_answers_are_held_out_where_no_model_learned_here(
    small: Any, finished_workspace: Path, open_loop: Callable[[Path], OpenLoop], tmp_path: Path
) -> None:
    for name, models, known in (("other", ["tiny"], True), ("own", ["base", "champion"], False)):
        root = Path(shutil.copytree(finished_workspace, tmp_path / name, symlinks=True))
        ensemble(root, method="vote", models=models)
        small.configure(root, label={"suggest": "ensemble", "ensemble": "ensemble.yaml", "accept_error": 0.9})
        loop = open_loop(root)
        loop.run(3, until="suggest")
        meta = loop.store.artifacts.get(loop.metadata.rounds()[3].detail["outputs"]["suggest"]).meta
        assert (meta["acceptance"]["held_out"] == 24) == known
        assert meta["suggested"] == 12


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"suggest": "ensemble"}, "label.ensemble: the teacher `ensemble` needs a file"),
        ({"suggest": "ensemble", "ensemble": "none.yaml"}, "label.ensemble: none.yaml: no such file"),
    ],
)
def test_a_teacher_without_a_file_is_refused(small: Any, label: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(small(label=label))
    assert message in str(caught.value)
