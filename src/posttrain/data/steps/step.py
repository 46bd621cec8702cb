"""What a step of the data pipeline is: its settings, and the work that they describe."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.records.outcome import Outcome, Rejection
from posttrain.store.section import Section

Item = TypeVar("Item")

Result = TypeVar("Result")


class Step(Section):
    """A step with its settings. It is a section of the config, is pickled to workers, and loads what it needs there.

    Attributes:
        name: what the config calls it.
        version: raised by hand when the same settings come to mean something else.
        evaluation: whether records that a model is measured on go through it too.
        training_only: whether it follows the split, and meets only what a model learns from.
        needs_answers: whether it has nothing to say about a pool, whose answers are hidden.
        needs_labels: whether it has nothing to say about open-ended answers.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    evaluation: ClassVar[bool] = False
    training_only: ClassVar[bool] = False
    needs_answers: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False

    def located(self, root: Path) -> Self:
        """The step with its files named from ``root``, the workspace's folder."""
        return self

    def check(self) -> None:
        """Before any work: raise a UserError if a package, a file or a model that the step needs is missing."""

    def key(self) -> dict[str, Any]:
        """What the outcome depends on besides the records, as JSON values: of a file the digest, not the place."""
        return {"step": self.name, "version": self.version, **self.model_dump(mode="json")}


class RowStep(Step, ABC):
    """Decides about each record by itself, so that tables can be cut anywhere."""

    @abstractmethod
    def apply(self, table: pa.Table) -> Outcome:
        """What becomes of the rows of a RECORD table."""


class ShardView(Protocol):
    """Some rows of a corpus, one behind the other; pickled to a worker, which reads them there."""

    @property
    def rows(self) -> int:
        """How many, dead ones too."""

    def sketches(self) -> pa.Table:
        """What `GlobalStep.sketch` made of every row."""

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """RECORD table of the rows, in the order given."""


class PreviousState(NamedTuple):
    """What a step left when the set was smaller.

    Attributes:
        table: the `Decision.state`, one row for each of the first K rows of today.
        unchanged: whether of those rows the same are alive as were then.
    """

    table: pa.Table
    unchanged: bool


class SimilarityKind(NamedTuple):
    """What made inputs alike: the settings of `posttrain.data.duplicates.minhash.minhash_sketch`."""

    threshold: float
    ngram: int
    seed: int
    permutations: int


class Corpus(Protocol):
    """All records that a global step decides about, N rows in reading order, wherever they lie.

    Rows that earlier steps took out are not ``alive``: they say nothing and are not decided about.
    """

    @property
    def rows(self) -> int:
        """N."""

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Bool [N]."""

    def sketches(self) -> pa.Table:
        """What `GlobalStep.sketch` made of every row."""

    def columns(self, names: Iterable[str]) -> pa.Table:
        """Some RECORD columns of every row, read piece by piece: ids, not texts, of large sets."""

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """RECORD table of the rows, in the order given."""

    def known(self) -> PreviousState | None:
        """What the step left with the same settings, if there is something."""

    def sides(self) -> npt.NDArray[np.int8]:
        """Int8 [N], the split that each row had in versions before, by its place among them; -1 for none."""

    def changed(self) -> pa.Table:
        """``id`` and ``before`` of the CHANGED table of what steps have rewritten so far."""

    def clustered(self) -> Mapping[SimilarityKind, pa.ChunkedArray]:
        """Clusters, int64 [N], that earlier steps found among these rows and others that have gone since."""

    def parts(self) -> Sequence[ShardView]:
        """All rows, in order."""

    def evaluation(self) -> pa.Table:
        """RECORD table of what models are measured on: the evaluation sides of the split, and every suite."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``function`` of each item in order, on as many workers as there are; both are pickled."""

    def map_tables(self, function: Callable[[pa.Table], Result]) -> Iterator[tuple[int, Result]]:
        """``function`` of all rows, table by table in order, each with its first row; workers read the tables."""


@dataclass(frozen=True)
class GlobalResult:
    """What a global step decided.

    Attributes:
        rejections: by row.
        rewritten: by row the RECORD columns that are to hold something else, such as ``{"text": ...}``.
        facts: as in `Outcome`, N values each.
        state: N rows of what the step wants to be given when the set has grown.
        settled: settings that were left to the records, for all versions that grow from this one.
        clustered: by which settings the state's column ``cluster`` holds all clusters of like inputs.
        sides: uint8 [N], the split of each row by its place in `posttrain.data.split.SPLITS`; None: as it was.
        given_away: by source of evaluation records how many of them training records give away, and how many there are.
    """

    rejections: Mapping[int, Rejection] = field(default_factory=dict)
    rewritten: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    facts: Mapping[str, pa.Array] = field(default_factory=dict)
    state: pa.Table | None = None
    settled: Mapping[str, Any] | None = None
    clustered: SimilarityKind | None = None
    sides: npt.NDArray[np.uint8] | None = None
    contaminated: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class GlobalStep(Step, ABC):
    """Decides about records in view of all others; the same whatever tables they are cut into."""

    def sketch(self, table: pa.Table) -> pa.Table:
        """What is compared, small and made row by row: one row a row of the RECORD table."""
        return table.select(["id"])

    def sketch_key(self) -> dict[str, Any]:
        """What a sketch depends on besides its row, as JSON values."""
        return self.key()

    @abstractmethod
    def decide(self, corpus: Corpus) -> GlobalResult:
        """What becomes of all rows."""
