"""The map of the pool: neighbours stay neighbours, it has every chosen record, and it is reproducible."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select import pool_map as module
from posttrain.select.pool_map import MAP_SCHEMA, pool_map, tsne_plane


@pytest.fixture(autouse=True)
def real_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tsne_plane", tsne_plane)  # tests of the loop replace it


def _scores(embeddings: np.ndarray) -> pa.Table:
    width = embeddings.shape[1]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.astype(np.float32).ravel()), width)
    return pa.table({"id": pa.array([f"r{row:05d}" for row in range(len(embeddings))], pa.string()), "embedding": rows})


def _chosen(*rows: int) -> pa.Table:
    return pa.table({"id": pa.array([f"r{row:05d}" for row in rows], pa.string())})


def _clusters(count: int, each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(count), each)
    return 6 * rng.standard_normal((count, 24))[cluster] + rng.standard_normal((len(cluster), 24)), cluster


@pytest.mark.slow
def test_neighbours_stay_neighbours() -> None:
    from sklearn.manifold import trustworthiness

    embeddings, cluster = _clusters(6, 40)
    points = tsne_plane(embeddings)
    assert points.shape == (240, 2)
    assert points.dtype == np.float32
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.where(np.eye(240, dtype=bool), np.inf, 0)
    assert (cluster[distances.argmin(axis=1)] == cluster).mean() > 0.98
    random_points = np.random.default_rng(0).standard_normal((240, 2))
    assert trustworthiness(embeddings, points) > 0.85 > trustworthiness(embeddings, random_points)


def test_it_has_all_chosen_records_and_a_sample_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_POOL", 30)
    monkeypatch.setattr(module, "_MAX_LABELLED", 10)
    embeddings, _ = _clusters(4, 25)
    chosen = _chosen(3, 97, 50, 51, 52)
    result = pool_map(_scores(embeddings), chosen, embeddings[:20], seed=1)
    assert result.schema == MAP_SCHEMA
    kinds = result["kind"].to_pylist()
    assert [kinds.count(kind) for kind in ("pool", "chosen", "labelled")] == [25, 5, 10]
    ids = dict(zip(result["id"].to_pylist(), kinds, strict=True))
    assert {id for id, kind in ids.items() if kind == "chosen"} == set(chosen["id"].to_pylist())
    assert result["id"].to_pylist()[30:] == [None] * 10
    assert len(set(result["id"].to_pylist()[:30])) == 30
    # More chosen than the sample is large: all of them, and no other.
    every = pool_map(_scores(embeddings), _chosen(*range(40)), None, seed=1)
    assert every["kind"].to_pylist() == ["chosen"] * 40


def test_the_order_of_rows_changes_nothing() -> None:
    table = _scores(_clusters(3, 12)[0])
    mixed = table.take(np.random.default_rng(2).permutation(table.num_rows))
    assert pool_map(table, _chosen(1, 2), None, 0) == pool_map(mixed, _chosen(2, 1), None, 0)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 30])
def test_small_pools_and_equal_rows(count: int) -> None:
    varied = np.random.default_rng(0).standard_normal((count, 6))
    for embeddings, label_count in ((varied, 0), (np.ones((count, 6)), 1), (np.zeros((count, 6)), 4)):
        labelled = embeddings[:1].repeat(label_count, axis=0) if label_count else None
        result = pool_map(_scores(embeddings), _chosen(*range(min(count, 2))), labelled, 0)
        assert result.num_rows == count + (label_count if count else 0)
        assert np.isfinite(np.column_stack([result["x"].to_numpy(), result["y"].to_numpy()])).all()


_PROGRAM = """
import hashlib
import numpy as np
from posttrain.select.pool_map import tsne_plane
points = tsne_plane(np.random.default_rng(0).standard_normal((150, 16)))
print(hashlib.sha256(points.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_bytes_in_every_process_and_with_any_number_of_threads() -> None:
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    run = [sys.executable, "-c", _PROGRAM]
    other = subprocess.run(run, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    points = tsne_plane(np.random.default_rng(0).standard_normal((150, 16)))
    assert other.strip() == hashlib.sha256(points.tobytes()).hexdigest()
