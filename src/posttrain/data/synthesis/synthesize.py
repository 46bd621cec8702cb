"""Makes new records from seed records, in the manner of Self-Instruct (Wang et al. 2023, arXiv:2212.10560).

A model sees seeds and writes more. Its replies are parsed strictly, compared with all seeds and all earlier items
(ROUGE-L below 0.7), answered if they are instructions, and run through steps of the pipeline: quality steps on the new
records alone, steps that compare together with the seeds.
"""

import json
import logging
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from posttrain.data.generation.prompts import parse_json, parse_list
from posttrain.data.records.outcome import Rejection, reject_rows
from posttrain.data.records.record import RECORD, REJECTED, assign_ids, concat, records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.registry import STEPS
from posttrain.data.steps.step import DataStep, GlobalStep
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.requests import Request, RequestSchedule, Seed, select_seeds
from posttrain.models.endpoint import Endpoint, Usage
from posttrain.models.reply_cache import CachedGenerate, Generate, ReplyCache
from posttrain.store.errors import UserError
from posttrain.store.files import hold_lock, make_folder, remove_tree
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

STEP = "synthesize"
_REQUESTS_PER_WAVE = 32  # fixed, as earlier waves decide which examples are shown
DEFAULT_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("length", {"input": {"min_characters": 2, "max_characters": 8000}, "answer": {"max_characters": 20_000}}),
    ("gopher_repetition", {"field": "input"}),
    ("gopher_repetition", {"field": "answer"}),
    ("exact", {}),
    ("minhash", {}),
)
"""Steps that new records run through by default, by name and settings: cheap ones against what models do wrong, which
is to say nothing, to continue without end and to repeat themselves; then duplicates."""


# Runs of letters and digits; where words have no spaces between them, each character.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿]|[^\W_぀-ヿ㐀-䶿一-鿿豈-﫿]+")


@dataclass(frozen=True)
class SynthesisResult:
    """Holds the records that a synthesis made and rejected.

    Attributes:
        records: RECORD table of the new records, each marked in ``meta``: ``synthetic`` with method, seeds' ids, model.
        rejected: REJECTED table of everything else that the model wrote; an unreadable reply is a ``text``.
        counts: ``asked`` (requests), ``written`` (items), ``kept``, rejections by ``step: reason``, and where there
            are some ``read as lines`` (replies without a JSON array).
        usage: of the endpoint; zeros for a model given.
    """

    records: pa.Table
    rejected: pa.Table
    counts: Mapping[str, int]
    usage: Usage


def synthesize(
    seeds: pa.Table,
    config: SynthesisConfig,
    generate: Generate | None,
    work_folder: Path,
    *,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: Sequence[DataStep] | None = None,
) -> SynthesisResult:
    """Makes new records; the same call after a kill requests only replies that are missing.

    Args:
        seeds: RECORD table.
        generate: the model to query; None for ``config.endpoint``.
        work_folder: keeps every raw reply, apart from those of other models.
        model: name of the given model in records and replies.
        settings: JSON values that the given model's replies depend on; others lead to new replies.
        steps: steps to run on new records; `DEFAULT_STEPS` by default. Steps that compare see the seeds, too.

    Raises:
        UserError: no seed fits, neither endpoint nor model is given, the endpoint refuses, or another process works
            in the folder.
        WorkError: the endpoint keeps failing.
    """
    selected = select_seeds(seeds.to_pylist(), config)
    requests = RequestSchedule(selected, config)
    with _open_cache(work_folder) as replies:
        usage = Usage()
        if generate is not None:
            name = model or "local"
            generate_replies: Generate = CachedGenerate(generate, name, replies, settings)
        elif config.endpoint is not None:
            endpoint = Endpoint(config.endpoint, replies, temperature=config.temperature)
            generate_replies, usage, name = endpoint, endpoint.usage, config.endpoint.model
        else:
            raise UserError("no model is named", where="endpoint", fix="set endpoint.base_url and endpoint.model")
        synthesis = _Synthesis(config, requests, [seed.text for seed in selected], name, _source(seeds))
        steps_to_run = _default_steps() if steps is None else steps
        target = config.records
        with progress_bar("synthesising", config.records, "records") as advance:
            # Steps at the end reject some records, so the target is raised until enough are kept or requests run out.
            while True:
                while (before := len(synthesis.new_records)) < target and synthesis.requested < config.most_requests:
                    synthesis.advance(generate_replies, target)
                    advance(len(synthesis.new_records) - before)
                outcome = synthesis.outcome(seeds, steps_to_run, usage)
                if (kept := outcome.records.num_rows) >= config.records or synthesis.requested >= config.most_requests:
                    break
                target = len(synthesis.new_records) + config.records - kept  # replace those that the steps rejected
    if kept < config.records:
        log.warning("made %d of %d records with %d requests", kept, config.records, synthesis.requested)
    return outcome


@contextmanager
def _open_cache(folder: Path) -> Iterator[ReplyCache]:
    """Opens the replies in a folder, for one process at a time; removes a new folder that stays empty."""
    new = not folder.exists()
    make_folder(folder)
    with hold_lock(folder / "lock", busy_message="another posttrain synthesises in this folder"):
        replies = ReplyCache(folder / "replies")
        try:
            yield replies
        finally:
            if new and not any((folder / "replies").iterdir()):
                remove_tree(folder)


def _default_steps() -> list[DataStep]:
    return [STEPS[name](**settings) for name, settings in DEFAULT_STEPS]


def _source(seeds: pa.Table) -> str:
    """Names the source of new records, by a name that no seed has."""
    sources, number = set(seeds["source"].to_pylist()), 1
    while (name := "synthetic" if number == 1 else f"synthetic {number}") in sources:
        number += 1
    return name


class _Synthesis:
    """Tracks what the model has written so far, and the records made of it."""

    def __init__(
        self, config: SynthesisConfig, requests: RequestSchedule, texts: Sequence[str], model: str, source: str
    ) -> None:
        self._config, self._requests, self._model, self._source = config, requests, model, source
        self._nearest, self._seed_count = RougeIndex(texts), len(texts)
        self._unwanted = {word.casefold() for word in config.unwanted_words}
        self._rows: list[dict[str, Any]] = []
        self._rejections: dict[int, Rejection] = {}
        self.requested = self.line_replies = 0  # requests so far; replies without a JSON array
        self.new_records: list[Seed] = []

    def advance(self, generate_replies: Generate, target: int) -> None:
        """Sends some more requests towards ``target`` items, and reads their replies."""
        config = self._config
        # The first wave assumes that every item is kept, later ones the rate so far.
        requests, items = (self.requested, max(1, len(self.new_records))) if self.requested else (1, config.per_request)
        needed = -(-(target - len(self.new_records)) * requests // items)
        # A wave has a fixed size at most, as its requests show the records of earlier waves as examples.
        count = min(needed, _REQUESTS_PER_WAVE, config.most_requests - self.requested)
        wave = [self._requests.at(number, self.new_records) for number in range(self.requested, self.requested + count)]
        self.requested += count
        new: list[int] = []
        for request, reply in zip(wave, generate_replies([request.prompt for request in wave]), strict=True):
            new += self._read(request, reply)
        if config.method == "instructions":
            self._answer(new, generate_replies)
        for row in new:
            if row not in self._rejections:
                record = self._rows[row]
                self.new_records.append(Seed(f"{self._source}:{row + 1}", _input(record), record))

    def _read(self, request: Request, reply: str | None) -> list[int]:
        """Adds the items of a reply, and returns their rows."""
        if reply is None:
            self._add(request, {"text": ""}, Rejection("no reply", "the model gave none, or was cut off"))
            return []
        texts = parse_json(reply)
        if texts is None and (texts := parse_list(reply)) is not None:
            self.line_replies += 1
        if texts is None:
            detail = "the reply is neither a JSON array of texts nor a list of lines"
            self._add(request, {"text": reply}, Rejection("not as asked", detail))
            return []
        rows = []
        for text in texts:
            columns = request.frame.with_text(text) if request.frame else {"prompt": _turn(text)}
            problem = self._problem(text)
            row = self._add(request, {**columns, **request.columns}, problem)
            if problem is None:
                # Only accepted items count: a rejected one must not rule out its better neighbour.
                self._nearest.add(text)
                rows.append(row)
        return rows

    def _problem(self, text: str) -> Rejection | None:
        """Returns the objection to an item, if there is one."""
        config = self._config
        if config.method == "instructions":
            text_words = text.split()
            if not config.min_words <= len(text_words) <= config.max_words:
                return Rejection("length", f"{len(text_words)} words", float(len(text_words)))
            if unwanted := self._unwanted.intersection(re.findall(r"\w+", text.casefold())):
                return Rejection("unwanted word", ", ".join(sorted(unwanted)))
        if near := self._nearest.of(text, config.similarity):
            score, index = near
            what = "a seed" if index < self._seed_count else "an earlier item"
            return Rejection("too similar", f"ROUGE-L {score:.3f} to {what}", score)
        return None

    def _answer(self, rows: Sequence[int], generate_replies: Generate) -> None:
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        prompts = [[*system, *self._rows[row]["prompt"]] for row in rows]
        for row, reply in zip(rows, generate_replies(prompts) if prompts else [], strict=True):
            if reply is None or not reply.strip():
                self._rejections[row] = Rejection("no answer", "the model gave none, or was cut off")
            else:
                self._rows[row]["completion"] = reply.strip()

    def _add(self, request: Request, columns: Mapping[str, Any], problem: Rejection | None) -> int:
        row = len(self._rows)
        marks = {"method": self._config.method, "model": self._model, "seeds": list(request.shown)}
        meta = json.dumps({"synthetic": marks}, ensure_ascii=False, sort_keys=True)
        record = {**dict.fromkeys(RECORD.names), "source": self._source, "line": row + 1, "meta": meta, **columns}
        self._rows.append(record)
        if problem is not None:
            self._rejections[row] = problem
        return row

    def outcome(self, seeds: pa.Table, steps: Sequence[DataStep], usage: Usage) -> SynthesisResult:
        """Runs the steps, and returns the kept and the rejected records."""
        kept, dropped, *_ = reject_rows(assign_ids(records(self._rows)), STEP, self._rejections)
        rejected = [dropped]
        for step in steps:
            # Seeds come first, so that of two alike the seed is the one that stays.
            together = concat([seeds, kept]) if isinstance(step, GlobalStep) else kept
            outcome = apply_step(step, together)
            kept = outcome.kept.filter(pa.compute.equal(outcome.kept["source"], self._source))
            rejected.append(outcome.rejected.filter(pa.compute.equal(outcome.rejected["source"], self._source)))
        all_rejected = concat(rejected, REJECTED)
        reasons = zip(all_rejected["step"].to_pylist(), all_rejected["reason"].to_pylist(), strict=True)
        counts = Counter(f"{step}: {reason}" for step, reason in reasons)
        totals = {"asked": self.requested, "written": len(self._rows), "kept": kept.num_rows, **counts}
        if self.line_replies:
            totals["read as lines"] = self.line_replies
        return SynthesisResult(kept.combine_chunks(), all_rejected, totals, usage)


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _input(record: Mapping[str, Any]) -> str:
    return str(record["prompt"][-1]["content"] if record["prompt"] else record["text"])


def rouge_words(text: str) -> list[str]:
    """Returns the case-folded words to compare."""
    return _WORD.findall(text.casefold())


def longest_common_subsequence(first: Sequence[str], other: Sequence[str]) -> int:
    """Computes the length of the longest common subsequence, bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length")."""
    positions: dict[str, int] = {}
    for index, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for word in other:
        hits = row & positions.get(word, 0)
        # Addition carries through runs of matches: one big-integer step updates a whole row of the dynamic programme.
        row = ((row + hits) | (row - hits)) & full
    return len(first) - row.bit_count()


class RougeIndex:
    """Indexes texts, and finds the text most similar to a new one by ROUGE-L (Lin 2004, W04-1013).

    The similarity is F1, ``2 LCS / (m + n)`` for texts of m and n words.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[list[str]] = []
        self._lengths = array("i")
        self._holders: dict[str, tuple[array[int], array[int]]] = {}
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Adds a text to the index."""
        text_words = rouge_words(text)
        for word, count in Counter(text_words).items():
            rows, counts = self._holders.setdefault(word, (array("i"), array("i")))
            rows.append(len(self._texts))
            counts.append(count)
        self._texts.append(text_words)
        self._lengths.append(len(text_words))

    def of(self, text: str, least: float) -> tuple[float, int] | None:
        """Returns F1 and index of the most similar text, the first of equals; None if none reaches ``least`` > 0."""
        text_words = rouge_words(text)
        if not text_words or not self._texts:
            return None
        shared = np.zeros(len(self._texts), dtype=np.int64)
        for word, count in Counter(text_words).items():
            if word in self._holders:
                rows, counts = (np.array(values, dtype=np.int64) for values in self._holders[word])
                # Words in common, in any order, bound the subsequence from above; most texts are ruled out without
                # computing it.
                shared[rows] += np.minimum(counts, count)
        bounds = 2.0 * shared / (np.array(self._lengths, dtype=np.int64) + len(text_words))
        chances = np.flatnonzero(bounds >= least)
        best: tuple[float, int] | None = None
        for row in chances[np.argsort(-bounds[chances], kind="stable")].tolist():
            # Bounds fall, so no later text can beat the best one.
            if best is not None and bounds[row] < best[0]:
                break
            common = longest_common_subsequence(self._texts[row], text_words)
            score = 2.0 * common / (len(self._texts[row]) + len(text_words))
            if score >= least and (best is None or (score, -row) > (best[0], -best[1])):
                best = score, row
        return best
