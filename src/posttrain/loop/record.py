"""The recorded rounds of a workspace, and what a stage reports of them, for status, report and pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.loop.state import RoundState
from posttrain.report.section import Block
from posttrain.store.rows import ArtifactRow, Round
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class RoundRecord:
    """A round as its row records it, finished or not."""

    workspace: Workspace
    row: Round
    state: RoundState

    @property
    def number(self) -> int:
        """Number of the round."""
        return self.row.number

    @property
    def is_done(self) -> bool:
        """True once the round is finished."""
        return self.row.status == "done"

    def artifact(self, id: str | None) -> ArtifactRow | None:
        """Returns the row of an artifact; None without an id, and where there is no such artifact."""
        return self.workspace.metadata.artifact(id) if id else None


@dataclass(frozen=True)
class LoopRecord:
    """All rounds of a workspace, in order.

    Attributes:
        workspace: The workspace.
        rounds: Its rounds.
        detail: Share of the points and rows that a page has room for.
    """

    workspace: Workspace
    rounds: Sequence[RoundRecord]
    detail: float = 1.0

    @property
    def done(self) -> list[RoundRecord]:
        """The finished rounds."""
        return [record for record in self.rounds if record.is_done]


def read_rounds(workspace: Workspace, detail: float = 1.0) -> LoopRecord:
    """Reads the rows of all rounds."""
    rows = workspace.metadata.rounds()
    return LoopRecord(workspace, [RoundRecord(workspace, row, RoundState.from_row(row)) for row in rows], detail)


@dataclass(frozen=True)
class StageReport:
    """What a stage reports of one round.

    Attributes:
        values: JSON values that `posttrain status --json` has of the round, by their keys.
        lines: Sentences that `posttrain status` and pages show.
        latest: Sentences that a later round's replace: `posttrain status` shows those of the last round that has any.
        remark: A few words beside the name of the round on pages.
        blocks: What pages show besides.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    latest: Sequence[str] = ()
    remark: str = ""
    blocks: Sequence[Block] = ()
