"""The record of one round: a typed, frozen state. Only this module reads and writes the round's row."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from posttrain.store.message import pack, unpack
from posttrain.store.metadata import Metadata
from posttrain.store.rows import Round

# Fields that are not keys of the row's detail: the row has columns for the first three, and a resumed round finds the
# others again.
_TRANSIENT = (
    *("champion", "candidate", "decision"),
    *("files", "nothing_to_label", "base_evaluation", "latency"),
)


@dataclass(frozen=True)
class RoundState:
    """The results of a round's stages so far; None where a stage has not run.

    Attributes:
        champion: Id of the model that the candidate has to beat.
        pool: Id of the dataset of records without a label; ``test`` and ``files`` (labelled files) likewise.
        base: Id of the model that training starts from, in Hugging Face layout.
        queried_pool: Id of the batch's pool; with ``scores`` and ``selection`` it is the batch that is out.
        nothing_to_label: Reason why no batch was selected.
        labelled: Id of the labels of this round's batch.
        dataset: Id of the training set.
        candidate: Id of the model that this round trained.
        evaluation: Id of the candidate's evaluation; ``champion_evaluation`` and ``base_evaluation`` likewise.
        latency: Id of the timing of candidate and champion, side by side.
        metrics: The candidate's metrics, by bare name.
        decision: The gate's decision: action, rules, intervals, metrics.
        labels: Number of records of the training set; ``labels_new`` of those labelled in this round.
        discards_labels: True if later training sets leave this round's labels out.
        next_parent: Id of the dataset that the next round builds on.
        final: Evaluation of the champion on all test records, after the last round.
        waits_for: Description of the labels, records or trigger that the loop waits for.
        outputs: Ids of the artifacts of stages without a field of their own, by the stage's name.
        results: What stages record besides an artifact, as JSON values by the stage's name; each stage reads its own.
    """

    champion: str | None = None
    pool: str | None = None
    test: str | None = None
    files: str | None = None
    base: str | None = None
    queried_pool: str | None = None
    scores: str | None = None
    selection: str | None = None
    nothing_to_label: str | None = None
    labelled: str | None = None
    dataset: str | None = None
    candidate: str | None = None
    evaluation: str | None = None
    champion_evaluation: str | None = None
    base_evaluation: str | None = None
    latency: str | None = None
    metrics: Mapping[str, float] | None = None
    decision: Mapping[str, Any] | None = None
    labels: int | None = None
    labels_new: int | None = None
    discards_labels: bool | None = None
    next_parent: str | None = None
    final: Mapping[str, Any] | None = None
    waits_for: str | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: Round) -> Self:
        """Reads the state from a round's row."""
        values = {key: unpack(value) for key, value in row.detail.items() if key in cls._detail_fields()}
        return cls(**values, champion=row.champion_before, candidate=row.candidate, decision=row.decision)

    def detail(self) -> dict[str, Any]:
        """Returns the JSON values that the row stores, without fields that are not set yet."""
        values = {name: getattr(self, name) for name in self._detail_fields()}
        return {name: pack(value) for name, value in values.items() if value not in (None, {})}

    @classmethod
    def _detail_fields(cls) -> list[str]:
        """Returns the names of the fields that the row's detail stores."""
        return [entry.name for entry in fields(cls) if entry.name not in _TRANSIENT]

    def id(self, name: str) -> str:
        """Returns the artifact id in a field that an earlier stage has set."""
        value = getattr(self, name)
        assert isinstance(value, str), f"no stage before has set `{name}`"
        return value

    @property
    def action(self) -> str | None:
        """Returns the gate's action: baseline, deploy, refuse or rollback; None while it has not decided."""
        return self.decision["action"] if self.decision else None

    def final_of(self, model: str) -> Mapping[str, Any] | None:
        """Returns the evaluation on all test records, if it is of this model.

        Another model may be in service by now, after a promotion or a rollback by hand.
        """
        return self.final if self.final and self.final["model"] == model else None

    @property
    def batch(self) -> dict[str, str] | None:
        """Returns the ids of the batch's pool, scores and selection; None where there is no batch."""
        ids = {"pool": self.queried_pool, "scores": self.scores, "selection": self.selection}
        complete = {role: id for role, id in ids.items() if id is not None}
        return complete if len(complete) == len(ids) else None

    def with_output(self, stage: str, artifact: str) -> Self:
        """Returns the state with the artifact of a stage."""
        return replace(self, outputs={**self.outputs, stage: artifact})

    def with_result(self, stage: str, values: Any) -> Self:
        """Returns the state with what a stage records, as JSON values."""
        return replace(self, results={**self.results, stage: values})

    def without(self, *stages: str) -> Self:
        """Returns the state without what stages have left, such as that of an earlier attempt with another config."""
        kept = [
            {name: value for name, value in each.items() if name not in stages} for each in (self.outputs, self.results)
        ]
        return replace(self, outputs=kept[0], results=kept[1])


def save_state(
    metadata: Metadata, number: int, state: RoundState, *, status: str | None = None, seconds: float | None = None
) -> None:
    """Writes the state of a round to its row; nothing else changes a round that has begun.

    Args:
        metadata: Database of the workspace.
        number: Number of the round.
        state: State to write.
        status: New status of the round: ``open``, ``waiting`` or ``done``; None for no change.
        seconds: Duration of the round so far; None for no change.
    """
    row: dict[str, Any] = {"detail": state.detail(), "status": status, "seconds": seconds}
    # One write ends the round: no kill can leave a round that is done without its decision.
    if status == "done":
        row |= {"candidate": state.candidate, "decision": state.decision}
    metadata.update_round(number, **{name: value for name, value in row.items() if value is not None})
