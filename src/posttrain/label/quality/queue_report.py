"""The quality report of a queue's answers as the pages and the API show it, computed in a thread and kept."""

import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from threading import Lock, Thread
from typing import Any

import numpy as np
import pyarrow as pa
from sqlalchemy import select

from posttrain.label.answers import answers_of_people
from posttrain.label.quality.annotators import known_outcomes
from posttrain.label.quality.findings import wilson
from posttrain.label.quality.report import QualityInputs, alarms, quality_report, quality_values
from posttrain.label.queue import Queue
from posttrain.label.tokens import NotFound
from posttrain.store.label_tables import label_items

# Not again for each answer: a report on many answers takes seconds of a processor.
_KEPT_SECONDS = 10.0

# Answers times bootstrap samples: intervals of many answers are narrow, whatever their own error.
_DRAWN_ANSWERS = 20_000_000
_LEAST_DRAWS, _DRAWS = 100, 1000
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_WINDOW = 30  # known items that a point of the chart of errors is about


@dataclass(frozen=True)
class _Kept:
    """A report, and the state of the database and the time that it was begun at."""

    report: dict[str, Any]
    position: int
    begun: float


class QueueReports:
    """Computes quality reports in a thread, one at a time, and keeps the last of each batch."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._lock, self._one = Lock(), Lock()
        self._kept: dict[str | None, _Kept] = {}
        self._running: dict[str | None, Future[dict[str, Any]]] = {}

    def get(self, batch: str | None = None, wait: float | None = None) -> dict[str, Any] | None:
        """Returns the report of `quality_report` on a batch, or on all, with ``behaviour`` of `measure_behaviour`.

        Args:
            batch: Name of the batch.
            wait: Seconds to wait for the present one; afterwards an earlier one is returned, or None. None: as long as
                it takes.

        Raises:
            NotFound: there is no such batch.
        """
        if batch is not None and self.queue.batch(batch) is None:
            raise NotFound(f"there is no batch `{batch}`")
        position = self.queue.metadata.position()
        with self._lock:
            kept = self._kept.get(batch)
            if kept and (kept.position == position or time.monotonic() - kept.begun < _KEPT_SECONDS):
                return kept.report
            future = self._running.get(batch)
            if future is None:
                future = self._running[batch] = Future()
                # A daemon: the server ends without waiting for it.
                Thread(target=self._run, args=(batch, position, future), daemon=True).start()
        try:
            return future.result(wait)
        except TimeoutError:
            return kept.report if kept else None

    def _run(self, batch: str | None, position: int, future: "Future[dict[str, Any]]") -> None:
        begun = time.monotonic()
        try:
            with self._one:
                report = report_on_queue(self.queue, batch)
        except BaseException as error:  # noqa: BLE001 - raised by all who wait for it
            with self._lock:
                del self._running[batch]
            future.set_exception(error)
            return
        with self._lock:
            self._kept[batch] = _Kept(report, position, begun)
            del self._running[batch]
        future.set_result(report)


def report_on_queue(queue: Queue, batch: str | None = None) -> dict[str, Any]:
    """Computes `quality_report` on a batch of the queue, or on all, with ``behaviour`` of `measure_behaviour`."""
    inputs, answers = _inputs(queue, batch), queue.answers(batch)
    draws = min(_DRAWS, max(_LEAST_DRAWS, _DRAWN_ANSWERS // max(answers.num_rows, 1)))
    report = quality_report(answers, inputs, draws=draws)
    return {**report, "behaviour": measure_behaviour(answers)}


def queue_alarms(queue: Queue) -> list[dict[str, Any]]:
    """Returns the alarms about the answers of all batches, as the report on them has them."""
    answers = queue.answers()
    return [finding.as_dict() for finding in alarms(answers, _inputs(queue))] if answers.num_rows else []


def queue_values(queue: Queue) -> dict[str, float]:
    """Returns the values that rules use, of the answers of all batches; the same as in the report on them."""
    return quality_values(queue.answers(), _inputs(queue))


def _inputs(queue: Queue, batch: str | None = None) -> QualityInputs:
    batches = [each for each in queue.batches() if batch in (None, each.name)]
    return QualityInputs(
        kinds={each.name: each.kind for each in batches},
        word_counts=_item_word_counts(queue, batch),
        # A round's two answers are samples of one model: which is the first is chance.
        random_order=[each.name for each in batches if each.kind == "preference" and each.round is not None],
        wanted=sum(queue.progress(each.name).left for each in batches if each.status == "open"),
    )


def _item_word_counts(queue: Queue, batch: str | None) -> dict[int, int]:
    """Counts the words that an annotator reads to answer each item: the text, or the last turn, and the candidates."""
    # Of a large batch most items wait for their answer.
    query = select(label_items.c.id, label_items.c.content).where(label_items.c.answered > 0)
    if batch is not None:
        query = query.where(label_items.c.batch == batch)
    with queue.metadata.reading() as connection:
        return {id: _count_words(content) for id, content in connection.execute(query)}


def _count_words(content: Mapping[str, Any]) -> int:
    texts = [content.get("text"), content.get("answer"), *(content.get("candidates") or ())]
    # Earlier turns are often the same from item to item, and people need not read them again.
    texts += [turn["content"] for turn in (content.get("prompt") or ())[-1:]]
    shown = " ".join(text for text in texts if text)
    # 1.6 Chinese characters are read in the time of a word (M. Brysbaert, 2019).
    return len(_IDEOGRAPH.sub(" ", shown).split()) + round(len(_IDEOGRAPH.findall(shown)) / 1.6)


def measure_behaviour(answers: pa.Table) -> dict[str, Any]:
    """Measures what each annotator does with suggestions, and how many of the latest known items are wrong.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`; those of models are left out.

    Returns:
        ``suggestions`` by annotator: ``planted`` and ``others``, the shares accepted; ``errors`` by annotator: the
        share of errors among each run of `_WINDOW` items whose answer is known, in the order of time.
    """
    people = answers_of_people(answers)
    names = np.array(people["annotator"].to_pylist(), object)
    answered = np.array(people["answer"].to_pylist(), object)
    suggested = np.array(people["suggestion"].to_pylist(), object)
    planted = people["planted"].to_numpy(zero_copy_only=False)
    shown = people["suggestion"].is_valid().to_numpy(zero_copy_only=False)
    outcomes = known_outcomes(people)
    of_outcomes = names[outcomes.row]
    suggestions, errors = {}, {}
    for name in map(str, sorted(set(names))):
        by_annotator = names == name
        if (by_annotator & shown).any():
            accepted = by_annotator & shown & (answered == suggested)
            suggestions[name] = {
                kind: asdict(wilson(int((accepted & rows).sum()), int((by_annotator & shown & rows).sum())))
                for kind, rows in (("planted", planted), ("others", ~planted))
            }
        wrong = ~outcomes.right[of_outcomes == name]
        if len(wrong) >= _WINDOW:
            errors[name] = (np.convolve(wrong, np.ones(_WINDOW), "valid") / _WINDOW).tolist()
    return {"suggestions": suggestions, "errors": errors}
