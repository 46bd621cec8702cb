"""How often the champion was right on the pool, by the labels of the records that exploration drew."""

import numpy as np
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.loop.stages.choose import BATCH, SCORES
from posttrain.loop.stages.labelling import LABELS
from posttrain.select.estimates import Share, share_of_pool
from posttrain.store.workspace import Workspace


def pool_agreement(workspace: Workspace, selection: str, labels: str) -> Share | None:
    """The share of the pool on which the champion's answers are those that people would give.

    All other records of a batch were chosen as they are hard, and say little of the rest. Written answers may be right
    in other words, of which only people could say so: of free text nothing is estimated.

    Args:
        workspace: where both lie.
        selection: id of the batch.
        labels: id of its labels.

    Returns:
        None where none was drawn, the champion had not been trained yet, or there is no closed label set.
    """
    batch = parquet.read_table(workspace.artifacts.path(selection) / BATCH)
    if "inclusion" not in batch.column_names:
        return None
    scores = workspace.metadata.producers(selection)[-1].inputs["scores"]
    if "probabilities" not in parquet.read_schema(workspace.artifacts.path(scores) / SCORES).names:
        return None
    drawn = batch.filter(compute.and_(compute.is_valid(batch["inclusion"]), compute.is_valid(batch["predicted"])))
    answers = parquet.read_table(workspace.artifacts.path(labels) / LABELS, columns=["id", "completion"]).to_pydict()
    answer_of = dict(zip(answers["id"], answers["completion"], strict=True))
    rows = [row for row in drawn.to_pylist() if answer_of.get(row["id"]) is not None]
    agrees = np.array([answer_of[row["id"]] == row["predicted"] for row in rows], bool)
    return share_of_pool(agrees, np.array([row["inclusion"] for row in rows], np.float64))
