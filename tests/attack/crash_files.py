"""Work that writes files of its own, without the database: feedback, checkpoints and scores."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from crash_states import promised
from crash_work import Log
from file_layer import Promise

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.ingest import export_batch, ingest
from posttrain.data.feedback.segment import inbox_problems
from posttrain.models.task import TaskConfig
from posttrain.select.scores.passes import (
    ScoreCache,
    ScoreGroup,
    ScoringInput,
    ScoringModel,
    cached_scores,
    chunk_problem,
)
from posttrain.store.hashing import read_lines
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.monitor.metrics import StepValues

ENTRIES = 24


def feedback(folder: Path, log: Log) -> Any:
    """Collects feedback in batches of one to five, seals segments, and takes their records twice on the way."""
    inbox, data = folder / "work" / ".posttrain" / "inbox", folder / "work" / "data"
    draw = random.Random(1)
    number = 0
    while number < ENTRIES:
        with Inbox(inbox, segment_bytes=2000) as writer:
            for size in (1, 5, 2, 4):
                entries = [_entry(id) for id in range(number, min(number + size, ENTRIES))]
                # The writer's thread waits for this lock: all of them share a write.
                with writer._wake:
                    waiting = [writer.append(entry) for entry in entries]
                for future in waiting:
                    log.promise("acknowledged", future.result().id)
                number += size
        if number >= ENTRIES or draw.random() < 0.7:
            for batch in ingest(inbox):
                export_batch(batch, dict.fromkeys(("labelled", "preferences", "pool"), data), None)
                batch.done()
                log.promise("taken", batch.number)
    exported = Counter(json.loads(line)["meta"]["feedback"]["id"] for line in _lines(data.glob("*.jsonl")))
    problems = [f"{path.name} {what}" for path, what in inbox_problems(inbox)]
    return {"stored": _stored(inbox), "exported": exported, "problems": problems}


def _entry(number: int) -> Feedback:
    return Feedback(id=f"f{number}", prompt="p", completion=f"{number} " * (number * 7 % 130 + 1), rating="up")


def _lines(paths: Iterator[Path]) -> Iterator[bytes]:
    for path in paths:
        yield from path.read_bytes().splitlines()


def _stored(inbox: Path) -> Counter[str]:
    paths = [*inbox.glob("segments/[0-9]*.jsonl"), *inbox.glob("segments/[0-9]*.open")]
    return Counter(value["feedback"]["id"] for path in paths for value in read_lines(path.read_bytes()).values)


def check_feedback(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    inbox = folder / "work" / ".posttrain" / "inbox"
    stored = _stored(inbox)
    for id in promised(promises, "acknowledged"):
        if stored[str(id)] != 1:
            yield f"{id} was acknowledged, and is there {stored[str(id)]} times"
    for path, what in inbox_problems(inbox):
        yield f"verify: {path.name} {what}"
    taken = [int(path.stem) for path in inbox.glob("segments/*.taken")]
    if missing := [number for number in promised(promises, "taken") if number not in taken]:
        yield f"segments {missing} were taken, and their marks are lost"


SAVED = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 5), (2, 6), (2, 7)]
"""Course and step of the newest checkpoint, in time: after step 6 training goes back to 5 and takes another course."""


def checkpoints(folder: Path, log: Log) -> Any:
    """Trains from the newest checkpoint on."""
    log.promise("started")
    config = CheckpointConfig(background=False, keep_last=2)
    path = folder / "work" / "scratch" / "key" / "checkpoints"
    with Checkpoints(path, config) as saver:
        latest = saver.latest()
        course, step = (latest.state["course"], latest.state["step"]) if latest else (1, 0)
        steps = list(latest.steps) if latest else []
        while (course, step) != (2, 7):
            if (course, step) == (1, 6):
                rewound = saver.rewind(5)
                assert rewound is not None
                log.promise("saved", 6)
                course, step, steps = 2, 5, list(rewound.steps)
            step += 1
            steps.append(_step(course, step))
            saver.save(step, _checkpoint(course, step, steps))
            log.promise("saved", SAVED.index((course, step)))
        return {"latest": _course_of(saver.latest())}


def _step(course: int, step: int) -> StepValues:
    return StepValues(
        step=step,
        loss=float(course),
        grad_norm=1.0,
        supervised_tokens=1,
        epoch=0,
        loss_count=1.0,
        lr=0.1,
        tokens=1,
        seconds=1.0,
        tokens_per_second=1.0,
        memory_bytes=1,
    )


def _checkpoint(course: int, step: int, steps: list[StepValues]) -> Checkpoint:
    tensors = {"weights": torch.full((300,), float(step)), "moments": torch.full((7,), float(course))}
    return Checkpoint(tensors, {"course": course, "step": step}, steps)


def _course_of(checkpoint: Checkpoint | None) -> tuple[int, int] | None:
    """Returns course and step of a checkpoint that is what was saved."""
    if checkpoint is None:
        return None
    course, step = checkpoint.state["course"], checkpoint.state["step"]
    assert checkpoint.tensors["weights"].tolist() == [float(step)] * 300
    assert checkpoint.tensors["moments"].tolist() == [float(course)] * 7
    assert [values.step for values in checkpoint.steps] == list(range(1, step + 1))
    return course, step


def check_checkpoints(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    saver = Checkpoints(folder / "work" / "scratch" / "key" / "checkpoints")
    latest = _course_of(saver.latest())
    saved = promised(promises, "saved")
    allowed = SAVED[saved[-1] :] if saved else [None, *SAVED]
    if saved[-1:] == [6] and len(promised(promises, "started")) > 1:
        allowed.append((1, 6))  # started again behind the way back, training takes step 6 of the first course again
    if latest not in allowed:
        yield f"the newest checkpoint is {latest}, not one of {allowed}"


def scores(folder: Path, log: Log) -> Any:
    """Scores records in chunks."""
    chunks: list[str] = []

    def score(lm: object, records: Sequence[ScoringInput]) -> pa.Table:
        # The chunk before is on the disk by now.
        for chunk in chunks[-1:]:
            log.promise("done", chunk)
        chunks.append(records[0].key)
        log.executed.append(records[0].key)
        return pa.table({"value": pa.array([float(len(str(record.prompt))) for record in records])})

    model = ScoringModel("model-0123456789abcdef", TaskConfig(), lambda: None)
    group = ScoreGroup("lengths", 1, {}, score, chunk_size=5)
    records = [ScoringInput([{"role": "user", "content": "x" * number}]) for number in range(30)]
    table = cached_scores(group, model, records, ScoreCache(folder / "work" / "scores"))
    for chunk in chunks:
        log.promise("done", chunk)
    return table.to_pylist()


def check_scores(folder: Path, promises: Sequence[Promise]) -> Iterator[str]:
    for path in folder.glob("work/scores/*/*/*.chunk"):
        if problem := chunk_problem(path):
            yield f"verify: {path.name} {problem}"
