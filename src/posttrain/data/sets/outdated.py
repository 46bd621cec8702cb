"""Training records that the labelled files of today no longer bear out."""

import json

import pyarrow as pa

from posttrain.data.sets.flow import Work
from posttrain.data.steps.step import Outcome, Rejection, part, places


def outdated(labelled: pa.Table) -> Work:
    """A step that takes out what the labelled files answer otherwise now, and what left them.

    Records that an annotator answered stay, unless a labelled file holds their input with another answer.

    Args:
        labelled: RECORD table of what the labelled files hold now.
    """
    current = set(labelled["id"].to_pylist())
    inputs = dict(zip(labelled["input_id"].to_pylist(), places(labelled), strict=True))

    def step(table: pa.Table) -> Outcome:
        rejections: dict[int, Rejection] = {}
        columns = (table[name].to_pylist() for name in ("id", "input_id", "meta"))
        for row, (identity, asked, meta) in enumerate(zip(*columns, strict=True)):
            if identity in current:
                continue
            if asked in inputs:
                rejections[row] = Rejection("answered anew", f"another answer stands at {inputs[asked]}")
            elif "labelled_by" not in json.loads(meta or "{}"):
                rejections[row] = Rejection("left the files", "no labelled file holds it any more")
        return part(table, "labelled files", rejections)

    return step
