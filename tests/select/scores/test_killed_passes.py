"""A scoring pass that is killed at several moments and then finished equals one without interruption.

A moment is ``score:N``, ``rename:N`` or ``write:N``: inside the forward passes of the N-th chunk that a process works
on, between writing that chunk and renaming it to its final name, and after that. ``scored.log`` has a line for each
record of a chunk that was written, ``begun.log`` for each record of a chunk that was begun.
"""

import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pandas  # noqa: F401  which pyarrow imports otherwise in each process
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from faults import in_process
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.select.scores import context, labels, passes
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import CachePartition, ScoreCache, ScoringModel
from posttrain.select.scores.table import score_pool

MOMENTS = ["score:1", "write:2", "rename:1", "score:3"]
LABELS = ["card lost", "card stolen", "refund", "top up"]
RECORDS = 30
AT_ONCE = 4


def score_in_a_fork(model: Path, folder: Path, moment: str | None) -> None:
    """Scores the pool in a process that kills itself at the moment, or runs through."""
    outcome = in_process(lambda: run(model, folder, moment))
    assert outcome.error is None
    assert outcome.killed == (moment is not None)


def run(model: Path, folder: Path, moment: str | None) -> None:
    labels._CHUNK = AT_ONCE
    instrument(folder, moment)
    task = TaskConfig(labels=LABELS)
    champion = ScoringModel("champion", task, lambda: load_language_model(model, task))
    scoring = ScoringContext(champion, LABELS, cache=ScoreCache(folder / "cache"))
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    generator = np.random.default_rng(0)
    texts = [f"message {number}" + " again" * int(generator.integers(9)) for number in range(RECORDS)]
    pool = pa.table(
        {
            "id": [f"{number:020x}" for number in range(RECORDS)],
            "source": ["pool.csv"] * RECORDS,
            "prompt": pa.array([[{"role": "user", "content": text}] for text in texts], turn),
            "text": pa.array([None] * RECORDS, pa.string()),
        }
    )
    parquet.write_table(score_pool(scoring, pool, RECORDS, 0, ["perplexity"]), folder / "scores.parquet")


def instrument(folder: Path, moment: str | None) -> None:
    """Log which records are begun and written, and kill this process at the moment."""
    kill_point, _, number = (moment or ":0").partition(":")
    counts = {"score": 0, "rename": 0, "write": 0}

    def count(point: str) -> None:
        counts[point] += 1
        if point == kill_point and counts[point] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def log(name: str, keys: list[str]) -> None:
        with (folder / name).open("a") as file:
            file.writelines(f"{key}\n" for key in keys)

    original_scores, write, replace = passes.cached_scores, CachePartition.write, os.replace

    def scores_with_log(group, model, records, cache):  # type: ignore[no-untyped-def]
        score = group.score

        def score_with_log(lm, chunk):  # type: ignore[no-untyped-def]
            log("begun.log", [f"{group.name} {item.key}" for item in chunk])
            table = score(lm, chunk)
            count("score")
            return table

        object.__setattr__(group, "score", score_with_log)
        return original_scores(group, model, records, cache)

    def counted_replace(source: str, target: Path) -> None:
        count("rename")
        replace(source, target)

    def write_with_log(partition: CachePartition, chunk: pa.Table) -> None:
        os.replace = counted_replace
        write(partition, chunk)
        os.replace = replace
        log("scored.log", [f"{partition.folder.name} {key}" for key in chunk["key"].to_pylist()])  # type: ignore[union-attr]
        count("write")

    context.cached_scores = scores_with_log
    CachePartition.write = write_with_log  # type: ignore[method-assign]


@pytest.mark.slow
def test_repeated_kills_score_no_record_twice(tmp_path: Path, tiny_model: Path) -> None:
    """The scores are the same to the byte, and a kill loses one chunk at most."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    whole.mkdir()
    killed.mkdir()
    load_language_model(tiny_model, TaskConfig())  # imports before the forks: they take seconds
    score_in_a_fork(tiny_model, whole, None)
    for moment in (*MOMENTS, None):
        score_in_a_fork(tiny_model, killed, moment)
    assert (killed / "scores.parquet").read_bytes() == (whole / "scores.parquet").read_bytes()
    scored_counts = Counter((killed / "scored.log").read_text().split("\n")[:-1])
    assert set(scored_counts) == set((whole / "scored.log").read_text().split("\n")[:-1])
    # A kill before the log entry leaves a line out; no line is there twice.
    assert max(scored_counts.values()) == 1
    begun_counts = Counter((killed / "begun.log").read_text().split("\n")[:-1])
    kills = sum(moment.startswith(("score", "rename")) for moment in MOMENTS)
    assert sum(begun_counts.values()) - len(begun_counts) <= kills * 4
    assert sum(begun_counts.values()) > len(begun_counts)
    files, expected = (
        {path.name: path.read_bytes() for path in (folder / "cache").rglob("*.chunk")} for folder in (killed, whole)
    )
    assert files == expected
