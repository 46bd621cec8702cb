"""Run the records through the steps of a recipe, phase by phase."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.reading.pieces import Piece
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.schema import RECORD, concat
from posttrain.data.steps.step import GlobalStep, PreviousState, RowStep, ShardView, SimilarityKind, Step
from posttrain.data.versions.previous_assignment import PreviousAssignment, id_changes
from posttrain.data.versions.recipe import Recipe, global_steps, row_steps
from posttrain.data.versions.shards import PreviousShard, Shard, ShardCorpus, ShardTask, fact_table
from posttrain.jobs.base import Engine
from posttrain.store.hashing import digest

DROPPED: pa.Schema = pa.schema(
    [
        ("phase", pa.int32()),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("step", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("score", pa.float64()),
        ("cluster", pa.string()),
        ("kept", pa.string()),
    ]
)
"""What global steps took out: the row among all rows of the phase, whose shards hold the content, and why."""


@dataclass(frozen=True)
class StepState:
    """What a global step left for the time when the set has grown.

    Attributes:
        name: of the step.
        step: digest of its settings.
        shards: keys of the shards that it saw.
        alive: digest of which of their rows were alive then.
        table: one row a row of the shards.
    """

    name: str
    step: str
    shards: list[str]
    alive: str
    table: pa.Table


StepStates = Mapping[int, StepState]
"""By the step's place in the recipe."""


@dataclass
class VersionBuild:
    """What is left of the records, and what became of the others.

    Attributes:
        phases: the shards of each phase; a phase ends where content changes.
        alive: bool [N], rows of the last phase that no step took out.
        gone: GONE tables.
        facts: FACT tables of the global steps.
        funnel: counts by (step, reason), in the order of the steps.
        states: of the global steps.
        sides: uint8 [N], the split of each row of the last phase; the first one is what models learn from.
        settled: what the split has settled.
        given_away: by source of evaluation records how many of them training records gave away, and how many there are.
        known: states of an earlier version, whose shards were the first of today's.
        past: what that version knows of sides.
    """

    recipe: Recipe
    engine: Engine
    folder: Path
    known: StepStates = field(default_factory=dict)
    past: PreviousAssignment = field(default_factory=PreviousAssignment)
    phases: list[list[Shard]] = field(default_factory=list)
    alive: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=bool))
    gone: list[pa.Table] = field(default_factory=list)
    facts: list[pa.Table] = field(default_factory=list)
    funnel: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: dict[int, StepState] = field(default_factory=dict)

    sides: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    settled: dict[str, Any] | None = None
    contaminated: dict[str, tuple[int, int]] = field(default_factory=dict)
    _left: pa.Table | None = None
    _clusters: dict[SimilarityKind, pa.ChunkedArray] = field(default_factory=dict)

    @cached_property
    def steps(self) -> list[Step]:
        """The recipe's, with the split in its place."""
        return self.recipe.chain

    @property
    def left(self) -> pa.Table:
        """SIDES table of the records that had a side before and have none now."""
        return self.past.table() if self._left is None else self._left

    @property
    def gone_by_reason(self) -> Counter[tuple[str, str]]:
        """How many records the steps took out, by (step, reason)."""
        return Counter({why: count for why, count in self.funnel.items() if why[1] != "in" and count > 0})

    @property
    def rejected(self) -> int:
        """How many records the steps took out."""
        return self.gone_by_reason.total()

    @property
    def shards(self) -> list[Shard]:
        """Those of the last phase."""
        return self.phases[-1]

    def read(self, pieces: Iterable[Piece], shards_made: Mapping[str, Path]) -> None:
        """The first phase: pieces of files, each through the row steps that come first.

        Args:
            shards_made: folders of shards that an earlier version has, by their keys.

        Raises:
            UserError: a record is bad, with file and line.
        """

        slots: list[Path | None] = []

        def tasks() -> Iterator[ShardTask]:
            for piece in pieces:
                task = reading_task(self.recipe, piece, self.folder)
                slots.append(shards_made.get(task.key) or task.finished)
                if slots[-1] is None:
                    yield task

        made = iter(list(self.engine.map(run_task, tasks())))
        self._begin([Shard.open(slot or next(made)) for slot in slots])

    def through(self, start: int, stop: int, evaluation: pa.Table) -> None:
        """Put the records through the steps of the chain from ``start`` to before ``stop``.

        Args:
            evaluation: RECORD table of what models are measured on.
        """
        steps = self.steps[:stop]
        place = start
        while place < stop:
            step = steps[place]
            rewritten: Mapping[int, Mapping[str, Any]] = {}
            if isinstance(step, GlobalStep):
                rewritten = self._decide(place, step, evaluation)
                place += 1
            following = row_steps(steps, place)
            if following or rewritten:
                self._next_phase(following, place + len(following), rewritten, step.name)
                place += len(following)

    def corpus(
        self, place: int, evaluation: pa.Table | None = None, before: PreviousState | None = None
    ) -> ShardCorpus:
        """The records that a step at that place of the recipe meets; once there are sides, the first alone."""
        alive = self.alive & (self.sides == 0)
        measured = RECORD.empty_table() if evaluation is None else evaluation
        past = partial(self.past.of, self.phases, self.alive)
        changed = partial(id_changes, self.phases)
        return ShardCorpus(self.shards, place, alive, self.engine, measured, before, self._clusters, past, changed)

    def measured(self) -> pa.Table:
        """RECORD table of what the split holds out."""
        wanted, starts = self.alive & (self.sides != 0), self.corpus(0).starts
        parts = zip(self.corpus(0).parts(), np.split(wanted, starts[1:-1]), strict=True)
        return concat(
            list(self.engine.map(_take_rows, [(part, np.flatnonzero(rows)) for part, rows in parts if rows.any()]))
        )

    def reject(self, step: str, rejections: Mapping[int, Rejection]) -> None:
        """Take rows of the last phase out."""
        rows = np.array(sorted(rejections), dtype=np.int64)
        if not len(rows):
            return
        ids = ShardCorpus(self.shards, 0, self.alive, self.engine).columns(["id"])["id"].take(pa.array(rows))
        why = [rejections[row] for row in rows.tolist()]
        columns = {
            "phase": [len(self.phases) - 1] * len(rows),
            "row": rows,
            "id": ids.combine_chunks(),
            "step": [step] * len(rows),
            **{name: [getattr(one, name) for one in why] for name in ("reason", "detail", "score", "cluster", "kept")},
        }
        self.gone.append(pa.table({name: pa.array(columns[name], DROPPED.field(name).type) for name in DROPPED.names}))
        for one in why:
            self.funnel[step, one.reason] += 1
        self.alive[rows] = False

    def _decide(self, place: int, step: GlobalStep, evaluation: pa.Table) -> Mapping[int, Mapping[str, Any]]:
        keys = [shard.key for shard in self.shards]
        corpus = self.corpus(place, evaluation, self._known(place, step, keys))
        decision = step.decide(corpus)
        if decision.state is not None:
            self.states[place] = StepState(
                step.name, digest(step.key()), keys, _mask_digest(corpus.alive), decision.state
            )
            if decision.clustered is not None:
                self._clusters[decision.clustered] = decision.state["cluster"]
        self.contaminated.update(decision.contaminated)
        self._note_facts(step.name, decision.facts)
        self.reject(step.name, decision.rejections)
        if decision.sides is not None:
            self.sides = decision.sides
            self.settled = dict(decision.settled or {})
            now = np.where(self.alive, self.sides, -1).astype(np.int8)
            self._left = self.past.left(self.phases, now)
        return decision.rewritten

    def _known(self, place: int, step: GlobalStep, keys: Sequence[str]) -> PreviousState | None:
        """What the step left when the first of today's shards were all."""
        state = self.known.get(place)
        if state is None or state.step != digest(step.key()) or list(keys[: len(state.shards)]) != state.shards:
            return None
        now = (self.alive & (self.sides == 0))[: state.table.num_rows]
        return PreviousState(state.table, _mask_digest(now) == state.alive)

    def _note_facts(self, step: str, facts: Mapping[str, pa.Array]) -> None:
        if facts:
            ids = self.corpus(0).columns(["id"])
            self.facts += [fact_table(ids, step, name, values) for name, values in facts.items()]

    def _next_phase(
        self, steps: tuple[RowStep, ...], after: int, rewritten: Mapping[int, Mapping[str, Any]], rewriter: str
    ) -> None:
        """Make new shards of what is left: rewritten, through row steps, sketched for the global ones after them."""
        starts = self.corpus(0).starts
        sketchers = global_steps(self.steps, after)
        measured = self.alive & (self.sides != 0)
        by_shard: dict[int, dict[int, Mapping[str, Any]]] = {}
        for row, values in rewritten.items():
            index = int(np.searchsorted(starts, row, side="right")) - 1
            by_shard.setdefault(index, {})[row - int(starts[index])] = values
        tasks, untouched = [], []
        for index, shard in enumerate(self.shards):
            rows = slice(int(starts[index]), int(starts[index + 1]))
            apart = np.flatnonzero(measured[rows])
            untouched.append(self.sides[rows][apart])
            dropped = np.flatnonzero(~self.alive[rows])
            source = PreviousShard(shard, dropped, by_shard.get(index, {}), rewriter, apart)
            tasks.append(ShardTask(source, None, (), steps, sketchers, self.folder))
        shards = [Shard.open(folder) for folder in self.engine.map(run_task, tasks)]
        self._begin(shards)
        ends = np.cumsum([shard.rows for shard in shards])
        for end, sides in zip(ends.tolist(), untouched, strict=True):
            self.sides[end - len(sides) : end] = sides

    def _begin(self, shards: list[Shard]) -> None:
        self.phases.append(shards)
        self._clusters = {}
        self.alive = np.ones(sum(shard.rows for shard in shards), dtype=bool)
        self.sides = np.zeros(len(self.alive), dtype=np.uint8)
        for shard in shards:
            for step, reason, count in shard.funnel:
                self.funnel[step, reason] += count


def reading_task(recipe: Recipe, piece: Piece, folder: Path) -> ShardTask:
    """The task that reads a piece, with the row steps that come first and sketches for the global ones after them."""
    first = row_steps(recipe.chain[: recipe.boundary], 0)
    sketchers = global_steps(recipe.chain, len(first))
    return ShardTask(piece, recipe.columns, tuple(recipe.labels), first, sketchers, folder)


def _take_rows(rows: tuple[ShardView, npt.NDArray[np.int64]]) -> pa.Table:
    part, places = rows
    return part.take(places)


def run_task(task: ShardTask) -> Path:
    """Run a task; a function, so that it can be pickled."""
    return task()


def _mask_digest(rows: npt.NDArray[np.bool_]) -> str:
    return hashlib.sha256(np.packbits(rows).tobytes()).hexdigest()
