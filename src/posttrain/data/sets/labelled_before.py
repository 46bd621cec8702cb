"""Inputs of the pool that have a label already."""

import pyarrow as pa

from posttrain.data.sets.flow import Work
from posttrain.data.steps.step import Outcome, Rejection, part, places


def already_labelled(labelled: pa.Table) -> Work:
    """A step that takes out the inputs that ``labelled`` holds."""
    known = dict(zip(labelled["input_id"].to_pylist(), places(labelled), strict=True))

    def step(table: pa.Table) -> Outcome:
        rejections = {
            row: Rejection("already labelled", f"the same input as {known[identity]}")
            for row, identity in enumerate(table["input_id"].to_pylist())
            if identity in known
        }
        return part(table, "labelled", rejections)

    return step
