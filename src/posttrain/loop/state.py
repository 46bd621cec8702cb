"""The record of one round: a typed, frozen state, written to and read from the database here alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from posttrain.store.rows import Round

# Fields that are no keys of the row's detail: the row has columns for the first three, each output has its own key, and
# a resumed round finds the others anew.
_TRANSIENT = (
    *("champion", "candidate", "decision", "outputs"),
    *("files", "nothing_to_label", "base_evaluation", "latency"),
)


@dataclass(frozen=True)
class RoundState:
    """What the stages of a round have produced so far; None where a stage has not run.

    The names of the fields are the keys of the row's detail, which older workspaces have too.

    Attributes:
        champion: id of the model that the candidate has to beat.
        pool: dataset artifact with the records without a label; ``test`` and ``files`` likewise (labelled files).
        base: the model that training starts from, in Hugging Face layout.
        asked: the pool that the batch is from; with ``scores`` and ``selection`` it is the batch that is out.
        outlook: what the batch is expected to bring, as JSON values.
        nothing_to_label: why no batch was selected.
        labelled: labels artifact of this round's batch.
        dataset: the training set.
        candidate: the model that this round trained.
        evaluation: of the candidate; ``champion_evaluation`` and ``base_evaluation`` likewise.
        latency: timing of candidate and champion, side by side.
        metrics: the candidate's, by bare name.
        decision: what the gate decided: action, rules, intervals, metrics.
        labels: records of the training set; ``labels_new`` are those labelled in this round.
        set_aside: whether later training sets leave this round's labels out.
        carry: the dataset that the next round builds on.
        final: the champion on all test records, after the last round.
        waits: what the loop waits for.
        outputs: artifacts of stages that were added to the round, by the stage's name.
    """

    champion: str | None = None
    pool: str | None = None
    test: str | None = None
    files: str | None = None
    base: str | None = None
    asked: str | None = None
    scores: str | None = None
    selection: str | None = None
    outlook: Mapping[str, Any] | None = None
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
    set_aside: bool | None = None
    carry: str | None = None
    final: Mapping[str, Any] | None = None
    waits: str | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Round) -> Self:
        """The state that a round's row holds."""
        known = {entry.name for entry in fields(cls)} - set(_TRANSIENT)
        detail = {key: value for key, value in row.detail.items() if key in known}
        outputs = {key.removeprefix("output "): id for key, id in row.detail.items() if key.startswith("output ")}
        return cls(
            **detail, champion=row.champion_before, candidate=row.candidate, decision=row.decision, outputs=outputs
        )

    def detail(self) -> dict[str, Any]:
        """The JSON values that the row keeps, without what is not known yet."""
        names = [entry.name for entry in fields(self) if entry.name not in _TRANSIENT]
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return known | {f"output {name}": id for name, id in self.outputs.items()}

    def id(self, name: str) -> str:
        """The artifact id in a field that an earlier stage has set."""
        value = getattr(self, name)
        assert isinstance(value, str), f"no stage before has set `{name}`"
        return value

    @property
    def action(self) -> str | None:
        """The gate's action: baseline, deploy, refuse or rollback; None while it has not decided."""
        return self.decision["action"] if self.decision else None

    def final_of(self, model: str) -> Mapping[str, Any] | None:
        """The evaluation on all test records, if it is of this model.

        Another model may be in service by now, after a promotion or a rollback by hand.
        """
        # Older workspaces did not store the model.
        return self.final if self.final and self.final.get("model", model) == model else None

    @property
    def batch(self) -> dict[str, str] | None:
        """The ids of the batch's pool, scores and selection; None where there is no batch."""
        ids = {"asked": self.asked, "scores": self.scores, "selection": self.selection}
        known = {role: id for role, id in ids.items() if id is not None}
        return known if len(known) == len(ids) else None

    def with_output(self, stage: str, artifact: str) -> Self:
        """The state with the artifact of a stage that has no field of its own."""
        return replace(self, outputs={**self.outputs, stage: artifact})
