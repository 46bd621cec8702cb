"""The base classes of data steps, and the views of a dataset that steps see.

A step of your own derives from `RowStep` and defines ``apply``, which splits a table into kept and rejected rows::

    class Shout(RowStep):
        name: ClassVar[str] = "shout"

        def apply(self, table: pa.Table) -> Outcome:
            texts = enumerate(joined_texts(table))
            rejections = {row: Rejection("capitals", text[:20]) for row, text in texts if text.isupper()}
            return reject_rows(table, self.name, rejections)

A step that must see all records at once, such as deduplication, derives from `GlobalStep`. The config names steps by
``name``, by an entry point of the group ``posttrain.steps``, or as ``package.module:Shout``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.arrays import Splits
from posttrain.data.records.outcome import Outcome, Rejection
from posttrain.store.section import Section

Item = TypeVar("Item")

Result = TypeVar("Result")


class DataStep(Section):
    """A data step: a section of the config, and the work that it describes.

    A step is pickled to workers, so it loads models and files there, on first use, and not when it is constructed.

    Attributes:
        name: The step's name in the config.
        version: Raised by hand when the same settings give other results, so that finished shards are not reused.
        evaluation: True if evaluation records go through it too.
        training_only: True if it runs after the split, on training records alone.
        removes_leaks: True if it removes what overlaps with evaluation records; the loop's pool goes through it too.
        every_round: True if the loop applies it to the whole training set of every round, not only to new records,
            because the files or evaluation records that it compares with may have changed.
        needs_answers: True if it is skipped for a pool, whose answers are hidden.
        needs_labels: True if it is skipped where answers are open-ended.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    evaluation: ClassVar[bool] = False
    training_only: ClassVar[bool] = False
    removes_leaks: ClassVar[bool] = False
    every_round: ClassVar[bool] = False
    needs_answers: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False

    def located(self, root: Path) -> Self:
        """Returns the step with its paths resolved against ``root``, the workspace's folder."""
        return self

    def check(self) -> None:
        """Raises a UserError if a package, a file or a model that the step needs is missing; runs before any work."""

    def key(self) -> dict[str, Any]:
        """Returns everything that the result depends on besides the records, as JSON; files by digest, not path."""
        return {"step": self.name, "version": self.version, **self.model_dump(mode="json")}


class RowStep(DataStep, ABC):
    """A step that decides about each record by itself, so that tables can be cut anywhere."""

    @abstractmethod
    def apply(self, table: pa.Table) -> Outcome:
        """Splits a RECORD table into kept and rejected rows, changes rows, or measures them."""


class ShardView(Protocol):
    """Consecutive rows of a corpus; pickled to a worker, which reads them there."""

    @property
    def rows(self) -> int:
        """The number of rows, rejected ones too."""

    def sketches(self) -> pa.Table:
        """Returns the result of `GlobalStep.sketch` for every row."""

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Returns the RECORD table of some rows, in the order given."""


class PreviousState(NamedTuple):
    """The state that a step saved when the dataset was smaller.

    Attributes:
        table: The `GlobalResult.state`, one row for each of the first K rows of today.
        unchanged: True if the same of these rows are alive as were then.
    """

    table: pa.Table
    unchanged: bool


class Corpus(Protocol):
    """All records that a global step decides about, N rows in reading order, in memory or on disk.

    Rows that earlier steps rejected are not ``alive``: a step ignores them and does not decide about them.
    """

    @property
    def rows(self) -> int:
        """N, the number of rows."""

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """The rows that no earlier step rejected, bool [N]."""

    @property
    def evaluation(self) -> pa.Table:
        """RECORD table of all evaluation records: the held-out splits, and every suite."""

    @property
    def previous_state(self) -> PreviousState | None:
        """The state that the step saved with the same settings, if any."""

    @property
    def clusters(self) -> Mapping[float, pa.ChunkedArray]:
        """The clusters, int64 [N], of earlier steps over these rows and ones rejected since; by threshold."""

    def sketches(self) -> pa.Table:
        """Returns the result of `GlobalStep.sketch` for every row."""

    def columns(self, names: Iterable[str]) -> pa.Table:
        """Returns some RECORD columns of every row: ids, but not texts, as those of a large dataset exceed memory."""

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Returns the RECORD table of some rows, in the order given."""

    def previous_splits(self) -> Splits:
        """Returns the split that each row had in earlier versions, int8 [N], by its index; -1 for none."""

    def id_changes(self) -> pa.Table:
        """Returns ``id`` and ``before`` of the CHANGED table of all steps so far."""

    def shard_views(self) -> Sequence[ShardView]:
        """Returns views of all rows, in order."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Applies a function to each item on all workers, and yields the results in order; both are pickled."""

    def map_tables(self, function: Callable[[pa.Table], Result]) -> Iterator[tuple[int, Result]]:
        """Applies a function to all rows, table by table, and yields each table's first row and result, on workers."""


@dataclass(frozen=True)
class GlobalResult:
    """The result of a global step.

    Attributes:
        rejections: The rejections by row.
        facts: As in `Outcome`, N values each.
        state: N rows that the step wants back as `PreviousState` when the dataset has grown.
        frozen_settings: Settings that the records decided, the same for all versions that grow from this one.
        similarity: The threshold from which inputs are similar, if the state's column ``cluster`` holds their clusters.
        splits: uint8 [N], the split of each row by its index in `posttrain.data.split.SPLITS`; None: unchanged.
        contaminated: The number of evaluation records that training records leak, and their total, by source.
    """

    rejections: Mapping[int, Rejection] = field(default_factory=dict)
    facts: Mapping[str, pa.Array] = field(default_factory=dict)
    state: pa.Table | None = None
    frozen_settings: Mapping[str, Any] | None = None
    similarity: float | None = None
    splits: npt.NDArray[np.uint8] | None = None
    contaminated: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class GlobalStep(DataStep, ABC):
    """A step that decides about each record in view of all others, whatever tables they are cut into."""

    def sketch(self, table: pa.Table) -> pa.Table:
        """Reduces each row of a RECORD table to what `decide` compares, so that all rows fit into memory."""
        return table.select(["id"])

    def sketch_key(self) -> dict[str, Any]:
        """Returns everything that a sketch depends on besides its row, as JSON."""
        # Every setting by default, which is always right; a step whose sketch ignores costly settings leaves them out.
        return self.key()

    @abstractmethod
    def decide(self, corpus: Corpus) -> GlobalResult:
        """Decides about all rows at once, in one process."""
