"""Drift of new inputs: its measures, its values in rules, and its place in a round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.drift import DriftValues, cluster_drift, confidence_drift, embedding_drift
from posttrain.loop.record import read_rounds
from posttrain.loop.scoring import remove_unused_scores, scoring_for
from posttrain.loop.stages.drift import MeasureDrift
from posttrain.models.embedder_source import embedder_key
from posttrain.report.charts.chart import Chart


def cloud(rng: np.random.Generator, count: int, centre: float = 0.0) -> Any:
    return rng.normal(centre, 1, (count, 8)).astype(np.float32)


@pytest.mark.parametrize("new", [30, 200])
def test_no_drift_is_near_zero_and_seldom_above_the_mark_of_a_change(new: int) -> None:
    rng = np.random.default_rng(0)
    values = np.array([cluster_drift(cloud(rng, 600), cloud(rng, new), seed) for seed in range(40)])
    assert abs(values.mean()) < 0.1
    # The raw index of 30 new inputs is above 0.25 nearly every time: (10 - 1) (1/30 + 1/300) = 0.33.
    assert (values > 0.25).mean() <= (0.2 if new == 30 else 0.0)


def test_clusters_are_those_of_inputs_that_are_not_compared() -> None:
    """In many dimensions clusters fit the inputs that they were made of, and no others."""
    rng = np.random.default_rng(0)
    values = []
    for seed in range(5):
        known, new = (rng.normal(size=(200, 200)).astype(np.float32) for _ in range(2))
        values.append(cluster_drift(known, new, seed))
    assert abs(np.mean(values)) < 0.3


def test_a_moved_cloud_and_other_shares_of_the_same_clouds_are_drift() -> None:
    rng = np.random.default_rng(1)
    left, right = cloud(rng, 500, -4), cloud(rng, 500, 4)
    known = np.concatenate([left[:400], right[:100]])
    for new in (cloud(rng, 100, 8), np.concatenate([left[400:420], right[100:180]])):
        assert cluster_drift(known, new, 0) > 0.25
        assert embedding_drift(known, new, 0)[1] < 0.01
    same = np.concatenate([left[400:480], right[100:120]])
    assert cluster_drift(known, same, 0) < 0.1
    assert embedding_drift(known, same, 0)[1] > 0.01


def test_confidence_drift_follows_the_confidence() -> None:
    rng = np.random.default_rng(2)
    known, same, lower = rng.beta(8, 2, 300), rng.beta(8, 2, 300), rng.beta(2, 8, 300)
    assert confidence_drift(known, same) < 0.1 < 0.25 < confidence_drift(known, lower)


def test_values_survive_json_with_what_is_not_measured() -> None:
    values = DriftValues(3, 40)
    assert values.as_dict()["psi"] is None
    assert np.isnan(list(DriftValues.from_dict(values.as_dict()).values.values())).all()
    measured = DriftValues(30, 40, 0.1, 0.2, 0.3, 0.4)
    assert DriftValues.from_dict(measured.as_dict()) == measured
    assert measured.values == {"drift.psi": 0.1, "drift.mmd": 0.2, "drift.mmd_p": 0.3, "drift.confidence": 0.4}


@pytest.mark.slow
def test_new_inputs_start_a_round_whose_gate_and_status_know_the_drift(small: Any, copied_loop: Any) -> None:
    drift = {"embedder": None, "least": 10}
    loop, root = copied_loop, copied_loop.root
    texts = [f"parcel {row} never came to our shop, refund order {row * 7}" for row in range(40)]
    rows = [{"text": text, "label": small.labels[row % 4]} for row, text in enumerate(texts)]
    small.write(root / "answers.csv", [*small.rows(), *rows])
    assert loop.status["rounds"][2]["drift"] is None
    gate = {"deploy": ["drift.psi < 0.25 or accuracy > 2", "drift.confidence >= -1"]}
    small.configure(
        root, rounds=3, drift=drift, gate=gate, triggers={"any": ["drift.psi > 0.25 and drift.mmd_p < 0.01"]}
    )
    assert "drift.psi = nan" in str(loop.run())
    small.write(root / "data" / "pool" / "few.csv", rows[:8], ["text"])
    assert "drift.psi = nan" in str(loop.run())
    small.write(root / "data" / "pool" / "more.csv", rows[8:], ["text"])
    assert loop.run() is None
    entry = loop.status["rounds"][3]
    assert (entry["decision"], entry["drift"]["new"], entry["drift"]["known"]) == ("refuse", 40, 60)
    assert entry["drift"]["psi"] > 0.25
    rules = loop.metadata.rounds()[3].decision["rules"]
    assert [rule["holds"] for rule in rules] == [False, True]
    assert f"drift.psi = {entry['drift']['psi']:.4g}" in rules[0]["values"]
    assert [sorted(entry["sentences"]) for entry in loop.status["rounds"][2:]] == [[], ["drift"]]
    (sentence,) = loop.status["rounds"][3]["sentences"]["drift"]
    assert sentence.startswith("large drift of 40 new inputs: drift.psi ")
    (section,) = MeasureDrift.sections(read_rounds(loop.store))
    (chart,) = [block for block in section.blocks if isinstance(block, Chart)]
    assert [row[0] for row in chart.rows] == ["inputs", "confidence"]
    assert loop.page.count("Large drift of 40 new inputs") == 1


@pytest.mark.slow
def test_the_embeddings_that_drift_compares_outlive_a_round(
    finished_copy: Path, open_loop: Callable[[Path], Any]
) -> None:
    loop = open_loop(finished_copy)
    context = RoundContext(loop.store, load_config(finished_copy), 3, in_round=False)
    scoring = scoring_for(context, loop.champion)
    assert scoring.cache.folder is not None
    # The linear head of small workspaces is off, so that nothing but the drift needs them.
    kept, unused = (scoring.cache.folder / name for name in (embedder_key("minilm"), "another-model"))
    for folder in (kept, unused):
        folder.mkdir(parents=True)
    remove_unused_scores(context, scoring)
    assert (kept.exists(), unused.exists()) == (True, False)
