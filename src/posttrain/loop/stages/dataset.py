"""Dataset: the training set of a round, from its parent, the labelled files and the new labels."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.records.schema import concat
from posttrain.data.sets.training_set import next_training_set
from posttrain.data.versions.version import Dataset, write_dataset
from posttrain.loop.context import RoundContext
from posttrain.loop.stages.collect import RoundData
from posttrain.loop.stages.label import LABELS
from posttrain.loop.suites import measured_on, suite_digests, suite_settings
from posttrain.store.artifacts import Artifact


def build_training_set(
    turn: RoundContext, parent: str | None, collected: RoundData, labels: Artifact | None
) -> Artifact:
    """The training set: its parent, the labelled files' records as they are now and this round's labels.

    What gives away what is measured on at present is taken out, of the parent's records too.

    Args:
        turn: the round.
        parent: the dataset artifact to build on.
        collected: the labelled files' records and the test set.
        labels: this round's labels; None where nothing was asked for.
    """
    decontaminate = turn.config.data.decontamination
    drops = [step.located(turn.workspace.root) for step in turn.config.data.drops]

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        before = turn.dataset(parent) if parent else None
        labelled = turn.dataset(collected.labelled.id).records
        measured = measured_on(turn.config, turn.dataset(collected.test.id).records, turn.workspace.root)
        version = next_training_set(
            before,
            _new_records(turn, before, labelled, labels),
            parent_id=parent,
            labels=turn.config.task.label_set or None,
            labelled=labelled,
            decontaminate=decontaminate,
            measured=concat(list(measured.values())),
            drops=drops,
        )
        return write_dataset(out, version.records, version.rejected, version.meta)

    inputs = {"labelled": collected.labelled.id, "test": collected.test.id}
    inputs |= suite_digests(turn.config, turn.workspace.root)
    inputs |= {"labels": labels.id} if labels else {}
    inputs |= {"parent": parent} if parent else {}
    settings: dict[str, Any] = {"labels": turn.config.task.label_set}
    settings["decontaminate"] = decontaminate.key() if decontaminate else None
    if drops:
        settings["drop"] = [step.key() for step in drops]
    settings |= suite_settings(turn.config, turn.workspace.root)
    artifact = turn.stage("dataset", "dataset", inputs, settings, work, seeded=False)
    if turn.number and not turn.workspace.metadata.arm:
        turn.workspace.metadata.name_artifact("train", artifact.id, parent)
    return artifact


def _new_records(turn: RoundContext, before: Dataset | None, labelled: pa.Table, labels: Artifact | None) -> pa.Table:
    """Records that the parent does not hold: of the labelled files, and of this round's batch."""
    known = pa.array(before.records["id"].to_pylist() if before else [], pa.string())
    came = labelled.filter(pa.compute.invert(pa.compute.is_in(labelled["id"], value_set=known)))
    if labels is None:
        return came
    return pa.concat_tables([came, parquet.read_table(turn.path(labels.id) / LABELS, schema=came.schema)])
