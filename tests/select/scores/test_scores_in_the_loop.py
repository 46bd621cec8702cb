"""Scores that the loop computes and caches."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.loop import Loop
from posttrain.models import likelihood
from posttrain.models.embedder import Embedder
from posttrain.models.language_model import LanguageModel
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.set_num_threads(1)


@pytest.fixture
def run_loop() -> Iterator[Any]:
    workspaces: list[Workspace] = []

    def run(root: Path, *arguments: Any, **options: Any) -> Workspace:
        config = load_config(root)
        workspaces.append(Workspace.create(root, config.store))
        Loop(workspaces[-1], config).run(*arguments, **options)
        return workspaces[-1]

    yield run
    for workspace in workspaces:
        workspace.close()


def scores_of(workspace: Workspace, round: int) -> tuple[Artifact, Path]:
    (run,) = [item for item in workspace.metadata.runs(stage="score", status="done") if item.round == round][-1:]
    assert run.output is not None
    return workspace.artifacts.get(run.output), workspace.artifacts.path(run.output)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, weakref.ref[LanguageModel]]]:
    """The models that rounds load from now on; none of them is loaded while it is in memory."""
    loaded: list[tuple[str, weakref.ref[LanguageModel]]] = []
    load = RoundContext.model

    def model(context: RoundContext, id: str) -> LanguageModel:
        assert id not in [other for other, alive in loaded if alive() is not None]
        lm = load(context, id)
        loaded.append((id, weakref.ref(lm)))
        return lm

    monkeypatch.setattr(RoundContext, "model", model)
    return loaded


def test_closed_label_set(
    small: Any, run_loop: Any, loaded: list[tuple[str, weakref.ref[LanguageModel]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled = ["loss"]
    choice = {
        "strategy": "top",
        "options": {"by": "perplexity"},
        "scores": labelled,
        "explore": 0,
        "focus": 0,
        "near_duplicate": None,
    }
    root = small(select=choice, rounds=3)
    small.write(root / "test.csv", small.rows()[60:120])
    workspace = run_loop(root, until="select", rounds=3)  # round 0, and round 1 up to its batch, which is cold
    cold = parquet.read_table(scores_of(workspace, 1)[1] / "scores.parquet")
    assert np.isnan(cold["perplexity"].to_numpy()).all()
    assert "temperature" not in scores_of(workspace, 1)[0].meta

    workspace = run_loop(root, rounds=2)
    artifact, folder = scores_of(workspace, 2)
    table = parquet.read_table(folder / "scores.parquet")
    assert (table["perplexity"].to_numpy() > 1).all()
    meta = artifact.meta
    assert meta["calibrated_on"] == 60
    assert 0.05 <= meta["temperature"] <= 20
    assert {"ece_before", "ece_after"} <= set(meta)
    # The measures are of the calibrated probabilities.
    p = np.array(table["probabilities"].to_pylist())
    np.testing.assert_allclose(table["confidence"], p.max(axis=1), atol=1e-6)
    np.testing.assert_allclose(table["entropy"], -(p * np.log(p)).sum(axis=1), atol=1e-5)
    # Labelled records have the other scores.
    labelled_scores = parquet.read_table(folder / "labelled.parquet")
    assert labelled_scores.column_names == ["id", "input_id", *labelled]
    assert labelled_scores.num_rows == 12
    assert (labelled_scores["loss"].to_numpy() > 0).all()
    # The batch has the highest perplexities.
    (select_run,) = [item for item in workspace.metadata.runs(stage="select", status="done") if item.round == 2]
    batch = parquet.read_table(workspace.artifacts.path(str(select_run.output)) / "batch.parquet")
    order = np.argsort(-table["perplexity"].to_numpy(), kind="stable")[:12]
    assert batch["id"].to_pylist() == [table["id"][int(row)].as_py() for row in order]

    # One score less: the others come from the cache.
    loaded.clear()
    workspace = run_loop(root, rounds=3, until="score")
    before = parquet.read_table(scores_of(workspace, 3)[1] / "scores.parquet")
    assert {item.name for item in (root / ".posttrain" / "scores-float32").iterdir()} <= {
        entry.candidate for entry in workspace.metadata.rounds()
    }
    small.configure(root, rounds=3, select={**choice, "scores": []})
    monkeypatch.setattr(likelihood, "label_scores", None)
    monkeypatch.setattr(likelihood, "prompt_embeddings", None)
    monkeypatch.setattr(likelihood, "text_log_likelihoods", None)
    workspace = run_loop(root, rounds=3, until="score")
    assert parquet.read_table(scores_of(workspace, 3)[1] / "scores.parquet").equals(before)


def test_free_text(small: Any, run_loop: Any) -> None:
    root = small(
        task={"labels": None, "max_new_tokens": 5},
        select={"strategy": "top", "options": {"by": "perplexity"}},
        evaluate={"suites": {"test": {"scorer": "exact_match"}}, "latency": {"prompts": 0}},
    )
    small.write(root / "test.csv", small.rows()[60:100])
    for _ in range(2):
        run_loop(root, until="deploy")
    workspace = run_loop(root, until="select")
    artifact, folder = scores_of(workspace, 2)
    table = parquet.read_table(folder / "scores.parquet")
    assert (table["perplexity"].to_numpy() > 0).all()
    # The tiny model is never right, and calibration lowers its confidence accordingly.
    meta = artifact.meta
    assert meta["calibrated_on"] == 40
    assert meta["ece_after"] < meta["ece_before"]
    assert meta["temperature"] < 0.1
    nats = table["entropy"].to_numpy()
    np.testing.assert_allclose(table["confidence"], np.exp(-nats / meta["temperature"]), rtol=1e-9)


def test_a_wrong_score_is_refused_before_any_work(
    small: Any, run_loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from posttrain.select.scores.registry import ScoreSpec\nTEXT = ScoreSpec('text', 1, 'words', len)\n"
    (tmp_path / "wrong_score.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    root = small(select={"scores": ["wrong_score:TEXT"]})
    with pytest.raises(UserError, match="score `wrong_score:TEXT` is for written answers"):
        run_loop(root)
    assert not (root / ".posttrain").exists()


def test_embeddings_may_come_from_a_sentence_model(small: Any, run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "prompt_embeddings", None)  # the champion's embeddings are not used
    root = small(select={"embeddings": "minilm"}, rounds=2)
    run_loop(root, rounds=1)
    workspace = run_loop(root, until="score")
    embedder = Embedder.load("minilm")
    texts = {row["text"] for row in small.rows()[:60]}
    for round in (1, 2):
        _, folder = scores_of(workspace, round)
        table = parquet.read_table(folder / "scores.parquet")
        assert table.schema.field("embedding").type.list_size == embedder.width
        pool = parquet.read_table(
            workspace.artifacts.path(workspace.metadata.rounds()[round].detail["queried_pool"]) / "records.parquet"
        )
        inputs = {row["id"]: row["prompt"][0]["content"] for row in pool.to_pylist()}
        scored_texts = [inputs[id] for id in table["id"].to_pylist()]
        assert set(scored_texts) <= texts
        np.testing.assert_allclose(table["embedding"].to_pylist(), embedder.embed(scored_texts), atol=1e-6)
    labelled = np.load(scores_of(workspace, 2)[1] / "labelled.npy")
    assert labelled.shape == (12, embedder.width)
    cached = {item.name for item in (root / ".posttrain" / "scores-float32").iterdir()}
    assert embedder.key in cached, "its embeddings hold for every champion"


def test_a_missing_sentence_model_is_refused_before_any_work(small: Any, run_loop: Any) -> None:
    root = small(select={"embeddings": "./nowhere"})
    with pytest.raises(UserError, match="nowhere"):
        run_loop(root)
    assert not (root / ".posttrain" / "artifacts").exists() or not any((root / ".posttrain" / "artifacts").iterdir())
