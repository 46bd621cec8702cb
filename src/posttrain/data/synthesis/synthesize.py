"""New records from seed records, in the manner of Self-Instruct (Wang et al. 2023, arXiv:2212.10560).

A model is shown seeds and asked for more; what it writes is read strictly, held against all seeds and all that was
taken before (ROUGE-L below 0.7), answered where it is an instruction, and sent through steps of the pipeline: those of
quality by itself, those that compare beside the seeds.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from posttrain.data.generation.endpoint import Endpoint, Usage
from posttrain.data.generation.prompts import parse_json, parse_list
from posttrain.data.generation.reply_cache import CachedGenerate, Generate, ReplyCache
from posttrain.data.records.identity import assign_ids
from posttrain.data.records.outcome import Rejection, reject_rows
from posttrain.data.records.schema import RECORD, REJECTED, concat, records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.registry import STEPS
from posttrain.data.steps.step import GlobalStep, Step
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.requests import Request, RequestSchedule, Seed, select_seeds
from posttrain.data.synthesis.rouge import RougeIndex
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, remove_tree
from posttrain.store.lock import hold_lock
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

STEP = "synthesize"
_REQUESTS_PER_WAVE = 32  # requests between two looks at what has come; fixed, as it decides which examples are shown
DEFAULT_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("length", {"input": {"min_characters": 2, "max_characters": 8000}, "answer": {"max_characters": 20_000}}),
    ("gopher_repetition", {"field": "input"}),
    ("gopher_repetition", {"field": "answer"}),
    ("exact", {}),
    ("minhash", {}),
)
"""What new records go through by default, by name and settings: cheap steps against what models do wrong, which is to
say nothing, to go on without end and to go round in circles; then duplicates."""


@dataclass(frozen=True)
class SynthesisResult:
    """What came of a synthesis.

    Attributes:
        records: RECORD table of the new ones, each marked in ``meta``: ``synthetic`` with method, seeds' ids, model.
        rejected: REJECTED table of all else that the model wrote; a reply that could not be read is a ``text``.
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
    steps: Sequence[Step] | None = None,
) -> SynthesisResult:
    """Have new records written; the same call after a kill asks only for what has not been answered.

    Args:
        seeds: RECORD table.
        generate: the model that is asked; None for ``config.endpoint``.
        work_folder: keeps every raw reply. Another model's replies do not get in the way.
        model: what records and replies call the model that is given.
        settings: what else the given model's replies depend on, as JSON values; with others it is asked anew.
        steps: what new records go through; `DEFAULT_STEPS` by default. Steps that compare see the seeds, too.

    Raises:
        UserError: no seed fits, neither endpoint nor model is given, the endpoint refuses, or another process works
            in the folder.
        WorkError: the endpoint keeps failing.
    """
    chosen = select_seeds(seeds.to_pylist(), config)
    requests = RequestSchedule(chosen, config)
    with _open_cache(work_folder) as replies:
        usage = Usage()
        if generate is not None:
            name = model or "local"
            ask: Generate = CachedGenerate(generate, name, replies, settings)
        elif config.endpoint is not None:
            endpoint = Endpoint(config.endpoint, replies)
            ask, usage, name = endpoint, endpoint.usage, config.endpoint.model
        else:
            raise UserError("no model is named", where="endpoint", fix="set endpoint.base_url and endpoint.model")
        writing = _Synthesis(config, requests, [seed.text for seed in chosen], name, _source(seeds))
        kinds = _default_steps() if steps is None else steps
        target = config.records
        with progress_bar("synthesising", config.records, "records") as advance:
            while True:
                while (before := len(writing.made)) < target and writing.asked < config.most_requests:
                    writing.go_on(ask, target)
                    advance(len(writing.made) - before)
                outcome = writing.outcome(seeds, kinds, usage)
                if (kept := outcome.records.num_rows) >= config.records or writing.asked >= config.most_requests:
                    break
                target = len(writing.made) + config.records - kept  # the steps took some
    if kept < config.records:
        log.warning("%d of %d records wanted came of %d requests", kept, config.records, writing.asked)
    return outcome


@contextmanager
def _open_cache(folder: Path) -> Iterator[ReplyCache]:
    """The replies in a folder, for one process at a time; a new folder goes again where there was none."""
    new = not folder.exists()
    make_folder(folder)
    with hold_lock(folder / "lock", taken="another posttrain synthesises in this folder"):
        replies = ReplyCache(folder / "replies")
        try:
            yield replies
        finally:
            if new and not any((folder / "replies").iterdir()):
                remove_tree(folder)


def _default_steps() -> list[Step]:
    return [STEPS[name](**settings) for name, settings in DEFAULT_STEPS]


def _source(seeds: pa.Table) -> str:
    """A name for what is new that no seed has."""
    taken, number = set(seeds["source"].to_pylist()), 1
    while (name := "synthetic" if number == 1 else f"synthetic {number}") in taken:
        number += 1
    return name


class _Synthesis:
    """What the model has written so far, and what was made of it."""

    def __init__(
        self, config: SynthesisConfig, requests: RequestSchedule, texts: Sequence[str], model: str, source: str
    ) -> None:
        self._config, self._requests, self._model, self._source = config, requests, model, source
        self._nearest, self._seed_count = RougeIndex(texts), len(texts)
        self._unwanted = {word.casefold() for word in config.unwanted_words}
        self._rows: list[dict[str, Any]] = []
        self._rejections: dict[int, Rejection] = {}
        self.asked = self.as_lines = 0
        self.made: list[Seed] = []

    def go_on(self, ask: Generate, target: int) -> None:
        """Some more requests on the way to ``target`` items, and what their replies make."""
        config = self._config
        # At first as if every item were kept, then by what has come of a request so far.
        asked, made = (self.asked, max(1, len(self.made))) if self.asked else (1, config.per_request)
        needed = -(-(target - len(self.made)) * asked // made)
        count = min(needed, _REQUESTS_PER_WAVE, config.most_requests - self.asked)
        wave = [self._requests.at(number, self.made) for number in range(self.asked, self.asked + count)]
        self.asked += count
        new: list[int] = []
        for request, reply in zip(wave, ask([request.prompt for request in wave]), strict=True):
            new += self._read(request, reply)
        if config.method == "instructions":
            self._answer(new, ask)
        for row in new:
            if row not in self._rejections:
                record = self._rows[row]
                self.made.append(Seed(f"{self._source}:{row + 1}", _input(record), record))

    def _read(self, request: Request, reply: str | None) -> list[int]:
        """The rows of what the reply adds."""
        if reply is None:
            self._add(request, {"text": ""}, Rejection("no reply", "the model gave none, or was cut off"))
            return []
        texts = parse_json(reply)
        if texts is None and (texts := parse_list(reply)) is not None:
            self.as_lines += 1
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
                self._nearest.add(text)
                rows.append(row)
        return rows

    def _problem(self, text: str) -> Rejection | None:
        """What speaks against an item, if anything does."""
        config = self._config
        if config.method == "instructions":
            found = text.split()
            if not config.min_words <= len(found) <= config.max_words:
                return Rejection("length", f"{len(found)} words", float(len(found)))
            if unwanted := self._unwanted.intersection(re.findall(r"\w+", text.casefold())):
                return Rejection("unwanted word", ", ".join(sorted(unwanted)))
        if near := self._nearest.of(text, config.similarity):
            score, at = near
            what = "a seed" if at < self._seed_count else "an earlier item"
            return Rejection("too similar", f"ROUGE-L {score:.3f} to {what}", score)
        return None

    def _answer(self, rows: Sequence[int], ask: Generate) -> None:
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        prompts = [[*system, *self._rows[row]["prompt"]] for row in rows]
        for row, reply in zip(rows, ask(prompts) if prompts else [], strict=True):
            if reply is None or not reply.strip():
                self._rejections[row] = Rejection("no answer", "the model gave none, or was cut off")
            else:
                self._rows[row]["completion"] = reply.strip()

    def _add(self, request: Request, columns: Mapping[str, Any], problem: Rejection | None) -> int:
        row = len(self._rows)
        marks = {"method": self._config.method, "model": self._model, "seeds": list(request.shown)}
        meta = json.dumps({"synthetic": marks}, ensure_ascii=False, sort_keys=True)
        made = {**dict.fromkeys(RECORD.names), "source": self._source, "line": row + 1, "meta": meta, **columns}
        self._rows.append(made)
        if problem is not None:
            self._rejections[row] = problem
        return row

    def outcome(self, seeds: pa.Table, steps: Sequence[Step], usage: Usage) -> SynthesisResult:
        """The new records after the steps, and all that went."""
        kept, gone, *_ = reject_rows(assign_ids(records(self._rows)), STEP, self._rejections)
        rejected = [gone]
        for step in steps:
            # Seeds come first, so that of two alike the seed is the one that stays.
            together = concat([seeds, kept]) if isinstance(step, GlobalStep) else kept
            outcome = apply_step(step, together)
            kept = outcome.kept.filter(pa.compute.equal(outcome.kept["source"], self._source))
            rejected.append(outcome.rejected.filter(pa.compute.equal(outcome.rejected["source"], self._source)))
        all_gone = concat(rejected, REJECTED)
        reasons = zip(all_gone["step"].to_pylist(), all_gone["reason"].to_pylist(), strict=True)
        counts = Counter(f"{step}: {reason}" for step, reason in reasons)
        told = {"asked": self.asked, "written": len(self._rows), "kept": kept.num_rows, **counts}
        if self.as_lines:
            told["read as lines"] = self.as_lines
        return SynthesisResult(kept.combine_chunks(), all_gone, told, usage)


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _input(record: Mapping[str, Any]) -> str:
    return str(record["prompt"][-1]["content"] if record["prompt"] else record["text"])
