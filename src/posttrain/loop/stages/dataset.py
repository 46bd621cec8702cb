"""Dataset: builds the training set of a round from its parent, the labelled files and the new labels."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.records.record import concat
from posttrain.data.sets.training_set import next_training_set
from posttrain.data.versions.version import Dataset, write_dataset
from posttrain.loop.batch_counts import batch_counts, count_batch
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states, parent_dataset
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.score_files import LABELS
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState, save_state
from posttrain.loop.suites import measured_on, suite_inputs, suite_settings
from posttrain.report.section import Text
from posttrain.store.errors import DamagedArtifactError, Waiting
from posttrain.store.hashing import canonical_json
from posttrain.store.message import Message

log = logging.getLogger("posttrain")


class NothingToLabel(Waiting):
    """Raised if there is nothing to label and nothing new to train on."""


@dataclass(frozen=True)
class BuildDataset(Stage):
    """Adds the records of the labelled files, as they are now, and this round's labels to the parent.

    Removes records that repeat present evaluation records, the parent's records too.

    Args:
        parent: Id of the dataset to build on; None for the first.
        labelled: Id of the labelled files' records.
        test: Id of the test set.
        labels: Id of this round's labels; None where there was no batch.
    """

    parent: str | None
    labelled: str
    test: str
    labels: str | None
    name = "dataset"
    title = Message("dataset")
    kind = "dataset"
    seeded = False

    @classmethod
    def can_stop(cls, round: int) -> bool:
        """Returns False for round 0, whose dataset is only the start of round 1."""
        return round > 0

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Builds the training set.

        Raises:
            NothingToLabel: there are no new labels, and an earlier round trained on the same records.
        """
        state, workspace = context.state, context.workspace
        parent = parent_dataset(workspace) if context.number else None
        artifact = context.run(cls(parent, state.id("files"), state.id("test"), state.labelled))
        records = artifact.meta["counts"]["records"]
        if context.number == 0:
            # The labelled files' records, which round 1 builds on; the base model was not trained on them.
            return context.update(labels=records, next_parent=artifact.id)
        # The loop with random records shares the names of the workspace, which are the main loop's.
        if not workspace.metadata.arm:
            workspace.metadata.name_artifact("train", artifact.id, parent)
        new = context.artifact(state.labelled).meta["labels"] if state.labelled else 0
        if not new:
            # Without labels a round is worth its training only if files were added to the labelled records.
            if _was_trained_on(context, artifact.id):
                again = Message("another run, which selects other records: every record of the batch was skipped")
                raise NothingToLabel(state.nothing_to_label or again)
            save_state(workspace.metadata, context.number, state, status="open")
        log.info("  training set: %d records", records)
        counts = count_batch(workspace, state.labelled, artifact.id) if state.labelled else None
        if counts is not None and counts.used < counts.asked:
            log.info("  %s", counts.sentence)
        state = context.update(dataset=artifact.id, labels=records, labels_new=new)
        return state.with_result(cls.name, counts and counts.to_json())

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports what became of the batch; the usual case, that all was used, is not a line of the status."""
        counts = batch_counts(record.state)
        if counts is None:
            return StageReport({"batch": None})
        values = {"batch": {**counts.to_json(), "sentence": counts.sentence}}
        if counts.used < counts.asked:
            return StageReport(values, [counts.sentence])
        return StageReport(values, blocks=[Text(counts.sentence, "sentence")])

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the labelled files, the test set, the other suites' content, the labels and the parent."""
        inputs = {"labelled": self.labelled, "test": self.test}
        inputs |= suite_inputs(context.config, context.workspace.root)
        inputs |= {"labels": self.labels} if self.labels else {}
        return inputs | ({"parent": self.parent} if self.parent else {})

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the label set, and the steps that remove training records."""
        return training_set_settings(context)

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the set with its rejections."""
        root, data = context.workspace.root, context.config.data
        parent = context.dataset(self.parent) if self.parent else None
        labelled = context.dataset(self.labelled).records
        measured = measured_on(context.config, context.dataset(self.test).records, root)
        version = next_training_set(
            parent,
            self._new_records(context, parent, labelled),
            parent_id=self.parent,
            labels=context.config.task.label_names or None,
            labelled=labelled,
            steps=[step.located(root) for step in data.every_round_steps],
            evaluation=concat(list(measured.values())),
        )
        return write_dataset(out, version.records, version.rejected, version.meta)

    def _new_records(self, context: RoundContext, parent: Dataset | None, labelled: pa.Table) -> pa.Table:
        """Returns the records that the parent does not hold: of the labelled files, and of this round's batch."""
        parent_ids = pa.array(parent.records["id"].to_pylist() if parent else [], pa.string())
        added = labelled.filter(compute.invert(compute.is_in(labelled["id"], value_set=parent_ids)))
        if self.labels is None:
            return added
        return pa.concat_tables([added, parquet.read_table(context.path(self.labels) / LABELS, schema=added.schema)])


def training_set_settings(context: RoundContext) -> dict[str, Any]:
    """Returns the label set and the steps that remove training records, for the key of a stage that builds a set."""
    root, steps = context.workspace.root, context.config.data.every_round_steps
    first = next((step for step in steps if step.removes_leaks), None)
    settings: dict[str, Any] = {"labels": context.config.task.label_names}
    settings["decontaminate"] = first.key() if first else None
    if others := [step.located(root).key() for step in steps if step is not first]:
        settings["drop"] = others
    return settings | suite_settings(context.config, root)


def rebuild_training_set(context: RoundContext, dataset: str) -> None:
    """Builds a damaged training set of an earlier round again from what it was made of.

    It stays damaged if the config or the suites have changed since, so that it would become another one.
    """
    try:
        context.path(dataset)
        return
    except DamagedArtifactError:
        log.info("%s is missing or damaged: building it again", dataset)
    for run in context.workspace.metadata.producers(dataset):
        inputs = run.inputs
        work = BuildDataset(inputs.get("parent"), inputs["labelled"], inputs["test"], inputs.get("labels"))
        if work.parent:
            rebuild_training_set(context, work.parent)
        if work.inputs(context) == inputs and canonical_json(work.settings(context)) == canonical_json(run.config):
            context.run(work)
            return


def _was_trained_on(context: RoundContext, dataset: str) -> bool:
    """Returns True if an earlier round trained on the same records, or there are none to train on."""
    # By records and not by the artifact's id, which also changes with the settings that removed records.
    records = set(context.dataset(dataset).records["id"].to_pylist())
    earlier = [state.dataset for state in finished_states(context.workspace)]
    return not records or any(set(context.dataset(id).records["id"].to_pylist()) == records for id in earlier if id)
