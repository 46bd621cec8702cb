"""Runs the records through the steps of a recipe, phase by phase."""

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
from posttrain.data.records.record import RECORD, concat
from posttrain.data.steps.step import DataStep, GlobalStep, PreviousState, RowStep, ShardView
from posttrain.data.versions.previous_assignment import ASSIGNMENTS, PreviousAssignment, id_changes
from posttrain.data.versions.recipe import Recipe, global_steps, row_steps
from posttrain.data.versions.shards import PreviousShard, Shard, ShardCorpus, ShardTask, fact_table
from posttrain.jobs.map import Engine
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
"""Rows that global steps took out: the index among all rows of the phase, whose shards hold the content, and why."""

_REASON_COLUMNS = ("reason", "detail", "score", "cluster", "kept")


@dataclass(frozen=True)
class StepState:
    """Keeps what a global step needs to process only new records when the set has grown.

    Attributes:
        name: Name of the step.
        step: Digest of its settings.
        shards: Keys of the shards that it saw.
        alive: Digest of which of their rows were alive then.
        table: One row per row of the shards.
    """

    name: str
    step: str
    shards: list[str]
    alive: str
    table: pa.Table


StepStates = Mapping[int, StepState]
"""States by the step's index in the chain."""


@dataclass
class VersionBuild:
    """Holds the records while a version is built, and runs steps on them.

    Attributes:
        phases: The shards of each phase; a phase ends where content changes.
        alive: bool [N], rows of the last phase that no step took out.
        rejected: DROPPED tables of what global steps took out.
        facts: FACT tables of the global steps.
        funnel: Counts by (step, reason), in the order of the steps.
        states: States of the global steps, by their index in the chain.
        splits: uint8 [N], the split of each row of the last phase; the first one is what models learn from.
        frozen_settings: The split's settings, as the records have decided them.
        contaminated: The number of evaluation records that training records leak, and their total, by source.
        previous_states: States of the global steps of an earlier version, whose shards were the first of today's.
        previous_assignment: The splits that records had in that version; None without one.
    """

    recipe: Recipe
    engine: Engine
    folder: Path
    previous_states: StepStates = field(default_factory=dict)
    previous_assignment: PreviousAssignment | None = None
    phases: list[list[Shard]] = field(default_factory=list)
    alive: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=bool))
    rejected: list[pa.Table] = field(default_factory=list)
    facts: list[pa.Table] = field(default_factory=list)
    funnel: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: dict[int, StepState] = field(default_factory=dict)

    splits: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    frozen_settings: dict[str, Any] | None = None
    contaminated: dict[str, tuple[int, int]] = field(default_factory=dict)
    _unassigned: pa.Table | None = None
    _clusters: dict[float, pa.ChunkedArray] = field(default_factory=dict)

    @cached_property
    def steps(self) -> list[DataStep]:
        """The recipe's steps, including the split."""
        return self.recipe.chain

    @property
    def unassigned(self) -> pa.Table:
        """ASSIGNMENTS table of the records that had a split before and have none now."""
        if self._unassigned is not None:
            return self._unassigned
        return ASSIGNMENTS.empty_table() if self.previous_assignment is None else self.previous_assignment.table()

    @property
    def rejected_by_reason(self) -> Counter[tuple[str, str]]:
        """Number of rejected records by (step, reason)."""
        return Counter({key: count for key, count in self.funnel.items() if key[1] != "in" and count > 0})

    @property
    def num_rejected(self) -> int:
        """Number of records that the steps rejected."""
        return self.rejected_by_reason.total()

    @property
    def shards(self) -> list[Shard]:
        """Shards of the last phase."""
        return self.phases[-1]

    def read(self, pieces: Iterable[Piece], existing: Mapping[str, Path]) -> None:
        """Reads the pieces of all files, each through the row steps that come first: the first phase.

        Args:
            existing: Folders of an earlier version's shards by their keys.

        Raises:
            UserError: a record is bad, with file and line.
        """

        slots: list[Path | None] = []

        def tasks() -> Iterator[ShardTask]:
            for piece in pieces:
                task = reading_task(self.recipe, piece, self.folder)
                # The engine draws tasks lazily, so `slots` keeps where each new shard belongs among existing ones.
                slots.append(existing.get(task.key) or task.finished)
                if slots[-1] is None:
                    yield task

        # The list exhausts the engine before `slots` is read; a lazy iterator would leave it incomplete.
        folders = iter(list(self.engine.map(run_task, tasks())))
        self._begin([Shard.open(slot or next(folders)) for slot in slots])

    def run_steps(self, start: int, stop: int, evaluation: pa.Table) -> None:
        """Runs the steps of the chain from ``start`` to before ``stop``.

        Args:
            evaluation: RECORD table of what models are measured on.
        """
        steps = self.steps[:stop]
        index = start
        while index < stop:
            step = steps[index]
            if isinstance(step, GlobalStep):
                self._decide(index, step, evaluation)
                index += 1
            following = row_steps(steps, index)
            # Without row steps no shard is written: rejected rows are only masked out.
            if following:
                self._next_phase(following, index + len(following))
                index += len(following)

    def corpus(
        self, index: int, evaluation: pa.Table | None = None, previous_state: PreviousState | None = None
    ) -> ShardCorpus:
        """Gives the records that the step at ``index`` processes: after the split only the training records."""
        previous = self.previous_assignment
        return ShardCorpus(
            self.shards,
            index,
            self.alive & (self.splits == 0),
            self.engine,
            RECORD.empty_table() if evaluation is None else evaluation,
            previous_state,
            self._clusters,
            None if previous is None else partial(previous.splits_of, self.phases, self.alive),
            partial(id_changes, self.phases),
        )

    def held_out_records(self) -> pa.Table:
        """Reads the RECORD table of the records that the split holds out."""
        held_out, starts = self.alive & (self.splits != 0), self.corpus(0).starts
        views = zip(self.corpus(0).shard_views(), np.split(held_out, starts[1:-1]), strict=True)
        return concat(
            list(self.engine.map(_take_rows, [(view, np.flatnonzero(rows)) for view, rows in views if rows.any()]))
        )

    def reject(self, step: str, rejections: Mapping[int, Rejection]) -> None:
        """Takes rows of the last phase out."""
        rows = np.array(sorted(rejections), dtype=np.int64)
        if not len(rows):
            return
        # Only the id is stored here: the shards of the phase hold the rest.
        ids = ShardCorpus(self.shards, 0, self.alive, self.engine).columns(["id"])["id"].take(pa.array(rows))
        reasons = [rejections[row] for row in rows.tolist()]
        columns = {
            "phase": [len(self.phases) - 1] * len(rows),
            "row": rows,
            "id": ids.combine_chunks(),
            "step": [step] * len(rows),
            **{name: [getattr(rejection, name) for rejection in reasons] for name in _REASON_COLUMNS},
        }
        self.rejected.append(
            pa.table({name: pa.array(columns[name], DROPPED.field(name).type) for name in DROPPED.names})
        )
        for rejection in reasons:
            self.funnel[step, rejection.reason] += 1
        # Shards are never rewritten for a rejection.
        self.alive[rows] = False

    def _decide(self, index: int, step: GlobalStep, evaluation: pa.Table) -> None:
        """Runs a global step, and applies its rejections and split."""
        keys = [shard.key for shard in self.shards]
        corpus = self.corpus(index, evaluation, self._previous_state(index, step, keys))
        result = step.decide(corpus)
        if result.state is not None:
            self.states[index] = StepState(
                step.name, digest(step.key()), keys, _mask_digest(corpus.alive), result.state
            )
            # Later steps with the same settings, such as the split, reuse these clusters instead of searching again.
            if result.similarity is not None:
                self._clusters[result.similarity] = result.state["cluster"]
        self.contaminated.update(result.contaminated)
        self._add_facts(step.name, result.facts)
        self.reject(step.name, result.rejections)
        if result.splits is not None:
            self.splits = result.splits
            self.frozen_settings = dict(result.frozen_settings or {})
            if self.previous_assignment is not None:
                splits = np.where(self.alive, self.splits, -1).astype(np.int8)
                self._unassigned = self.previous_assignment.unassigned_now(self.phases, splits)

    def _previous_state(self, index: int, step: GlobalStep, keys: Sequence[str]) -> PreviousState | None:
        """Returns the state that the step left when the first of today's shards were all there was."""
        state = self.previous_states.get(index)
        if state is None or state.step != digest(step.key()) or list(keys[: len(state.shards)]) != state.shards:
            return None
        # Only the first split counts: records that were held out since then must be processed as new.
        now = (self.alive & (self.splits == 0))[: state.table.num_rows]
        return PreviousState(state.table, _mask_digest(now) == state.alive)

    def _add_facts(self, step: str, facts: Mapping[str, pa.Array]) -> None:
        """Adds FACT tables of what a global step measured."""
        if facts:
            ids = self.corpus(0).columns(["id"])
            self.facts += [fact_table(ids, step, name, values) for name, values in facts.items()]

    def _next_phase(self, steps: tuple[RowStep, ...], after: int) -> None:
        """Makes new shards of the rows left: through row steps, and sketched for the global steps after them."""
        starts = self.corpus(0).starts
        sketchers = global_steps(self.steps, after)
        held_out = self.alive & (self.splits != 0)
        tasks, untouched = [], []
        for index, shard in enumerate(self.shards):
            rows = slice(int(starts[index]), int(starts[index + 1]))
            # Held-out rows skip the row steps and come last in their shard: their splits are restored by position.
            skipped = np.flatnonzero(held_out[rows])
            untouched.append(self.splits[rows][skipped])
            dropped = np.flatnonzero(~self.alive[rows])
            source = PreviousShard(shard, dropped, skipped)
            tasks.append(ShardTask(source, None, (), steps, sketchers, self.folder))
        shards = [Shard.open(folder) for folder in self.engine.map(run_task, tasks)]
        self._begin(shards)
        ends = np.cumsum([shard.rows for shard in shards])
        for end, splits in zip(ends.tolist(), untouched, strict=True):
            self.splits[end - len(splits) : end] = splits

    def _begin(self, shards: list[Shard]) -> None:
        """Starts a phase with these shards, of which every row is alive and in the first split."""
        self.phases.append(shards)
        # Clusters name rows of the phase before, which no longer exist.
        self._clusters = {}
        self.alive = np.ones(sum(shard.rows for shard in shards), dtype=bool)
        self.splits = np.zeros(len(self.alive), dtype=np.uint8)
        for shard in shards:
            for step, reason, count in shard.funnel:
                self.funnel[step, reason] += count


def reading_task(recipe: Recipe, piece: Piece, folder: Path) -> ShardTask:
    """Builds the task that reads a piece, runs the first row steps and sketches for the global steps after them."""
    first = row_steps(recipe.chain[: recipe.boundary], 0)
    sketchers = global_steps(recipe.chain, len(first))
    skip = recipe.on_error == "skip"
    return ShardTask(piece, recipe.columns, tuple(recipe.labels), first, sketchers, folder, skip)


def _take_rows(view_and_rows: tuple[ShardView, npt.NDArray[np.int64]]) -> pa.Table:
    """Takes rows of one view; a function, so that it can be pickled."""
    view, rows = view_and_rows
    return view.take(rows)


def run_task(task: ShardTask) -> Path:
    """Runs a task; a function, so that it can be pickled."""
    return task()


def _mask_digest(rows: npt.NDArray[np.bool_]) -> str:
    """Hashes a bool mask."""
    return hashlib.sha256(np.packbits(rows).tobytes()).hexdigest()
