"""A scoring pass without a break, and one that is killed at several moments and then finished; a program of its own.

    python killed_passes.py MODEL WHOLE KILLED MOMENT...

Each writes its scores into a folder.

A moment is ``score:N``, ``rename:N`` or ``kept:N``: inside the forward passes of the N-th chunk that this process
works on, between writing that chunk and giving it its name, and after that. Each process forks from this one, kills
itself there, and the last one runs through. ``scored.log`` has a line for each record of a chunk that was kept,
``begun.log`` for each record of a chunk that was begun.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pandas  # noqa: F401  which pyarrow imports otherwise in each process
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.select.scores import labels, passes
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import CachePartition, ScoreCache, ScoringModel
from posttrain.select.scores.table import score_pool

LABELS = ["card lost", "card stolen", "refund", "top up"]
RECORDS = 30
AT_ONCE = 4


def main(model: Path, whole: Path, killed: Path, moments: list[str]) -> None:
    labels._CHUNK = AT_ONCE
    load_language_model(model, TaskConfig())  # what takes seconds to import is there for all
    for folder, moment in [(whole, None), *((killed, item) for item in moments), (killed, None)]:
        child = os.fork()
        if child == 0:
            run(model, folder, moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == (0 if moment is None else signal.SIGKILL), (moment, status)


def run(model: Path, folder: Path, moment: str | None) -> None:
    watch(folder, moment)
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


def watch(folder: Path, moment: str | None) -> None:
    """Note what is begun and kept, and die when the moment has come."""
    where, _, number = (moment or ":0").partition(":")
    seen = {"score": 0, "rename": 0, "kept": 0}

    def passing(point: str) -> None:
        seen[point] += 1
        if point == where and seen[point] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def note(name: str, keys: list[str]) -> None:
        with (folder / name).open("a") as file:
            file.writelines(f"{key}\n" for key in keys)

    scored, write, replace = passes.cached_scores, CachePartition.write, os.replace

    def watched(group, model, records, cache):  # type: ignore[no-untyped-def]
        score = group.score

        def begun(lm, chunk):  # type: ignore[no-untyped-def]
            note("begun.log", [f"{group.name} {item.key}" for item in chunk])
            table = score(lm, chunk)
            passing("score")
            return table

        object.__setattr__(group, "score", begun)
        return scored(group, model, records, cache)

    def renamed(source: str, target: Path) -> None:
        passing("rename")
        replace(source, target)

    def kept(partition: CachePartition, chunk: pa.Table) -> None:
        os.replace = renamed
        write(partition, chunk)
        os.replace = replace
        note("scored.log", [f"{partition.folder.name} {key}" for key in chunk["key"].to_pylist()])  # type: ignore[union-attr]
        passing("kept")

    from posttrain.select.scores import context

    context.cached_scores = watched
    CachePartition.write = kept  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
